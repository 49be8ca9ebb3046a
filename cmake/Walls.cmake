# gpupool_walls(PART parts...): nothing of PART compiles while one of its files includes a header of another part than
# these, or of a higher layer of PART (the list layers_PART, if there is one: patterns of paths in PART, lowest first). A
# step before the compilers, so that the message names the rule.
function(gpupool_walls part)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${part}/*.h ${CMAKE_SOURCE_DIR}/${part}/*.cpp)
  set(stamp ${CMAKE_BINARY_DIR}/walls/${part})
  add_custom_command(OUTPUT ${stamp}
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR} -DPART=${part} "-DMAY=${ARGN}"
      "-DLAYERS=${layers_${part}}" -DSTAMP=${stamp}
      -P ${CMAKE_SOURCE_DIR}/cmake/walls.cmake
    DEPENDS ${files} ${CMAKE_SOURCE_DIR}/cmake/walls.cmake COMMENT "includes of ${part}" VERBATIM)
  add_custom_target(walls_${part} DEPENDS ${stamp})
  gpupool_behind_walls(${CMAKE_SOURCE_DIR}/${part} walls_${part})
endfunction()

# Every target of the folder and of those below.
function(gpupool_behind_walls folder walls)
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(type MATCHES "LIBRARY|EXECUTABLE" AND NOT type STREQUAL INTERFACE_LIBRARY)
      add_dependencies(${target} ${walls})
    endif()
  endforeach()
  get_property(below DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(one IN LISTS below)
    gpupool_behind_walls(${one} ${walls})
  endforeach()
endfunction()
