# client_local: the part of libcuda.so.1 that never touches the wire. The including CMakeLists.txt links it into the
# library; unit tests link it alone.
add_library(client_local STATIC
  ${CMAKE_CURRENT_LIST_DIR}/context_storage.cpp
  ${CMAKE_CURRENT_LIST_DIR}/contexts.cpp
  ${CMAKE_CURRENT_LIST_DIR}/errors.cpp
  ${CMAKE_CURRENT_LIST_DIR}/export_tables.cpp
  ${CMAKE_CURRENT_LIST_DIR}/image.cpp
  ${CMAKE_CURRENT_LIST_DIR}/lookup.cpp
  ${CMAKE_CURRENT_LIST_DIR}/parameters.cpp
  ${CMAKE_CURRENT_LIST_DIR}/process.cpp
  ${CMAKE_CURRENT_LIST_DIR}/thread_state.cpp
  ${CMAKE_CURRENT_LIST_DIR}/visible_devices.cpp)
gpupool_apart(${CMAKE_CURRENT_LIST_DIR}/lookup.cpp)  # for whoever defines exports()
target_link_libraries(client_local PUBLIC base cuda_headers)
if(GPUPOOL_CUDART_SELFTEST)
  target_sources(client_local PRIVATE ${CMAKE_CURRENT_LIST_DIR}/selftest.cpp)
endif()
target_compile_definitions(client_local PUBLIC GPUPOOL_CUDART_SELFTEST=$<BOOL:${GPUPOOL_CUDART_SELFTEST}>)

function(client_local_test name)
  gpupool_test(client_${name}_test unit ${CMAKE_CURRENT_LIST_DIR}/tests/${name}_test.cpp ${ARGN} LIBS client_local)
endfunction()

client_local_test(handles)
client_local_test(contexts)
client_local_test(errors)
target_compile_definitions(client_errors_test PRIVATE GPUPOOL_CUDA_INCLUDE="${CUDA_INCLUDE}")
client_local_test(export_tables)
client_local_test(image)
client_local_test(lookup)
client_local_test(parameters)
client_local_test(visible_devices)
if(GPUPOOL_CUDART_SELFTEST)
  client_local_test(selftest)
endif()
client_local_test(process)
client_local_test(write_all)
client_local_test(holder ${CMAKE_CURRENT_LIST_DIR}/holder.cpp)

# The table of names against the headers of the toolkit that this build uses.
find_program(PYTHON3 python3)
mark_as_advanced(PYTHON3)
if(PYTHON3)
  add_test(NAME client_proc_address_table
    COMMAND ${PYTHON3} ${CMAKE_SOURCE_DIR}/schema/tools/proc_address.py --check ${CUDA_INCLUDE})
  set_tests_properties(client_proc_address_table PROPERTIES LABELS unit TIMEOUT 60)
endif()

# A real runtime on the local part alone, where the toolkit has one.
find_library(CUDART libcudart.so.13 HINTS ${CUDA_INCLUDE}/../lib ${CUDA_INCLUDE}/../lib64)
mark_as_advanced(CUDART)
if(CUDART AND GPUPOOL_CUDART_SELFTEST)
  add_library(client_test_driver SHARED ${CMAKE_CURRENT_LIST_DIR}/tests/test_driver.cpp)
  target_link_libraries(client_test_driver PRIVATE client_local)
  set_target_properties(client_test_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/test_driver)
  gpupool_test(client_cudart_test contract ${CMAKE_CURRENT_LIST_DIR}/tests/cudart_test.cpp)
  target_compile_definitions(client_cudart_test PRIVATE GPUPOOL_CUDART="${CUDART}"
    GPUPOOL_TEST_DRIVER="$<TARGET_FILE:client_test_driver>")
  add_dependencies(client_cudart_test client_test_driver)
endif()
