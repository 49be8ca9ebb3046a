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

OrderedWork::OrderedWork(size_t slots, size_t threads, PieceWork work)
    : work_(std::move(work)), mostThreads_(threads), results_(slots) {}

OrderedWork::OrderedWork(size_t slots, size_t threads, Work work)
    : OrderedWork(slots, threads,
                  PieceWork([work = std::move(work)](size_t slot, size_t) { return work(slot); })) {}

OrderedWork::~OrderedWork() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  more_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void OrderedWork::give(size_t pieces) {
  {
    std::lock_guard lock(mutex_);
    results_[next()] = {std::max<size_t>(pieces, 1), 0, 0, 0, ""};
    pieces_ += results_[next()].pieces;
    ++given_;
  }
  pieces > 1 ? more_.notify_all() : more_.notify_one();
  try {
    while (threads_.size() < std::min(mostThreads_, pieces_)) threads_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
    // Those that there are do it.
  }
}

std::string OrderedWork::await() {
  std::unique_lock lock(mutex_);
  const Result& oldest = results_[this->oldest()];
  awaited_ = &oldest;
  while (oldest.ended < oldest.pieces) {
    if (threads_.size() < 2 && begun_ < given_)
      doNext(lock);
    else
      done_.wait(lock);
  }
  awaited_ = nullptr;
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
  const size_t slot = begun_ % results_.size();
  Result& result = results_[slot];
  const size_t piece = result.begun++;
  if (result.begun == result.pieces) ++begun_;
  lock.unlock();
  std::string why = doOne(slot, piece);
  lock.lock();
  if (!why.empty() && (result.why.empty() || piece < result.wrong)) {
    result.wrong = piece;
    result.why = std::move(why);
  }
  if (++result.ended == result.pieces && awaited_ == &result) done_.notify_one();
}

std::string OrderedWork::doOne(size_t slot, size_t piece) const {
  try {
    return work_(slot, piece);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace gpupool
