#pragma once
// Sleeping and waking across processes: a futex word that the sleeper arms and the waker reads.
//
// The protocol (Dekker's): the sleeper stores "armed", fences, looks at the condition once more and only then
// sleeps; the waker changes the condition, fences, and reads "armed". One of the two always sees the other.
// The waker is the hot side (every commit), so where both processes could register with membarrier(2) its
// fence is only a compiler barrier and the sleeper pays for both (MEMBARRIER_CMD_GLOBAL_EXPEDITED,
// Linux 4.16).
//
// The words may lie in memory a hostile peer writes: a sleep is therefore bounded by kLongestSleep and every
// waiter looks again by itself.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "transports/transport.h"

namespace gpupool::transport {

inline constexpr std::chrono::milliseconds kLongestSleep{500};

// One word per sleeper; in shared memory, 64-byte aligned by its owner. 1: the sleeper wants a wake-up.
using ArmWord = std::atomic<uint32_t>;
static_assert(ArmWord::is_always_lock_free && sizeof(ArmWord) == 4);

// Sleeps while `word` is 1, at most until `deadline` and at most kLongestSleep. May return early.
void futexSleep(ArmWord& word, Deadline deadline);
// Disarms and wakes every sleeper on `word`.
void futexWake(ArmWord& word);

// True if this process takes part in the expedited barrier (registered on first use; the answer never
// changes).
bool expeditedBarrier();
// Orders everything before it against everything after it, on all threads of all registered processes.
void heavyBarrier();

// A bound on waiting that counts only time in which this process ran. One that was stopped (SIGSTOP, a
// debugger, its host suspended) goes on with its clock ahead, while what it waits for was stopped as well, or
// came and is read by another thread only now. One waiter's own; it asks between its steps, each of which
// waits for step() at most. What is longer than twice kLongestStep counts as that: the waiter did not run.
class TimeLeft {
 public:
  static constexpr std::chrono::milliseconds kLongestStep{50};

  explicit TimeLeft(Clock::duration bound) : left_(bound) {}

  bool any() { return left() > Clock::duration::zero(); }
  Clock::duration left() {
    const Clock::time_point now = Clock::now();
    left_ -= std::min<Clock::duration>(now - last_, 2 * kLongestStep);
    last_ = now;
    return left_;
  }
  Clock::duration step() {
    return std::clamp<Clock::duration>(left(), Clock::duration::zero(), kLongestStep);
  }

 private:
  Clock::time_point last_ = Clock::now();
  Clock::duration left_;
};

// How long a waiter polls before it sleeps: GPUPOOL_SPIN_US, or 50 us, and none on fewer than three cores,
// where a spinner would keep the thread it waits for from running.
std::chrono::nanoseconds spinTime();
// The same for a worker between the calls of a busy client: 5 ms, for the call after a kernel of that length
// would otherwise pay for a wake-up (10 to 20 us on a virtual machine).
inline std::chrono::nanoseconds longSpinTime() {
  return std::max(spinTime(),
                  std::min<std::chrono::nanoseconds>(100 * spinTime(), std::chrono::milliseconds(5)));
}

inline void relaxCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The waker's half, after it has published with `release`: true if the sleeper must be woken.
inline bool mustWake(const ArmWord& word, bool expedited) {
  if (expedited) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    return word.load(std::memory_order_relaxed) != 0;
  }
  return word.load(std::memory_order_seq_cst) != 0;  // the publishing store was seq_cst too
}

// The sleeper's half: arms `word`; the caller then looks at its condition once more before it sleeps.
inline void arm(ArmWord& word, bool expedited) {
  word.store(1, std::memory_order_seq_cst);
  if (expedited) heavyBarrier();
}

// Waits until ready() is true: polls for a while, then sleeps on `word`. ready() must also become true when
// the wait is to be given up (peer gone). Returns ready() at the deadline.
template <class Ready>
bool waitFor(ArmWord& word, bool expedited, Deadline deadline, Ready ready,
             std::chrono::nanoseconds spin = spinTime()) {
  if (ready()) return true;
  if (spin.count() > 0) {
    Deadline stop = Clock::now() + spin;
    if (stop > deadline) stop = deadline;
    do {
      for (int i = 0; i < 16; ++i) {
        relaxCpu();
        if (ready()) return true;
      }
    } while (Clock::now() < stop);
  }
  bool done = false;
  while (!done && Clock::now() < deadline) {
    arm(word, expedited);
    if ((done = ready())) break;
    futexSleep(word, deadline);
    done = ready();
  }
  word.store(0, std::memory_order_relaxed);
  return done || ready();
}

}  // namespace gpupool::transport
