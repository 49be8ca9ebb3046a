#pragma once
// What the session's program has done here: calls, and bytes of copies. The executor alone counts, with
// stores that cost a call nothing measurable; any thread may read.

#include <atomic>

#include "server/worker_process.h"

namespace gpupool::server {

class CallCounts {
 public:
  void frame(bool awaited) {
    grow(calls_, 1);
    if (awaited) grow(awaited_, 1);
  }
  void toDevice(uint64_t bytes) { grow(toDeviceBytes_, bytes); }
  void fromDevice(uint64_t bytes) { grow(fromDeviceBytes_, bytes); }

  SessionCounts now() const {
    constexpr auto order = std::memory_order_relaxed;
    return {calls_.load(order), awaited_.load(order), toDeviceBytes_.load(order),
            fromDeviceBytes_.load(order)};
  }

 private:
  // No locked instruction: there is one writer.
  static void grow(std::atomic<uint64_t>& count, uint64_t by) {
    count.store(count.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }

  std::atomic<uint64_t> calls_{0}, awaited_{0}, toDeviceBytes_{0}, fromDeviceBytes_{0};
};

}  // namespace gpupool::server
