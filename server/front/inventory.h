#pragma once
// What devices this server has, asked of a child process, so that a driver that crashes cannot take the
// server along.

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include <string>
#include <vector>

#include "server/front/leases.h"
#include "server/front/worker_program.h"

namespace gpupool::server {

struct Inventory {
  std::string driver;  // the library that was loaded
  uint64_t rowsHash = 0;
  std::vector<Device> devices;
};

// Runs the worker's `--inventory [--driver ...]` once. Rejects, saying why, also when it takes longer than
// `bound`.
kj::Promise<Inventory> takeInventory(kj::UnixEventPort& port, kj::Timer& timer, const WorkerProgram& program,
                                     const std::string& driver, kj::Duration bound = 60 * kj::SECONDS);

}  // namespace gpupool::server
