# The fuzzers themselves. Each compiles what it tests from the product's own libraries; where a fuzzer puts a file of
# its own in place of one of them, it lists the others.
include(${CMAKE_CURRENT_LIST_DIR}/targets.cmake)
add_custom_target(fuzzers)

function(fuzzer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(fuzz_${name} ${name}.cpp ${ARG_SOURCES})
  target_include_directories(fuzz_${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(fuzz_${name} PRIVATE gpupool_flags ${ARG_LIBS})
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  if(name IN_LIST fuzz_targets)
    add_dependencies(fuzzers fuzz_${name})
  endif()
endfunction()

set(worker ${CMAKE_SOURCE_DIR}/server/worker)
add_library(fuzz_worker STATIC
  ${worker}/dispatch.cpp ${worker}/images.cpp ${worker}/objects.cpp ${worker}/record.cpp ${worker}/session.cpp
  ${worker}/space.cpp ${worker}/warm.cpp ${worker}/words.cpp ${worker}/calls/context.cpp ${worker}/calls/copy.cpp
  ${worker}/calls/graph.cpp ${worker}/calls/launch.cpp ${worker}/calls/memory.cpp ${worker}/calls/module.cpp
  ${worker}/calls/stream.cpp ${worker}/calls/texture.cpp worker/bench.cpp worker/fake_driver.cpp
  worker/stand_ins.cpp)
target_link_libraries(fuzz_worker PUBLIC cuda_headers transports call_rows fatbin image_cache)

fuzzer(frames LIBS fuzz_worker)
fuzzer(call_rows LIBS fuzz_worker)

set(client ${CMAKE_SOURCE_DIR}/client)
fuzzer(client_image SOURCES ${client}/image.cpp LIBS base cuda_headers)

fuzzer(regions LIBS transports)
fuzzer(ring LIBS transports)
set(transports ${CMAKE_SOURCE_DIR}/transports)
fuzzer(ucx_messages SOURCES ${transports}/regions.cpp ${transports}/ring.cpp ${transports}/ring_connection.cpp
  ${transports}/shared_memory.cpp ${transports}/network_address.cpp ${transports}/ucx.cpp
  ${transports}/ucx_receive.cpp ${transports}/waiting.cpp LIBS base)
target_include_directories(fuzz_ucx_messages SYSTEM PRIVATE ${UCX_INCLUDE})

fuzzer(fatbin LIBS fatbin)
fuzzer(image_cache LIBS image_cache)
fuzzer(options LIBS options)
set(ptx ${CMAKE_SOURCE_DIR}/server/softgpu/ptx)
fuzzer(ptx_parser SOURCES ${ptx}/lexer.cpp ${ptx}/parser.cpp ${ptx}/instruction_parser.cpp)
fuzzer(ptx_translate LIBS softgpu_engine)
