#pragma once
// A clock that stands still while its reader does.
//
// A manager may be stopped for any length of time: SIGSTOP, a paused virtual machine, a slow disk. Renewals
// and beats that came meanwhile wait unread in its sockets. If that time counted, the manager would wake,
// find every deadline passed, and revoke every lease before it read them. So the time between two readings
// counts only up to `mostMs`; the owner's loop reads the clock far more often than that. One thread.

#include <algorithm>
#include <cstdint>
#include <functional>

namespace gpupool::pool {

class AwakeClock {
 public:
  // machine: milliseconds that never run backwards, such as bootTimeMs.
  AwakeClock(std::function<uint64_t()> machine, uint64_t mostMs)
      : machine_(std::move(machine)), mostMs_(mostMs), seenMs_(machine_()), nowMs_(seenMs_) {}

  uint64_t now() {
    const uint64_t machine = std::max(machine_(), seenMs_);
    nowMs_ += std::min(machine - seenMs_, mostMs_);
    seenMs_ = machine;
    return nowMs_;
  }
  // By how much it is behind the machine's, as of the last reading: for what goes on while the reader is
  // away.
  uint64_t stoodStillMs() const { return seenMs_ - nowMs_; }

 private:
  std::function<uint64_t()> machine_;
  uint64_t mostMs_, seenMs_, nowMs_;
};

}  // namespace gpupool::pool
