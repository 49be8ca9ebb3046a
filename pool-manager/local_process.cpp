#include "pool-manager/local_process.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace gpupool::pool {

LocalProcess identifyProcess(int pid) {
  if (pid <= 0) return {};
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return {};
  const size_t end = line.rfind(')');  // the name may contain anything
  if (end == std::string::npos) return {};
  std::istringstream fields(line.substr(end + 1));
  std::string word;
  for (int field = 3; field <= 22 && fields >> word; ++field) {
    if (field == 3 && (word == "Z" || word == "X")) return {};
    if (field == 22) return {pid, std::strtoull(word.c_str(), nullptr, 10)};
  }
  return {};
}

bool hasEnded(const LocalProcess& process) {
  return process.pid != 0 && identifyProcess(process.pid).startTicks != process.startTicks;
}

}  // namespace gpupool::pool
