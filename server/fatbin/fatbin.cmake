# Fatbins and the code in them, for the worker and the software GPU.
pkg_check_modules(LZ4 REQUIRED IMPORTED_TARGET liblz4)
pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET libzstd)
set(fatbin_folder ${CMAKE_CURRENT_LIST_DIR})
add_library(fatbin STATIC ${fatbin_folder}/cubin_symbols.cpp ${fatbin_folder}/fatbin.cpp
  ${fatbin_folder}/ptx_symbols.cpp ${fatbin_folder}/symbols.cpp)
target_include_directories(fatbin PUBLIC ${CMAKE_SOURCE_DIR})
target_link_libraries(fatbin PUBLIC gpupool_flags PRIVATE -l:liblz4.a -l:libzstd.a)
gpupool_test(fatbin_test unit ${fatbin_folder}/tests/fatbin_test.cpp LIBS fatbin)
gpupool_test(symbols_test unit ${fatbin_folder}/tests/symbols_test.cpp LIBS fatbin)

# What nvcc makes of variables and of the heap, where there is an nvcc: <build>/server/code_images/<name>.
if(NVCC)
  set(code_images ${CMAKE_CURRENT_BINARY_DIR}/code_images)
  file(MAKE_DIRECTORY ${code_images})
  function(code_image name source)
    set(from ${fatbin_folder}/tests/${source})
    add_custom_command(OUTPUT ${code_images}/${name}
      COMMAND ${NVCC} -std=c++17 -diag-suppress 177,20054 ${ARGN} ${from} -o ${code_images}/${name}
      DEPENDS ${from} COMMENT "nvcc ${name}" VERBATIM)
    set_property(GLOBAL APPEND PROPERTY code_images ${code_images}/${name})
  endfunction()
  code_image(variables.ptx variables.cu -ptx -arch=compute_75)
  code_image(variables.sm_75.cubin variables.cu -cubin -arch=sm_75)
  code_image(variables.sm_90.cubin variables.cu -cubin -arch=sm_90)
  code_image(variables.sm_100.cubin variables.cu -cubin -arch=sm_100)
  code_image(variables.relocatable.cubin variables.cu -cubin -arch=sm_90 -rdc=true)
  code_image(variables.relocatable.ptx variables.cu -ptx -arch=compute_90 -rdc=true)
  set(several -fatbin -gencode arch=compute_75,code=compute_75 -gencode arch=compute_80,code=sm_80
    -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=sm_90)
  code_image(variables.fatbin variables.cu ${several})
  code_image(variables.plain.fatbin variables.cu ${several} -Xfatbin --compress=false)
  foreach(heap RANGE 5)
    code_image(heap${heap}.ptx heap.cu -ptx -arch=compute_75 -DHEAP=${heap})
    code_image(heap${heap}.cubin heap.cu -cubin -arch=sm_90 -DHEAP=${heap})
    code_image(heap${heap}.relocatable.cubin heap.cu -cubin -arch=sm_90 -rdc=true -DHEAP=${heap})
  endforeach()
  # What programs for which the driver links hold.
  code_image(variables.relocatable.fatbin variables.cu -fatbin -rdc=true -arch=compute_75)
  code_image(heap0.relocatable.fatbin heap.cu -fatbin -rdc=true -arch=compute_75 -DHEAP=0)
  code_image(heap1.relocatable.fatbin heap.cu -fatbin -rdc=true -arch=compute_75 -DHEAP=1)
  code_image(linked75.fatbin variables.cu -fatbin -gencode arch=compute_75,code=sm_75)
  # Two files linked: both have a local $str.
  foreach(part variables heap)
    code_image(${part}.o ${part}.cu -dc -arch=sm_90 -DHEAP=1)
  endforeach()
  add_custom_command(OUTPUT ${code_images}/linked.cubin
    COMMAND ${NVCC} -arch=sm_90 -dlink -cubin ${code_images}/variables.o ${code_images}/heap.o
      -o ${code_images}/linked.cubin
    DEPENDS ${code_images}/variables.o ${code_images}/heap.o COMMENT "nvcc linked.cubin" VERBATIM)
  set_property(GLOBAL APPEND PROPERTY code_images ${code_images}/linked.cubin)
  get_property(images GLOBAL PROPERTY code_images)
  add_custom_target(code_images DEPENDS ${images})
  add_dependencies(symbols_test code_images)
  target_compile_definitions(symbols_test PRIVATE CODE_IMAGES="${code_images}")
  get_filename_component(toolkit ${NVCC} REALPATH)
  find_file(CUDADEVRT libcudadevrt.a HINTS ${toolkit}/../../lib64 ${toolkit}/../../lib
    ${toolkit}/../../targets/x86_64-linux/lib)
  mark_as_advanced(CUDADEVRT)
  if(CUDADEVRT)
    target_compile_definitions(symbols_test PRIVATE DEVICE_RUNTIME="${CUDADEVRT}")
  endif()
endif()
