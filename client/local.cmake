# client_local: the part of libcuda.so.1 that never touches the wire. The including CMakeLists.txt links it into the
# library; unit tests link it alone.
function(client_local_test name)
  gpupool_test(client_${name}_test unit ${CMAKE_CURRENT_LIST_DIR}/tests/${name}_test.cpp ${ARGN}
    LIBS client_local cuda_headers)
endfunction()

add_library(client_local INTERFACE)
target_link_libraries(client_local INTERFACE base cuda_headers)

client_local_test(handles)
