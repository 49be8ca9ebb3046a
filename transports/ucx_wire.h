#pragma once
// Which wire UCX uses between two processes: TCP, or RDMA if both ends have a device for it. RDMA devices are
// looked for in sysfs, so that nothing of libibverbs is needed to know that there is none.

#include <string>

#include "transports/transport.h"

namespace gpupool::transport {

struct UcxWire {
  bool rdma = false;
  std::string device;  // UCX_NET_DEVICES; empty: UCX's choice
};

// The best wire of this machine on the route of `interface`, as Options::wire allows, unless the user's
// UCX_TLS decides. Throws std::runtime_error if RDMA was required and is not available.
UcxWire bestWire(const Options& options, const std::string& interface);
UcxWire tcpWire(const Options& options, const std::string& interface);

// "mlx5_0:1": the device and active port that network interface `interface` belongs to; "" if there is none.
std::string rdmaDeviceOf(const std::string& interface);
// The same for a device by its own name, "mlx5_0" or "mlx5_0:1".
std::string rdmaDeviceNamed(const std::string& name);
// Why this process may not lock as much memory as RDMA needs, and what to do; "" if it may.
std::string lockedMemoryProblem();

}  // namespace gpupool::transport
