#pragma once
// What the manager counts since it was started, for /metrics (rest/metrics.h). One thread.

#include <kj/time.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>

namespace gpupool::pool {

// How often a time was within each of these bounds, in seconds; the last bucket has no bound.
class Histogram {
 public:
  static constexpr std::array<double, 13> kBounds = {0.001, 0.005, 0.01, 0.05, 0.1,  0.5, 1,
                                                     5,     15,    60,   300,  1800, 7200};
  void observe(kj::Duration time) {
    const double seconds = static_cast<double>(time / kj::MICROSECONDS) / 1e6;
    size_t bucket = 0;
    while (bucket < kBounds.size() && seconds > kBounds[bucket]) ++bucket;
    ++buckets_[bucket];
    sum_ += seconds;
  }
  const std::array<uint64_t, kBounds.size() + 1>& buckets() const { return buckets_; }
  double sum() const { return sum_; }  // seconds

 private:
  std::array<uint64_t, kBounds.size() + 1> buckets_ = {};
  double sum_ = 0;
};

struct Counters {
  Histogram leaseWaits;  // of requests that were granted: from the request to the answer
  Histogram grants;      // from telling a lease's server of it to the server's word
  Histogram delays;      // of the clock's tick: how much later it came than it was due
  std::map<std::string, uint64_t> missedBeats;  // by server: when the next one has come
};

}  // namespace gpupool::pool
