#pragma once
// libibverbs.so.1 as a table of functions.
//
// Every one is looked up with the version of its symbol: without, the loader may give the functions of 2006
// (IBVERBS_1.0), which have other structures. <infiniband/verbs.h> defines several names as macros and inline
// functions around the exported symbol; the inline ones would link the library, so queryPort() does here what
// theirs does.

#include <infiniband/verbs.h>

#include <memory>
#include <string>

namespace gpupool::fabric {

struct VerbsLibrary {
  ibv_device** (*getDeviceList)(int*) = nullptr;
  void (*freeDeviceList)(ibv_device**) = nullptr;
  __be64 (*getDeviceGuid)(ibv_device*) = nullptr;
  ibv_context* (*openDevice)(ibv_device*) = nullptr;
  int (*closeDevice)(ibv_context*) = nullptr;
  int (*queryDevice)(ibv_context*, ibv_device_attr*) = nullptr;
  int (*queryPortCompat)(ibv_context*, uint8_t, _compat_ibv_port_attr*) = nullptr;
  ibv_pd* (*allocPd)(ibv_context*) = nullptr;
  int (*deallocPd)(ibv_pd*) = nullptr;
  int (*deregMr)(ibv_mr*) = nullptr;
  int (*getAsyncEvent)(ibv_context*, ibv_async_event*) = nullptr;
  void (*ackAsyncEvent)(ibv_async_event*) = nullptr;
  const char* (*eventTypeStr)(ibv_event_type) = nullptr;
  // Null in libraries that are too old.
  ssize_t (*queryGidTable)(ibv_context*, ibv_gid_entry*, size_t, uint32_t, size_t) = nullptr;  // rdma-core 32
  ibv_mr* (*regDmabufMr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int) = nullptr;             // rdma-core 34

  // Never unloaded: its drivers keep state in the process. False, and `why` filled, if it cannot serve.
  bool load(const std::string& path, std::string* why);
  int queryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) const;
};

}  // namespace gpupool::fabric
