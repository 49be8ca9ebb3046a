#pragma once
// What NVML said last of one GPU: inventory.capnp's DeviceSample as a value. A server takes it
// (server/health/watch.h), the manager keeps the last one, people and programs read it.

#include <cstdint>

#include "schema/inventory.capnp.h"

namespace gpupool {

// The defaults: the GPU or its driver does not say.
struct DeviceSample {
  uint32_t ageMs = 0;          // since it was taken
  int32_t gpuPercent = -1;     // of the last sampling period, a kernel ran
  int32_t memoryPercent = -1;  // of it, device memory was read or written
  uint64_t usedBytes = 0;      // of its memory, by whomever
  uint64_t totalBytes = 0;     // 0: unknown, and usedBytes too
  int32_t temperatureC = kNoTemperature;
  uint32_t powerMw = 0, powerLimitMw = 0;
  uint32_t smMhz = 0, memoryMhz = 0;
  int64_t eccErrors = -1;  // uncorrected ones since the driver was loaded
  int32_t nvlinks = -1;    // NVLinks that are up
  uint32_t xid = 0;        // the last critical Xid since the server was started

  static constexpr int32_t kNoTemperature = -1000;
  bool operator==(const DeviceSample&) const = default;
};

namespace schema {

gpupool::DeviceSample read(DeviceSample::Reader from);
void write(const gpupool::DeviceSample& from, DeviceSample::Builder to);

}  // namespace schema
}  // namespace gpupool
