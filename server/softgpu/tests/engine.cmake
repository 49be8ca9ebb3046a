gpupool_test(softgpu_engine_golden unit tests/engine_harness.cpp tests/engine_cases.cpp tests/engine_golden_test.cpp
  LIBS softgpu_engine)
target_compile_definitions(softgpu_engine_golden PRIVATE
  GPUPOOL_GOLDEN="${CMAKE_CURRENT_SOURCE_DIR}/tests/engine_golden.txt")

# Records tests/engine_golden.txt on a machine with an NVIDIA GPU.
add_executable(softgpu_hardware_cases EXCLUDE_FROM_ALL tests/hardware_cases.cpp tests/engine_cases.cpp)
target_link_libraries(softgpu_hardware_cases PRIVATE gpupool_flags base cuda_headers)

if(NVCC)
  set(kernels_ptx ${CMAKE_CURRENT_BINARY_DIR}/kernels.ptx)
  add_custom_command(OUTPUT ${kernels_ptx}
    COMMAND ${NVCC} -ptx -arch=compute_75 -std=c++17 ${CMAKE_CURRENT_SOURCE_DIR}/tests/kernels.cu -o ${kernels_ptx}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/kernels.cu VERBATIM)
  add_custom_target(engine_kernels DEPENDS ${kernels_ptx})
  gpupool_test(softgpu_engine_programs unit tests/engine_harness.cpp tests/engine_programs_test.cpp LIBS softgpu_engine)
  add_dependencies(softgpu_engine_programs engine_kernels)
  target_compile_definitions(softgpu_engine_programs PRIVATE GPUPOOL_KERNELS_PTX="${kernels_ptx}")
endif()
