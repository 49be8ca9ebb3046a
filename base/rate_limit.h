#pragma once
// Limits the rate of failed attempts: each peer has a bucket of failures that drains with time. One thread.

#include <chrono>
#include <map>
#include <string>

namespace gpupool {

class FailureLimit {
 public:
  using Clock = std::chrono::steady_clock;
  // `burst` failures at once, then one every `interval`. A peer is allowed while one more failure fits.
  FailureLimit(double burst, std::chrono::milliseconds interval) : burst_(burst), interval_(interval) {}

  bool allowed(const std::string& peer, Clock::time_point now);
  void failed(const std::string& peer, Clock::time_point now);
  size_t peers() const { return buckets_.size(); }

 private:
  static constexpr size_t kPeers = 4096;  // more are forgotten, the emptiest buckets first
  struct Bucket {
    double failures = 0;
    Clock::time_point at;
  };
  double level(const Bucket& bucket, Clock::time_point now) const;
  void forget(Clock::time_point now);

  double burst_;
  std::chrono::milliseconds interval_;
  std::map<std::string, Bucket> buckets_;
};

}  // namespace gpupool
