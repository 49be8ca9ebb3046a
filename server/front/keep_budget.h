#pragma once
// How much of this machine's memory the checkpoints of protected sessions may take, all together. Any thread.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace gpupool::server {

class KeepBudget : public std::enable_shared_from_this<KeepBudget> {
 public:
  explicit KeepBudget(uint64_t bytes) : most_(bytes) {}

  // So many bytes more: "" or why not. And less.
  std::string take(uint64_t bytes) {
    if (bytes <= most_ && used_.fetch_add(bytes) + bytes <= most_) return "";
    if (bytes <= most_) used_ -= bytes;
    return "no room in the memory for checkpoints (protect_memory in server.yaml)";
  }
  void give(uint64_t bytes) { used_ -= bytes; }
  uint64_t most() const { return most_; }
  // So many bytes more are to be had now.
  bool has(uint64_t bytes) const {
    const uint64_t used = used_;
    return used <= most_ && bytes <= most_ - used;
  }
  // Gives back what was taken when nobody holds it any more.
  std::shared_ptr<void> share(uint64_t bytes) {
    return {nullptr, [self = shared_from_this(), bytes](void*) { self->give(bytes); }};
  }

 private:
  const uint64_t most_;
  std::atomic<uint64_t> used_{0};
};

}  // namespace gpupool::server
