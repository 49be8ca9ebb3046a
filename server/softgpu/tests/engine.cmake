gpupool_test(softgpu_engine_ptx unit tests/engine_harness.cpp tests/engine_ptx_test.cpp LIBS softgpu_engine)
gpupool_test(softgpu_engine_golden unit tests/engine_harness.cpp tests/engine_cases.cpp tests/instruction_forms.cpp tests/engine_golden_test.cpp
  LIBS softgpu_engine)
target_compile_definitions(softgpu_engine_golden PRIVATE
  GPUPOOL_GOLDEN="${CMAKE_CURRENT_SOURCE_DIR}/tests/engine_golden.txt")

# Records tests/engine_golden.txt on a machine with an NVIDIA GPU.
add_executable(softgpu_hardware_cases EXCLUDE_FROM_ALL tests/hardware_cases.cpp tests/engine_cases.cpp tests/instruction_forms.cpp)
target_link_libraries(softgpu_hardware_cases PRIVATE gpupool_flags base cuda_headers)

if(NVCC)
  foreach(row kernels:75 kernels90:90)
    string(REPLACE ":" ";" row ${row})
    list(GET row 0 name)
    list(GET row 1 target)
    add_custom_command(OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}.ptx
      COMMAND ${NVCC} -ptx -arch=compute_${target} -std=c++17 -diag-suppress 20054
        ${CMAKE_CURRENT_SOURCE_DIR}/tests/${name}.cu -o ${CMAKE_CURRENT_BINARY_DIR}/${name}.ptx
      DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/${name}.cu VERBATIM)
    list(APPEND engine_kernels ${CMAKE_CURRENT_BINARY_DIR}/${name}.ptx)
  endforeach()
  add_custom_target(engine_kernels DEPENDS ${engine_kernels})
  gpupool_test(softgpu_engine_programs unit tests/engine_harness.cpp tests/engine_programs_test.cpp
    tests/engine_matrix_test.cpp LIBS softgpu_engine)
  add_dependencies(softgpu_engine_programs engine_kernels)
  target_compile_definitions(softgpu_engine_programs PRIVATE
    GPUPOOL_KERNELS_PTX="${CMAKE_CURRENT_BINARY_DIR}/kernels.ptx"
    GPUPOOL_KERNELS90_PTX="${CMAKE_CURRENT_BINARY_DIR}/kernels90.ptx")
endif()
