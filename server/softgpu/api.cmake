# The driver API of the software GPU: lib/libcuda-soft.so, loaded by the worker where there is no NVIDIA driver.
set(api_sources
  api/array.cpp api/attributes.cpp api/callback.cpp api/capture.cpp api/code.cpp api/conditional.cpp api/context.cpp api/context_settings.cpp api/copy.cpp
  api/device.cpp api/error.cpp api/event.cpp api/fatbin.cpp api/graph.cpp api/graph_dot.cpp api/graph_exec.cpp api/graph_memory.cpp
  api/graph_nodes.cpp api/green.cpp api/heap.cpp api/launch.cpp api/library.cpp api/link.cpp api/lookup.cpp api/memcpy.cpp
  api/memop.cpp api/memory.cpp api/memory_map.cpp api/memset.cpp api/module.cpp api/occupancy.cpp api/pointer.cpp
  api/pool.cpp api/sampler.cpp api/stream.cpp api/stream_queue.cpp api/texture.cpp api/user_object.cpp
  api/virtual_memory.cpp)
list(TRANSFORM api_sources PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_library(cuda-soft SHARED ${api_sources})
target_include_directories(cuda-soft PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(cuda-soft PRIVATE gpupool_flags cuda_headers softgpu_engine fatbin)
# Unloading it under its own threads would crash; programs keep drivers for good anyway.
target_link_options(cuda-soft PRIVATE
  -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/api/exports.map -Wl,-z,nodelete -Wl,-z,defs)
set_target_properties(cuda-soft PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/api/exports.map)

set(api_tests ${CMAKE_CURRENT_LIST_DIR}/tests)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${api_tests}/api_kernels.ptx)
file(READ ${api_tests}/api_kernels.ptx API_KERNELS)
configure_file(${api_tests}/api_kernels.cpp.in ${CMAKE_CURRENT_BINARY_DIR}/api_kernels.cpp @ONLY)
gpupool_test(softgpu_api_test unit
  ${api_tests}/api_context.cpp ${api_tests}/api_graph.cpp ${api_tests}/api_green.cpp ${api_tests}/api_memory.cpp ${api_tests}/api_module.cpp
  ${api_tests}/api_stream.cpp ${api_tests}/api_texture.cpp ${CMAKE_CURRENT_BINARY_DIR}/api_kernels.cpp
  LIBS cuda-soft cuda_headers PkgConfig::LZ4 PkgConfig::ZSTD)
gpupool_test(softgpu_open_test unit ${api_tests}/api_open.cpp)
target_compile_definitions(softgpu_open_test PRIVATE SOFT_LIBRARY="$<TARGET_FILE:cuda-soft>")
add_dependencies(softgpu_open_test cuda-soft)
# What static destructors may still do: a program of its own, because it ends.
add_executable(softgpu_exit_test ${api_tests}/api_exit.cpp)
target_link_libraries(softgpu_exit_test PRIVATE gpupool_flags cuda-soft cuda_headers)
add_test(NAME softgpu_exit_test COMMAND softgpu_exit_test)
set_tests_properties(softgpu_exit_test PROPERTIES LABELS unit TIMEOUT 60 PASS_REGULAR_EXPRESSION clean)
# Two processes that share memory.
add_executable(softgpu_share_test ${api_tests}/api_share.cpp)
target_link_libraries(softgpu_share_test PRIVATE gpupool_flags cuda-soft cuda_headers)
add_test(NAME softgpu_share_test COMMAND softgpu_share_test)
set_tests_properties(softgpu_share_test PROPERTIES LABELS unit TIMEOUT 90)
# The same calls in two processes.
add_executable(softgpu_repeat_test ${api_tests}/api_repeat.cpp)
target_link_libraries(softgpu_repeat_test PRIVATE gpupool_flags cuda-soft cuda_headers)
add_test(NAME softgpu_repeat_test COMMAND softgpu_repeat_test)
set_tests_properties(softgpu_repeat_test PROPERTIES LABELS unit TIMEOUT 90)
# What is read of a code image is what the driver finds.
if(TARGET code_images)
  gpupool_test(softgpu_symbols_test unit ${api_tests}/api_symbols.cpp ${CMAKE_CURRENT_BINARY_DIR}/api_kernels.cpp
    LIBS cuda-soft cuda_headers fatbin)
  add_dependencies(softgpu_symbols_test code_images)
  target_compile_definitions(softgpu_symbols_test PRIVATE CODE_IMAGES="${code_images}")
endif()
