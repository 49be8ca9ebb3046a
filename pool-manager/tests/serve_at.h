#pragma once
// A manager's service at a Unix socket, for tests that have it in their own process.

#include <unistd.h>

#include <string>

#include "pool-manager/service.h"

namespace gpupool::test {

// It answers there, also where an earlier one did, for as long as the promise lives: its housekeeping.
inline kj::Promise<void> serveAt(kj::AsyncIoContext& io, pool::Service& service, const std::string& socket) {
  ::unlink(socket.c_str());
  auto parsed = io.provider->getNetwork().parseAddress("unix:" + socket).wait(io.waitScope);
  service.serve(parsed->listen(), true);
  return service.run().eagerlyEvaluate(nullptr);
}

}  // namespace gpupool::test
