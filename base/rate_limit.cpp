#include "base/rate_limit.h"

#include <algorithm>

namespace gpupool {

double FailureLimit::level(const Bucket& bucket, Clock::time_point now) const {
  const std::chrono::duration<double, std::milli> passed = now - bucket.at;
  return std::max(0.0, bucket.failures - passed.count() / static_cast<double>(interval_.count()));
}

bool FailureLimit::allowed(const std::string& peer, Clock::time_point now) {
  const auto found = buckets_.find(peer);
  return found == buckets_.end() || level(found->second, now) + 1 <= burst_;
}

void FailureLimit::failed(const std::string& peer, Clock::time_point now) {
  if (buckets_.size() >= kPeers && !buckets_.contains(peer)) forget(now);
  Bucket& bucket = buckets_[peer];
  bucket.failures = std::min(level(bucket, now) + 1, burst_ * 2);
  bucket.at = now;
}

void FailureLimit::forget(Clock::time_point now) {
  std::erase_if(buckets_, [&](const auto& entry) { return level(entry.second, now) <= 0; });
  if (buckets_.size() < kPeers) return;
  const auto least = std::min_element(buckets_.begin(), buckets_.end(), [&](const auto& a, const auto& b) {
    return level(a.second, now) < level(b.second, now);
  });
  buckets_.erase(least);
}

}  // namespace gpupool
