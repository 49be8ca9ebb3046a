#pragma once
// The transports themselves, for the table in factory.cpp and for tests.

#include <memory>
#include <utility>

#include "transports/transport.h"

namespace gpupool::transport {

// shm: memory that client and worker share on one host.
std::unique_ptr<Connection> acceptShm(int bootstrap, const Options& options);
std::unique_ptr<Connection> connectShm(int bootstrap, const Options& options);
// ucx: a network, over TCP or RDMA.
std::unique_ptr<Connection> acceptUcx(int bootstrap, const Options& options);
std::unique_ptr<Connection> connectUcx(int bootstrap, const Options& options);
void loadUcx();

// Two connected ends in this process: {client, worker}.
std::pair<std::unique_ptr<Connection>, std::unique_ptr<Connection>> loopbackPair(const Options& options);

}  // namespace gpupool::transport
