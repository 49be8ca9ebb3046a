#pragma once
// Memory of this machine, from /proc/meminfo (proc(5)).

#include <cstdint>
#include <istream>
#include <string>

namespace gpupool {

// Bytes; 0: unknown.
struct MemoryInfo {
  uint64_t total = 0, available = 0, freeSwap = 0;
};

inline MemoryInfo readMemoryInfo(std::istream& text) {
  MemoryInfo info;
  uint64_t kib = 0;
  for (std::string name, rest; text >> name >> kib && std::getline(text, rest);) {
    if (name == "MemTotal:") info.total = kib << 10;
    if (name == "MemAvailable:") info.available = kib << 10;
    if (name == "SwapFree:") info.freeSwap = kib << 10;
  }
  return info;
}

}  // namespace gpupool
