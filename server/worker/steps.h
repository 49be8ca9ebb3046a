#pragma once
// When a session that is to stand still, but whose device waits for what the program calls next, lets a call
// through. In turn nothing goes for a while, so that what runs by itself can end, and then, for a while, one
// call after the other: a look at the device between any two may find it idle. Calls may also make the
// device's queue longer; so the times in which none goes grow faster, fourfold, and the others twofold.
//
// No threads; `now` never goes back.

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>
#include <random>

namespace gpupool::server {

class Steps {
 public:
  using Clock = std::chrono::steady_clock;
  // left: all the time that there is.
  Steps(Clock::time_point now, Clock::duration left)
      : stepping_(std::clamp<Clock::duration>(left / kLeastTimes, kLeast, kFirst)),
        quiet_(kQuieter * stepping_),
        end_(now + stepping_) {}

  // A call may go.
  bool due(Clock::time_point now) {
    while (now >= end_) {
      steps_ = !steps_;
      Clock::duration& length = steps_ ? stepping_ : quiet_;
      end_ += length;
      length *= steps_ ? kMoreSteps : kQuieter;
    }
    return steps_;
  }
  // Until when the device is looked at before the next one goes. Mostly briefly: there may be thousands until
  // the device is idle. Now and then for longer, for work that takes a while once nothing else is behind it:
  // in no rhythm, for programs have one. mayStep: false: none goes now.
  Clock::time_point next(Clock::time_point now, bool mayStep) {
    if (!due(now)) return end_;
    if (!mayStep) return std::min(end_, now + kLookAgain);
    return now + kLook * (1 << longer_);
  }
  void gone() {
    ++gone_;
    longer_ = std::min(std::countr_zero(random_() >> kPoorBits), kLongestLook);
  }
  uint32_t count() const { return gone_; }

 private:
  static constexpr std::chrono::milliseconds kFirst{250}, kLeast{10}, kLook{2}, kLookAgain{100};
  static constexpr int kLeastTimes = 8;  // the first one is not longer than that part of all
  static constexpr int kQuieter = 4, kMoreSteps = 2;
  static constexpr int kPoorBits = 8;     // the lower ones of a linear generator
  static constexpr int kLongestLook = 5;  // 2^5 times as long

  Clock::duration stepping_, quiet_;  // of the next time of each kind
  Clock::time_point end_;             // of this one
  bool steps_ = false;
  uint32_t gone_ = 0;
  int longer_ = 0;
  std::minstd_rand random_;
};

}  // namespace gpupool::server
