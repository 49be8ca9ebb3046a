#pragma once
// A process of this machine that holds a lease. It is identified by its start time as well as by its pid,
// since pids are reused.

#include <cstdint>

namespace gpupool::pool {

struct LocalProcess {
  int pid = 0;              // 0: on another machine, or not to be seen from here
  uint64_t startTicks = 0;  // 0: it had ended before it was looked up
};

// {} where /proc does not show a process that runs.
LocalProcess identifyProcess(int pid);
// True once it has ended, as a zombie too. False for {}: nothing is known of it.
bool hasEnded(const LocalProcess& process);

}  // namespace gpupool::pool
