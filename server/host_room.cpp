#include "server/host_room.h"

#include <algorithm>
#include <fstream>

namespace gpupool::server {
uint64_t hostReserveBytes(uint64_t totalBytes) { return std::max(totalBytes / 16, uint64_t{256} << 20); }

bool leavesRoom(const MemoryInfo& memory, uint64_t bytes) {
  if (memory.total == 0 || memory.available == 0) return true;
  const uint64_t reserve = hostReserveBytes(memory.total);
  return memory.available > reserve && bytes <= memory.available - reserve;
}

bool hostHasRoom(uint64_t bytes) {
  std::ifstream file("/proc/meminfo");
  return leavesRoom(readMemoryInfo(file), bytes);
}

void preferForOutOfMemory() { std::ofstream("/proc/self/oom_score_adj") << 500; }

}  // namespace gpupool::server
