#pragma once
// What leases take of devices and their memory, as manager and server both count it: what one grants, the
// other must not refuse.

#include <cstdint>

namespace gpupool::schema {

// A lease's devices are those of each of its sessions (hello.h: kMaxDevices).
inline constexpr uint32_t kMostLeasedDevices = 8;

// What a lease with a memory limit takes beyond it on a real GPU: context, code, local memory.
inline constexpr uint64_t kLeaseOverheadBytes = uint64_t{1} << 30;

// So much of a device with `memoryBytes` may be leased (ServerInfo.overcommitPercent).
inline constexpr uint64_t leasableBytes(uint64_t memoryBytes, uint32_t overcommitPercent) {
  return memoryBytes / 100 * overcommitPercent + memoryBytes % 100 * overcommitPercent / 100;
}

}  // namespace gpupool::schema
