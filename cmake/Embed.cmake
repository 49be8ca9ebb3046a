# gpupool_embed(TARGET NAMESPACE ID folder files...): puts the files, as they are, into the target: a source is made that
# defines NAMESPACE::ID, which base/embedded.h declares the type of. The build knows no other way to carry a file.
function(gpupool_embed target namespace id folder)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${id}.cpp)
  list(TRANSFORM ARGN PREPEND ${folder}/ OUTPUT_VARIABLE files)
  add_custom_command(OUTPUT ${source}
    COMMAND ${CMAKE_COMMAND} -DNAMESPACE=${namespace} -DID=${id} -DFOLDER=${folder} "-DFILES=${ARGN}" -DOUTPUT=${source}
      -P ${CMAKE_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${files} ${CMAKE_SOURCE_DIR}/cmake/embed.cmake COMMENT "embedding ${id}" VERBATIM)
  target_sources(${target} PRIVATE ${source})
  set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
