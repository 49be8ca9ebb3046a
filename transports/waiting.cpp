#include "transports/waiting.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>

namespace gpupool::transport {

void futexSleep(ArmWord& word, Deadline deadline) {
  Clock::duration left = deadline - Clock::now();
  if (left <= Clock::duration::zero()) return;
  left = std::min<Clock::duration>(left, kLongestSleep);
  auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  timespec timeout{static_cast<time_t>(nanoseconds / 1'000'000'000), nanoseconds % 1'000'000'000};
  // Not FUTEX_PRIVATE: the word is shared between processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, 1, &timeout, nullptr, 0);
}

void futexWake(ArmWord& word) {
  word.store(0, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool expeditedBarrier() {
  static const bool registered = [] {
    if (const char* off = std::getenv("GPUPOOL_NO_MEMBARRIER"); off && *off == '1') return false;
    return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
  }();
  return registered;
}

void heavyBarrier() { syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0); }

std::chrono::nanoseconds spinTime() {
  static const std::chrono::nanoseconds time = [] {
    if (const char* text = std::getenv("GPUPOOL_SPIN_US")) {
      return std::chrono::nanoseconds{1000LL * std::clamp(std::atol(text), 0L, 1'000'000L)};
    }
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return std::chrono::nanoseconds{0};
    return std::chrono::nanoseconds{CPU_COUNT(&cores) < 3 ? 0 : 50'000};
  }();
  return time;
}

}  // namespace gpupool::transport
