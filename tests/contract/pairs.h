#pragma once
// Connected ends of each transport, for the contract suite: in this process, or with the peer in a forked
// one.

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transports/implementations.h"

namespace gpupool::transport::testing {

using namespace std::chrono_literals;

struct Pair {
  std::unique_ptr<Connection> client;
  std::unique_ptr<Connection> worker;
};

// "shm", "loopback", "ucx" (if libucp is installed), and each of them again as "faulty-...", with seeded
// delays; "ucx-rdma" where there is an RDMA device (tests/rdma).
std::vector<std::string> allTransports();
// Those whose ends can live in two processes.
std::vector<std::string> processTransports();

bool haveRdma();
// One end over a socket of bootstrapSockets(transport).
std::unique_ptr<Connection> acceptAs(const std::string& transport, int bootstrap, const Options& options);
std::unique_ptr<Connection> connectAs(const std::string& transport, int bootstrap, const Options& options);

// How often to do what is done `times` elsewhere: RDMA is tested in a machine that is only translated.
inline uint64_t scaled(const std::string& transport, uint64_t times) {
  return transport == "ucx-rdma" ? (times + 9) / 10 : times;
}

Pair connectPair(const std::string& transport, const Options& options = {});

// Runs `peer` with its end in a forked child, which then leaves with _exit. The parent has the other end.
struct ForkedPeer {
  std::unique_ptr<Connection> connection;  // the worker's end
  pid_t process = -1;
  ForkedPeer(const std::string& transport, const Options& options,
             const std::function<void(Connection&)>& peer);
  ~ForkedPeer();
  void kill();  // SIGKILL, not reaped before the destructor: a zombie must count as dead
};

// Two ends of a stream socket that suit the transport's bootstrap (Unix for shm, TCP over lo for ucx).
std::pair<int, int> bootstrapSockets(const std::string& transport);

// Something can be read from the descriptor, or comes within that time.
bool readable(int descriptor, std::chrono::milliseconds time);

inline Deadline in(std::chrono::milliseconds time) { return Clock::now() + time; }

// Sends the bytes, or fails: false.
bool sendBytes(Connection& connection, Channel channel, const void* bytes, size_t size,
               Deadline deadline = in(10s));
// A pattern that depends on seed and length, and its check.
void fillPattern(void* bytes, size_t size, uint64_t seed);
bool hasPattern(const void* bytes, size_t size, uint64_t seed);
uint64_t checksum(const void* bytes, size_t size);

}  // namespace gpupool::transport::testing
