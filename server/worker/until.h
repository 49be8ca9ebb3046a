#pragma once
// A moment until which something is waited for, at most: the wait is over too when somebody gives it up.

#include <algorithm>
#include <atomic>
#include <chrono>

namespace gpupool::server {

class Until {
 public:
  using Clock = std::chrono::steady_clock;
  // givenUp: set by any thread; outlives this object. Who waits looks at it again and again.
  Until(Clock::time_point at, const std::atomic<bool>* givenUp = nullptr) : at_(at), givenUp_(givenUp) {}
  bool over() const { return Clock::now() >= at_ || (givenUp_ != nullptr && givenUp_->load()); }
  Clock::duration left() const { return at_ - Clock::now(); }
  Until sooner(Clock::time_point at) const { return {std::min(at_, at), givenUp_}; }
  // For a wait that looks again after `step`.
  Clock::time_point next(Clock::duration step) const { return std::min(at_, Clock::now() + step); }

 private:
  Clock::time_point at_;
  const std::atomic<bool>* givenUp_;
};

}  // namespace gpupool::server
