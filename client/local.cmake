# client_local: the part of libcuda.so.1 that never touches the wire. The including CMakeLists.txt links it into the
# library; unit tests link it alone.
add_library(client_local STATIC
  ${CMAKE_CURRENT_LIST_DIR}/context_storage.cpp
  ${CMAKE_CURRENT_LIST_DIR}/contexts.cpp
  ${CMAKE_CURRENT_LIST_DIR}/process.cpp
  ${CMAKE_CURRENT_LIST_DIR}/thread_state.cpp)
target_link_libraries(client_local PUBLIC base cuda_headers)

function(client_local_test name)
  gpupool_test(client_${name}_test unit ${CMAKE_CURRENT_LIST_DIR}/tests/${name}_test.cpp ${ARGN} LIBS client_local)
endfunction()

client_local_test(handles)
client_local_test(contexts)
client_local_test(process)
