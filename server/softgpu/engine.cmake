# softgpu_engine: everything below engine.h. LLVM 19 where there is one, else the newest of 18, 17, 16.
foreach(version 19 18 17 16)
  if(NOT LLVM_FOUND)
    find_package(LLVM CONFIG QUIET NO_DEFAULT_PATH PATHS /usr/lib/llvm-${version}/lib/cmake/llvm)
  endif()
endforeach()
if(NOT LLVM_FOUND)
  find_package(LLVM CONFIG QUIET)
endif()
if(NOT LLVM_FOUND OR LLVM_VERSION_MAJOR LESS 16)
  message(FATAL_ERROR "the software GPU needs LLVM 16 to 19 (llvm-19-dev)")
endif()
message(STATUS "software GPU: LLVM ${LLVM_PACKAGE_VERSION}")

gpupool_apart(engine.cpp)  # its Kernel is everybody's name for what only it knows
add_library(softgpu_engine STATIC
  address_plan.cpp
  engine.cpp
  ptx/lexer.cpp
  ptx/parser.cpp
  ptx/instruction_parser.cpp
  codegen/jit.cpp
  codegen/program.cpp
  codegen/translate_async.cpp
  codegen/translate_bits.cpp
  codegen/translate_control.cpp
  codegen/translate_convert.cpp
  codegen/translate_float.cpp
  codegen/translate_function.cpp
  codegen/translate_half.cpp
  codegen/translate_integer.cpp
  codegen/translate_matrix.cpp
  codegen/translate_memory.cpp
  codegen/translate_sync.cpp
  codegen/translate_texture.cpp
  codegen/translate_values.cpp
  runtime/conditions.cpp
  runtime/device_functions.cpp
  runtime/fault.cpp
  runtime/fiber.cpp
  runtime/function_slots.cpp
  runtime/math.cpp
  runtime/matrix.cpp
  runtime/mbarrier.cpp
  runtime/memory.cpp
  runtime/pool.cpp
  runtime/symbols.cpp
  runtime/sync.cpp
  runtime/texture.cpp
  runtime/worker.cpp)
target_include_directories(softgpu_engine SYSTEM PRIVATE ${LLVM_INCLUDE_DIRS})
target_link_libraries(softgpu_engine PUBLIC base)
# Linked statically where the distribution has the archives, so that the library runs on any node and every worker is
# spared the 20 ms that relocating all of libLLVM takes.
llvm_map_components_to_libnames(llvm_libraries orcjit native passes)
list(GET llvm_libraries 0 llvm_first)
if(TARGET LLVM AND NOT TARGET ${llvm_first})
  set(llvm_libraries LLVM)
endif()
target_link_libraries(softgpu_engine PRIVATE ${llvm_libraries})
# These run on fibers: sanitizers follow neither the switches nor the ends without return.
set_source_files_properties(
  runtime/device_functions.cpp runtime/fault.cpp runtime/fiber.cpp runtime/math.cpp runtime/matrix.cpp runtime/mbarrier.cpp runtime/symbols.cpp
  runtime/sync.cpp runtime/texture.cpp runtime/worker.cpp
  PROPERTIES COMPILE_OPTIONS "-fno-sanitize=all")

add_executable(ptx-check tools/ptx_check.cpp)
target_link_libraries(ptx-check PRIVATE softgpu_engine)

# Engine tests: PTX text in the sources, and kernels that nvcc compiles where there is one.
if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/tests/engine.cmake)
  include(${CMAKE_CURRENT_SOURCE_DIR}/tests/engine.cmake)
endif()
