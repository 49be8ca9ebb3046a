#include "server/worker/host_room.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace gpupool::server {
namespace {

// KiB in the line `name`; 0 if there is none.
uint64_t lineOf(const std::string& meminfo, const std::string& name) {
  size_t at = meminfo.rfind(name + ":", 0) == 0 ? 0 : meminfo.find("\n" + name + ":");
  if (at == std::string::npos) return 0;
  std::istringstream line(meminfo.substr(meminfo.find(':', at) + 1));
  uint64_t kib = 0;
  line >> kib;
  return kib;
}

}  // namespace

uint64_t hostReserveBytes(uint64_t totalBytes) { return std::max(totalBytes / 16, uint64_t{256} << 20); }

bool leavesRoom(const std::string& meminfo, uint64_t bytes) {
  const uint64_t total = lineOf(meminfo, "MemTotal") << 10, available = lineOf(meminfo, "MemAvailable") << 10;
  if (total == 0 || available == 0) return true;
  const uint64_t reserve = hostReserveBytes(total);
  return available > reserve && bytes <= available - reserve;
}

bool hostHasRoom(uint64_t bytes) {
  std::ifstream file("/proc/meminfo");
  std::stringstream text;
  text << file.rdbuf();
  return leavesRoom(text.str(), bytes);
}

void preferForOutOfMemory() { std::ofstream("/proc/self/oom_score_adj") << 500; }

}  // namespace gpupool::server
