#pragma once
// What a worker prepares before its session is known, so that a session starts without waiting for it: the
// host memory every session has, its pages present, and registered with the driver where a context exists
// already (registering 64 MiB takes some milliseconds, touching it first as many).

#include <memory>

#include "server/driver.h"
#include "transports/transport.h"

namespace gpupool::server {

struct HostPages {
  std::shared_ptr<transport::SharedMemory> staging;  // copies of ordinary memory pass through it
  std::shared_ptr<transport::SharedMemory> words;    // schema/frame.h
  CUcontext registeredIn = nullptr;                  // the context made ahead of time, or none
};

// How host memory is registered with the driver.
inline constexpr unsigned kHostRegistration = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;

// Throws std::runtime_error where the host has no such memory.
HostPages makeHostPages();

// What fails here is tried again, and reported, when the session has its context.
void registerHostPages(const Driver& driver, CUcontext context, HostPages& pages);

// `pages` take the place of `own`, which were registered.
void exchangeHostPages(const Driver& driver, const HostPages& own, HostPages& pages);

}  // namespace gpupool::server
