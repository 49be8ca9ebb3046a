#pragma once
// Devices of random servers, for tests of placement.

#include <random>
#include <string>

#include "pool-manager/placement.h"

namespace gpupool::pool::test {

// One that nobody has: of three models, seldom broken or known from another server, too.
inline DeviceUse randomDevice(std::mt19937_64& random, const std::string& server, uint32_t ordinal) {
  constexpr const char* kModels[] = {"NVIDIA H100", "NVIDIA H200", "NVIDIA L40S"};
  const auto pick = [&](uint64_t below) { return random() % below; };
  DeviceUse use;
  use.info.uuid = server + std::to_string(ordinal);
  use.info.ordinal = ordinal;
  use.info.name = kModels[pick(3)];
  use.info.memoryBytes = (40 + 40 * pick(3)) << 30;
  use.info.computeMajor = 8 + static_cast<uint32_t>(pick(2));
  use.info.software = pick(3) == 0;
  if (pick(10) == 0) use.info.problem = "ECC";
  if (pick(12) == 0) use.duplicateOf = "GPU 0 of server z";
  use.freeBytes = use.info.memoryBytes;
  return use;
}

// By NVLink, some with some; and network adapters near to some.
inline void join(std::mt19937_64& random, ServerUse& server) {
  const auto pick = [&](uint64_t below) { return random() % below; };
  for (size_t i = 0; i < server.devices.size(); ++i) {
    if (pick(2) == 0) server.devices[i].adapter = {"mlx5_0", static_cast<fabric::PciDistance>(1 + pick(5))};
    for (size_t j = 0; j < i; ++j) {
      if (pick(2) == 0) continue;
      server.devices[i].joined |= uint64_t{1} << j;
      server.devices[j].joined |= uint64_t{1} << i;
    }
  }
}

}  // namespace gpupool::pool::test
