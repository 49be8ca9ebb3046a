#pragma once
// Which devices a request may get: `--gpu`. Terms joined by ',': a part of the device's name, whatever its
// case ("h200"; of several names one has to fit), or a condition, all of which have to hold: memory>=80GiB,
// compute>=9.0, and the same with <=.

#include <cstdint>
#include <string>
#include <vector>

#include "schema/device.h"

namespace gpupool::pool {

struct DeviceFilter {
  std::string text;                // as it was given; empty: every device fits
  std::vector<std::string> names;  // in lower case; empty: any
  uint64_t leastMemory = 0, mostMemory = ~uint64_t{0};
  uint32_t leastCompute = 0, mostCompute = ~uint32_t{0};  // 1000 * major + minor

  bool matches(const Device& device) const;
  bool operator==(const DeviceFilter&) const = default;
};

// Throws std::invalid_argument with a text for the user.
DeviceFilter parseDeviceFilter(const std::string& text);

}  // namespace gpupool::pool
