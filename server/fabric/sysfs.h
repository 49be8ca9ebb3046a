#pragma once
// What sysfs knows of PCI devices and RDMA devices: where they sit, at what NUMA node, how far apart.

#include <filesystem>
#include <string>

#include "schema/fabric.h"

namespace gpupool::fabric {

// A PCI device's place: its chain of bridges from a host bridge down to itself.
struct PciPlace {
  std::string address;             // 0000:1b:00.0; empty: not a PCI device, or unknown
  std::vector<std::string> chain;  // pci0000:15, 0000:15:01.0, ..., address
  int numaNode = -1;
};

// numaNodes: of the machine. On one with a single node, devices whose node is unknown are on that one.
PciDistance distance(const PciPlace& one, const PciPlace& other, unsigned numaNodes);

class Sysfs {
 public:
  // root: a test's own tree.
  explicit Sysfs(std::filesystem::path root = "/sys") : root_(std::move(root)) {}

  unsigned numaNodes() const;
  // Of a device on the PCI bus; the address in any of the usual spellings (1B:00.0, 00000000:1B:00.0).
  PciPlace pciPlace(const std::string& address) const;
  // Of an RDMA device; one made of software is where its network interface is.
  PciPlace rdmaPlace(const std::string& device, const std::string& netdev) const;
  // "100 Gb/sec (4X EDR)" as 100000; 0: unknown.
  uint32_t rateMbps(const std::string& device, uint32_t port) const;
  // The interface of a GID, else of the port; empty: none. gid < 0: none.
  std::string netdev(const std::string& device, uint32_t port, int32_t gid) const;

 private:
  std::filesystem::path port(const std::string& device, uint32_t number) const;
  PciPlace placeOf(const std::filesystem::path& link) const;

  std::filesystem::path root_;
};

}  // namespace gpupool::fabric
