#pragma once
// Streams that ended with their context: natively they are told from handles that never were. Of the latest
// kMost it is known: a program that makes contexts and resets them without end keeps no more.
//
// Threads: any; a mutex inside.

#include <cuda.h>
#include <cstddef>

#include <deque>
#include <mutex>
#include <set>

namespace gpupool::client {

class EndedStreams {
 public:
  static constexpr size_t kMost = 16384;

  void add(CUstream stream) {
    std::lock_guard lock(mutex_);
    if (!all_.insert(stream).second) return;
    order_.push_back(stream);
    if (order_.size() <= kMost) return;
    all_.erase(order_.front());
    order_.pop_front();
  }
  bool contains(CUstream stream) {
    std::lock_guard lock(mutex_);
    return all_.contains(stream);
  }

 private:
  std::mutex mutex_;
  std::set<CUstream> all_;
  std::deque<CUstream> order_;
};

}  // namespace gpupool::client
