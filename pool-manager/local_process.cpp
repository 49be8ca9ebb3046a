#include "pool-manager/local_process.h"

#include <signal.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace gpupool::pool {

LocalProcess identifyProcess(int pid) {
  if (pid <= 0) return {};
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  // /proc may hide what runs (hidepid); a signal tells.
  if (!std::getline(file, line))
    return ::kill(pid, 0) != 0 && errno == ESRCH ? LocalProcess{pid, 0} : LocalProcess{};
  const size_t end = line.rfind(')');  // the name may contain anything
  if (end == std::string::npos) return {};
  std::istringstream fields(line.substr(end + 1));
  std::string word;
  for (int field = 3; field <= 22 && fields >> word; ++field) {
    if (field == 3 && (word == "Z" || word == "X")) return {pid, 0};
    if (field == 22) return {pid, std::strtoull(word.c_str(), nullptr, 10)};
  }
  return {};
}

bool hasEnded(const LocalProcess& process) {
  if (process.pid == 0) return false;
  return process.startTicks == 0 || identifyProcess(process.pid).startTicks != process.startTicks;
}

}  // namespace gpupool::pool
