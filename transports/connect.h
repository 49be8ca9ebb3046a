#pragma once
// How a connection is made, over a *bootstrap socket*: a connected stream socket (Unix or TCP) between client
// and worker that the server handed over. Each transport exchanges over it what it needs (memory descriptors,
// a listener's port) and keeps it: when the peer dies, the kernel closes its end, and this side reads
// end-of-file at once.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace gpupool::transport {

class Connection;

// What a network transport uses: RDMA where both ends have an RDMA device on the route, else TCP; or only one
// of the two.
enum class NetworkWire : uint8_t { automatic, tcp, rdma };
// "auto", "tcp" or "rdma"; throws std::runtime_error for another name.
NetworkWire wireNamed(const std::string& name);

struct Options {
  size_t callBytes = size_t{4} << 20;  // buffer of the call channel, each direction
  size_t controlBytes = size_t{256} << 10;
  std::chrono::milliseconds setupTimeout{10000};

  // Networks only.
  std::string networkDevice;  // "lo", "eth0", "mlx5_0:1"; empty: the bootstrap socket's interface
  // UCX_TLS in the environment wins. The worker offers a wire, the client takes it or both take TCP.
  NetworkWire wire = NetworkWire::automatic;
  std::string bindAddress;  // where the worker listens; empty: the bootstrap socket's own address
  // A peer whose host no longer answers is lost after this.
  std::chrono::milliseconds peerTimeout{2000};
  // A peer that is there but does nothing (stopped, in a debugger, starved) is lost after this.
  std::chrono::milliseconds stallTimeout{30000};
};

// Both sides call the one that fits, on the two ends of the bootstrap socket; takes ownership of the
// descriptor. accept: the worker, which creates all shared memory. connect: the client. `transport` is a name
// of base/transport_names.h; another throws std::runtime_error.
// `load` before: what connect loads of this machine's libraries is loaded. Throws std::runtime_error: what is
// missing.
void load(const std::string& transport);
std::unique_ptr<Connection> accept(const std::string& transport, int bootstrap, const Options& options);
std::unique_ptr<Connection> connect(const std::string& transport, int bootstrap, const Options& options);

}  // namespace gpupool::transport
