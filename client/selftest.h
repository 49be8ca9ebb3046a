#pragma once
// Answers the self-test that cudart 13 runs on the driver library when it initialises: an HMAC (RFC 2104)
// with the hash MD2 (RFC 1319) over the library's version and tables and the devices' identities. Without an
// answer no program with a CUDA runtime inside starts. The construction is published by several open
// projects.
//
// This is the only place that knows it; GPUPOOL_CUDART_SELFTEST=OFF leaves the file out, and then only
// programs that use the driver API alone can run. Pure functions, any thread.

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace gpupool::client::selftest {

using Hash = std::array<uint8_t, 16>;

// Must be what cuDeviceGetUuid (first version) and cuDeviceGetAttribute 50, 33 and 34 say, always.
struct DeviceIdentity {
  CUuuid uuid;
  int32_t pciDomain, pciBus, pciDevice;
};

struct Question {
  uint32_t driverVersion;  // as cuDriverGetVersion
  uint32_t version;        // of the question; its last decimal digit selects the form of the answer
  uint32_t processId;
  uint32_t thread;  // low half of pthread_self()
  uint64_t cudartInterface, integrityCheck,
      integrityFunction;  // addresses: two tables, and slot 1 of the second
  uint64_t seconds;
};

Hash answer(const Question& question, std::span<const DeviceIdentity> devices);

Hash md2(std::span<const uint8_t> message);
Hash hmacMd2(std::span<const uint8_t, 16> key, std::span<const uint8_t> message);

}  // namespace gpupool::client::selftest
