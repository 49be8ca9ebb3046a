#pragma once
// Servers' devices and what a placement says, for the tests of placement.

#include <string>
#include <utility>
#include <vector>

#include "pool-manager/placement.h"

namespace gpupool::pool::test {

inline constexpr uint64_t kGiB = uint64_t{1} << 30;

inline DeviceUse device(uint32_t ordinal, uint64_t memoryGiB, uint64_t freeGiB,
                        std::vector<std::string> holders = {}) {
  DeviceUse use;
  use.info.name = "H200";
  use.info.ordinal = ordinal;
  use.info.memoryBytes = memoryGiB * kGiB;
  use.freeBytes = freeGiB * kGiB;
  use.holders = std::move(holders);
  return use;
}

inline std::vector<uint32_t> ordinals(const Choice& choice) {
  std::vector<uint32_t> list;
  list.reserve(choice.devices.size());
  for (const auto& leased : choice.devices) list.push_back(leased.info.ordinal);
  return list;
}

inline bool says(const Choice& choice, const std::string& text) {
  return choice.missing.find(text) != std::string::npos;
}

}  // namespace gpupool::pool::test
