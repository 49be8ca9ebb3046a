#include "transports/ucx_wire.h"

#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "base/log.h"

namespace gpupool::transport {

namespace {

namespace fs = std::filesystem;

const fs::path kDevices = "/sys/class/infiniband";
// UCX's own buffers, the staging memory of a session, and something for the program.
constexpr rlim_t kLockedBytes = rlim_t{256} << 20;
constexpr int kLockCapability = 14;  // CAP_IPC_LOCK: the limit does not count
// Tables of GIDs have up to a thousand entries, filled from the front.
constexpr int kMostEmptyGids = 16;

std::string lineOf(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

bool active(const fs::path& port) { return lineOf(port / "state").find("ACTIVE") != std::string::npos; }

// A port has the addresses of its interface, and of VLANs on top of it, as its GIDs.
bool servesInterface(const fs::path& port, const std::string& interface) {
  for (int gid = 0, empty = 0; empty < kMostEmptyGids; ++gid) {
    std::string owner = lineOf(port / "gid_attrs/ndevs" / std::to_string(gid));
    if (owner == interface) return true;
    empty = owner.empty() ? empty + 1 : 0;
  }
  return false;
}

// The first active port that `suits` finds right.
template <class Suits>
std::string findPort(Suits suits) {
  std::error_code error;
  for (auto& device : fs::directory_iterator(kDevices, error)) {
    for (auto& port : fs::directory_iterator(device.path() / "ports", error)) {
      std::string name = device.path().filename().string() + ":" + port.path().filename().string();
      if (active(port.path()) && suits(port.path(), name)) return name;
    }
  }
  return "";
}

}  // namespace

std::string rdmaDeviceOf(const std::string& interface) {
  if (interface.empty()) return "";
  return findPort([&](const fs::path& port, const std::string&) { return servesInterface(port, interface); });
}

std::string rdmaDeviceNamed(const std::string& name) {
  return findPort([&](const fs::path&, const std::string& port) {
    return port == name || port.substr(0, port.find(':')) == name;
  });
}

std::string lockedMemoryProblem() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur >= kLockedBytes) return "";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("CapEff:", 0) == 0 &&
        (std::strtoull(line.c_str() + 7, nullptr, 16) >> kLockCapability & 1))
      return "";
  }
  return "RDMA needs locked memory, and the limit is " + std::to_string(limit.rlim_cur >> 10) +
         " KiB: raise it to unlimited (ulimit -l, memlock in /etc/security/limits.conf, LimitMEMLOCK of a "
         "systemd unit)";
}

UcxWire tcpWire(const Options& options, const std::string& interface) {
  // A device of RDMA was named, for sessions that can use it; this one goes by its interface.
  bool other = !options.networkDevice.empty() && !rdmaDeviceNamed(options.networkDevice).empty() &&
               std::getenv("UCX_TLS") == nullptr;
  return {false, options.networkDevice.empty() || other ? interface : options.networkDevice};
}

UcxWire bestWire(const Options& options, const std::string& interface) {
  if (options.wire == NetworkWire::tcp || std::getenv("UCX_TLS") != nullptr)
    return tcpWire(options, interface);
  const std::string& where = options.networkDevice.empty() ? interface : options.networkDevice;
  std::string device = options.networkDevice.empty() ? "" : rdmaDeviceNamed(options.networkDevice);
  if (device.empty()) device = rdmaDeviceOf(where);
  std::string problem = device.empty() ? "no RDMA device with an active port belongs to the interface '" +
                                             where + "' (ibv_devinfo and `rdma link` list them)"
                                       : lockedMemoryProblem();
  if (problem.empty()) return {true, device};
  if (options.wire == NetworkWire::rdma) throw std::runtime_error("ucx: " + problem);
  if (!device.empty()) GPUPOOL_WARNING("ucx: %s; this session goes over tcp", problem.c_str());
  return tcpWire(options, interface);
}

}  // namespace gpupool::transport
