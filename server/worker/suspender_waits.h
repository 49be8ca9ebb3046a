#pragma once
// What Suspender's sources have in common: how they wait, for how long they did, and one reason not to.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "server/driver.h"
#include "server/worker/until.h"

namespace gpupool::server {

inline constexpr char kCaptureOpen[] = "a stream capture is open";

// Looks again and again, more and more rarely, until `done` or the deadline. False: the deadline.
template <class Done>
bool lookUntil(const Until& deadline, Done&& done) {
  constexpr std::chrono::microseconds kFirstLook{20};
  constexpr std::chrono::milliseconds kLongestLook{2};
  for (auto pause = std::chrono::nanoseconds(kFirstLook); !done();
       pause = std::min<std::chrono::nanoseconds>(pause * 2, kLongestLook)) {
    if (deadline.over()) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

inline uint32_t millisecondsSince(std::chrono::steady_clock::time_point begin) {
  const auto time = std::chrono::steady_clock::now() - begin;
  return static_cast<uint32_t>(std::chrono::ceil<std::chrono::milliseconds>(time).count());
}

// Of this thread: other streams' captures forbid it nothing.
inline void relaxCaptures(const Driver& driver) {
  CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
  if (driver.cuThreadExchangeStreamCaptureMode) driver.cuThreadExchangeStreamCaptureMode(&relaxed);
}

}  // namespace gpupool::server
