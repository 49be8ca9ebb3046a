# The fuzzers themselves. Each compiles what it tests from the product's own libraries; where a fuzzer puts a file of
# its own in place of one of them, it lists the others.
include(${CMAKE_CURRENT_LIST_DIR}/targets.cmake)
add_custom_target(fuzzers)

add_library(fuzz_throwing OBJECT throwing.cpp)
target_link_options(fuzz_throwing INTERFACE LINKER:--wrap=__cxa_throw,--wrap=__cxa_rethrow)

function(fuzzer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(fuzz_${name} ${name}.cpp ${ARG_SOURCES})
  set_target_properties(fuzz_${name} PROPERTIES UNITY_BUILD OFF)
  target_include_directories(fuzz_${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(fuzz_${name} PRIVATE gpupool_flags fuzz_throwing ${ARG_LIBS})
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  if(name IN_LIST fuzz_targets)
    add_dependencies(fuzzers fuzz_${name})
  endif()
endfunction()

set(worker ${CMAKE_SOURCE_DIR}/server/worker)
add_library(fuzz_worker STATIC
  ${worker}/account.cpp ${worker}/calls/array.cpp ${worker}/dispatch.cpp ${worker}/images.cpp ${worker}/loss.cpp
  ${worker}/objects.cpp ${worker}/record.cpp ${worker}/scrubber.cpp ${worker}/event_times.cpp ${worker}/session.cpp ${worker}/session_greeting.cpp ${worker}/session_move.cpp ${worker}/session_told.cpp ${worker}/space.cpp ${worker}/space_host.cpp ${worker}/space_move.cpp ${worker}/space_suspend.cpp ${worker}/warm.cpp
  ${worker}/host_views.cpp ${worker}/words.cpp ${worker}/calls/context.cpp ${worker}/calls/copy.cpp ${worker}/array_scrub.cpp
  ${worker}/calls/graph.cpp ${worker}/calls/graph_text.cpp ${worker}/calls/green.cpp ${worker}/calls/launch.cpp ${worker}/calls/link.cpp
  ${worker}/calls/memory.cpp
  ${worker}/calls/module.cpp ${worker}/calls/stream.cpp ${worker}/calls/texture.cpp worker/bench.cpp
  ${worker}/calls/share.cpp ${worker}/device_pieces.cpp ${worker}/page_hasher.cpp
  ${worker}/shared_events.cpp ${worker}/space_share.cpp ${worker}/space_spare.cpp ${worker}/spare_pages.cpp
  worker/fake_code.cpp worker/fake_driver.cpp worker/fake_memory.cpp worker/stand_ins.cpp)
target_link_libraries(fuzz_worker PUBLIC cuda_headers transports call_rows fatbin image_cache)

fuzzer(frames LIBS fuzz_worker)
fuzzer(call_rows LIBS fuzz_worker)

set(client ${CMAKE_SOURCE_DIR}/client)
fuzzer(client_replies SOURCES ${client}/failover.cpp ${client}/call_log.cpp ${client}/log_memory.cpp ${client}/replay.cpp ${client}/session.cpp ${client}/session_move.cpp ${client}/session_notices.cpp
  ${client}/move_course.cpp ${client}/order_lock.cpp ${client}/transfers.cpp ${client}/words.cpp ${client}/holder.cpp ${client}/process.cpp LIBS transports call_rows)
target_compile_definitions(fuzz_client_replies PRIVATE __CUDA_API_VERSION_INTERNAL)
fuzzer(client_image SOURCES ${client}/image.cpp LIBS base cuda_headers)

# Of the front and of the tool what is met here, no more: this build is a part of every run of the tests.
set(front ${CMAKE_SOURCE_DIR}/server/front)
add_library(fuzz_pool STATIC
  ${front}/admission.cpp ${front}/control.cpp ${front}/leases.cpp ${front}/memory_account.cpp
  ${front}/session_arrivals.cpp ${front}/session_memory.cpp ${front}/session_moves.cpp ${front}/session_orders.cpp ${front}/session_shares.cpp ${front}/offers.cpp ${front}/share_receipts.cpp
  ${front}/server_state.cpp ${front}/sessions.cpp ${front}/suspension.cpp
  ${front}/worker_child.cpp ${front}/worker_parent.cpp ${CMAKE_SOURCE_DIR}/server/spawner/become_worker.cpp ${front}/worker_program.cpp ${front}/worker_pool.cpp ${front}/doors.cpp ${front}/worker_pools.cpp ${front}/worker_starts.cpp ${CMAKE_SOURCE_DIR}/server/walls/devices.cpp
  ${CMAKE_SOURCE_DIR}/pool-manager/cli/figures.cpp ${CMAKE_SOURCE_DIR}/pool-manager/cli/holder.cpp ${CMAKE_SOURCE_DIR}/pool-manager/cli/holder_failover.cpp ${CMAKE_SOURCE_DIR}/pool-manager/cli/holder_lease.cpp ${CMAKE_SOURCE_DIR}/pool-manager/cli/places.cpp ${CMAKE_SOURCE_DIR}/pool-manager/cli/session_opener.cpp)
gpupool_apart(${CMAKE_SOURCE_DIR}/server/walls/devices.cpp)
target_link_libraries(fuzz_pool PUBLIC pool_service record_schema transports)
target_compile_options(pool_schema PUBLIC "SHELL:-include ${CMAKE_CURRENT_SOURCE_DIR}/kj_and_clang.h")
target_compile_options(record_schema PUBLIC "SHELL:-include ${CMAKE_CURRENT_SOURCE_DIR}/kj_and_clang.h")
fuzzer(handshake LIBS fuzz_pool)
fuzzer(lease_rpc LIBS fuzz_pool)
fuzzer(holder SOURCES ${client}/holder.cpp ${client}/process.cpp LIBS fuzz_pool cuda_headers)

fuzzer(regions LIBS transports)
fuzzer(ring LIBS transports)
fuzzer(ucx_messages LIBS transports)
target_include_directories(fuzz_ucx_messages SYSTEM PRIVATE ${UCX_INCLUDE})

fuzzer(fatbin LIBS fatbin)
fuzzer(image_cache LIBS image_cache)
fuzzer(options LIBS options)
set(ptx ${CMAKE_SOURCE_DIR}/server/softgpu/ptx)
fuzzer(ptx_parser SOURCES ${ptx}/lexer.cpp ${ptx}/parser.cpp ${ptx}/instruction_parser.cpp)
fuzzer(ptx_translate LIBS softgpu_engine)
