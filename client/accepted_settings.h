#pragma once
// Which settings of an executable graph's nodes the driver has accepted. It judges what a node launches and
// how, and not the parameters: a setting like an accepted one of that node is posted, so that a program that
// gives its graph new addresses before each launch, as XLA does, waits for no reply. (Which graph a node
// contains, XLA chooses among up to 16.) Threads: any.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace gpupool::client {

// For hashes of what the driver judges.
inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value;
  hash *= 0x9e3779b97f4a7c15ull;
  return hash ^ hash >> 29;
}

class AcceptedSettings {
 public:
  // setting: a hash of all that the driver judges.
  bool accepted(uint64_t node, uint64_t setting) {
    std::lock_guard lock(mutex_);
    const auto known = ofNode_.find(node);
    return known != ofNode_.end() &&
           std::find(known->second.begin(), known->second.end(), setting) != known->second.end();
  }
  void accept(uint64_t node, uint64_t setting) {
    std::lock_guard lock(mutex_);
    std::vector<uint64_t>& known = ofNode_[node];
    if (known.size() >= kMost) known.clear();
    known.push_back(setting);
  }
  void forget() {
    std::lock_guard lock(mutex_);
    ofNode_.clear();
  }

 private:
  static constexpr size_t kMost = 32;
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> ofNode_;  // of no more nodes than the graph has
};

// Counts the calls that may have changed a graph: of one that was accepted as a child nothing is known then.
extern std::atomic<uint64_t> graphRevision;

}  // namespace gpupool::client
