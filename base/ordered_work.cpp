#include "base/ordered_work.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

namespace gpupool {

size_t OrderedWork::helpers() {
  constexpr unsigned kMost = 12;
  return std::clamp(std::thread::hardware_concurrency(), 2u, kMost + 1) - 1;
}

OrderedWork::OrderedWork(size_t slots, size_t threads, Work work)
    : work_(std::move(work)), mostThreads_(threads), results_(slots) {}

OrderedWork::~OrderedWork() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  more_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void OrderedWork::give() {
  {
    std::lock_guard lock(mutex_);
    results_[next()].done = false;
    ++given_;
  }
  more_.notify_one();
  if (threads_.size() >= std::min<uint64_t>(mostThreads_, given_ - dropped_)) return;
  try {
    threads_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
    // The caller's does it.
  }
}

std::string OrderedWork::await() {
  std::unique_lock lock(mutex_);
  Result& oldest = results_[this->oldest()];
  while (!oldest.done) {
    if (begun_ < given_)
      doNext(lock);
    else
      done_.wait(lock);
  }
  return oldest.why;
}

void OrderedWork::help() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    if (begun_ < given_)
      doNext(lock);
    else
      more_.wait(lock);
  }
}

// The mutex is free meanwhile.
void OrderedWork::doNext(std::unique_lock<std::mutex>& lock) {
  const size_t slot = begun_++ % results_.size();
  lock.unlock();
  std::string why = doOne(slot);
  lock.lock();
  results_[slot] = {true, std::move(why)};
  done_.notify_one();
}

std::string OrderedWork::doOne(size_t slot) const {
  try {
    return work_(slot);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace gpupool
