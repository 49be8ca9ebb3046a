#pragma once
// UCX, loaded when the first network connection is made: neither the client library nor the worker links it.
// Compiled against its headers alone; the ABI (libucp.so.0) has been stable from 1.13 (Debian 12) on.

#include <ucp/api/ucp.h>

// Every UCX function we call. The first group is in libucp, the second in libucs.
// clang-format off
#define GPUPOOL_UCP_FUNCTIONS(F)                                                                             \
  F(ucp_get_version_string)                                                                                  \
  F(ucp_config_read)                                                                                         \
  F(ucp_config_modify)                                                                                       \
  F(ucp_config_release)                                                                                      \
  F(ucp_init_version)                                                                                        \
  F(ucp_cleanup)                                                                                             \
  F(ucp_worker_create)                                                                                       \
  F(ucp_worker_destroy)                                                                                      \
  F(ucp_worker_get_efd)                                                                                      \
  F(ucp_worker_arm)                                                                                          \
  F(ucp_worker_progress)                                                                                     \
  F(ucp_worker_set_am_recv_handler)                                                                          \
  F(ucp_listener_create)                                                                                     \
  F(ucp_listener_query)                                                                                      \
  F(ucp_listener_reject)                                                                                     \
  F(ucp_listener_destroy)                                                                                    \
  F(ucp_ep_create)                                                                                           \
  F(ucp_ep_close_nbx)                                                                                        \
  F(ucp_am_send_nbx)                                                                                         \
  F(ucp_am_recv_data_nbx)                                                                                    \
  F(ucp_mem_map)                                                                                             \
  F(ucp_mem_unmap)                                                                                           \
  F(ucp_rkey_pack)                                                                                           \
  F(ucp_rkey_buffer_release)                                                                                 \
  F(ucp_ep_rkey_unpack)                                                                                      \
  F(ucp_rkey_destroy)                                                                                        \
  F(ucp_put_nbx)                                                                                             \
  F(ucp_get_nbx)                                                                                             \
  F(ucp_ep_flush_nbx)                                                                                        \
  F(ucp_request_check_status)                                                                                \
  F(ucp_request_free)
#define GPUPOOL_UCS_FUNCTIONS(F) F(ucs_status_string)

// clang-format on

namespace gpupool::transport {

struct UcxLibrary {
#define GPUPOOL_MEMBER(name) decltype(&::name) name = nullptr;
  GPUPOOL_UCP_FUNCTIONS(GPUPOOL_MEMBER)
  GPUPOOL_UCS_FUNCTIONS(GPUPOOL_MEMBER)
#undef GPUPOOL_MEMBER

  // Loads it on first use, for the life of the process; any thread. Throws std::runtime_error, each time, if
  // it is not there. memoryEvents: it may watch this process's mappings, so as to keep memory registered
  // between transfers that has not changed; whoever loads it first decides.
  static const UcxLibrary& get(bool memoryEvents = false);
};

}  // namespace gpupool::transport
