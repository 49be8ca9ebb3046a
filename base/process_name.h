#pragma once
// A process of this machine, known by more than its number: numbers are used again.

#include <sys/types.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace gpupool {

// When it was started, in clock ticks since boot (proc(5), /proc/<pid>/stat, field 22); 0 where no such
// process runs. A process that has ended and waits to be reaped does not run.
inline uint64_t processStartTicks(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name = line.rfind(')');  // the name may hold spaces and parentheses
  if (name == std::string::npos) return 0;
  std::istringstream fields(line.substr(name + 1));
  std::string field;
  uint64_t ticks = 0;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  for (int i = 4; i < 22; ++i) fields >> field;
  return fields >> ticks ? ticks : 0;
}

}  // namespace gpupool
