#pragma once
// A process of this machine that holds a lease, known by more than its number: numbers are used again.

#include <cstdint>

namespace gpupool::pool {

struct LocalProcess {
  int pid = 0;              // 0: on another machine, or not to be seen from here
  uint64_t startTicks = 0;  // 0: it had ended before anybody looked
};

// {} where /proc does not show a process that runs.
LocalProcess identifyProcess(int pid);
// True once it has ended, as a zombie too. False for {}: nothing is known of it.
bool hasEnded(const LocalProcess& process);

}  // namespace gpupool::pool
