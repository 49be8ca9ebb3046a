#pragma once
// A GPU of the pool, as workers, servers and the manager tell one another: inventory.capnp's DeviceInfo and
// LeasedDevice as values (schema/convert.h). Two other descriptions stay apart, since they say other things:
// schema::DeviceProperties (hello.h) has what CUDA's queries in the client are answered with, and
// fabric::Device (fabric.h) is a network adapter.

#include <cstdint>
#include <string>

namespace gpupool {

struct Device {
  std::string uuid;  // 16 bytes
  std::string name;
  uint64_t memoryBytes = 0;
  uint32_t computeMajor = 0, computeMinor = 0;
  std::string pciBusId;
  uint32_t ordinal = 0;  // the driver's, on its server
  bool software = false;
  uint32_t driverVersion = 0;
  std::string problem;  // not empty: the reason why it is not leased. A server says it to the manager

  bool operator==(const Device&) const = default;
};

struct LeasedDevice {
  Device info;
  uint64_t memoryBytes = 0;  // reserved for the lease, which may have no more
};

}  // namespace gpupool
