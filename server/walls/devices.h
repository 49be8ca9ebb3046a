#pragma once
// The wall around devices: a /dev of its own, in a mount namespace of its own. It holds the nodes that a
// worker needs, and those of its own GPUs; of another GPU, of the kernel's log, of memory that others share
// (/dev/shm) there is nothing to be opened. An ordinary user makes such a namespace within a user namespace,
// where the kernel grants that.

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

namespace gpupool::server::walls {

inline constexpr char kOwnDevices[] = "devices";  // the wall's name

// What a worker is to have besides the nodes that every program needs.
struct Devices {
  std::vector<std::string> gpus;  // by PCI address; none: software GPUs
  bool rdma = false;              // those of RDMA adapters

  // As one word of a command line, "none" or "0000:3b:00.0,rdma".
  std::string text() const;
  static Devices parse(std::string_view text);
};

// A GPU's node below /dev, "nvidia3", by its PCI address. Empty: the driver tells of none, or it is not
// there. driver, dev: /proc/driver and /dev.
std::string nodeOf(const std::string& gpu, const std::string& driver = "/proc/driver",
                   const std::string& dev = "/dev");

// The nodes below `dev`, by their paths in it, that exist. Of a GPU that is gone there is none.
std::vector<std::string> nodesOf(const Devices& devices, const std::string& driver = "/proc/driver",
                                 const std::string& dev = "/dev");

// A mount namespace of this process's own, which sees later mounts of the machine and shows none of its own.
// Of a process with one thread. Throws std::runtime_error.
void leaveMountNamespace();

// From now on the folder holds these nodes of it and nothing else, and nothing can be added. In such a
// namespace. Throws std::runtime_error.
void keepNodes(const std::string& folder, const std::vector<std::string>& nodes);

// All of that, for /dev.
void keepDevices(const Devices& devices);

// Whether the kernel lets a process do so, tried in a child. user: it becomes this one first, which nothing
// else runs under; 0: it stays the caller's. Empty, or why not.
std::string whyNoOwnDevices(uid_t user = 0);

}  // namespace gpupool::server::walls
