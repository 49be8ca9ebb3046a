#pragma once
// The executor passes the gate before each frame; while it is closed, no frame is begun but one that is let
// through by itself.
//
// Every launch passes here, so that side pays as little as can be: a store and a load, ordered by the
// compiler alone where the other side can make all threads meet a barrier (transports/waiting.h).

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "transports/waiting.h"

namespace gpupool::server {

class FrameGate {
 public:
  // --- the executor
  // False: the gate is closed, and the caller is outside.
  bool enter() {
    inside_.store(true, std::memory_order_relaxed);
    if (expedited_)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    else
      std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!closed_.load(std::memory_order_acquire)) [[likely]]
      return true;
    leave();
    return false;
  }
  void leave() { inside_.store(false, std::memory_order_release); }
  // Until it is opened or cut, for `time` at most. True: the caller alone is let in meanwhile, and is inside.
  bool awaitOpen(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    // It may have been opened since: nobody would take back that a frame waits.
    if (!closed_.load(std::memory_order_acquire)) return false;
    wanted_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, time,
                      [this] { return cut_ || letsOne_ || !closed_.load(std::memory_order_acquire); });
    if (cut_ || !letsOne_) return false;
    inside_.store(true, std::memory_order_release);
    wanted_ = letsOne_ = false;
    changed_.notify_all();
    return true;
  }

  // --- any other thread, one at a time
  // A frame that was begun before goes on: see empty().
  void close() {
    closed_.store(true, std::memory_order_seq_cst);
    if (expedited_)
      transport::heavyBarrier();
    else
      std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  // Nobody is inside. While the gate is closed this stays so.
  bool empty() const { return !inside_.load(std::memory_order_acquire); }
  void open() {
    {
      std::lock_guard lock(mutex_);
      closed_.store(false, std::memory_order_release);
      wanted_ = false;
    }
    changed_.notify_all();
  }
  // One frame goes through the closed gate: one that stands before it, or comes within `time`. False: none.
  bool letOne(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    letsOne_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, time, [this] { return !letsOne_ || cut_; });
    return !std::exchange(letsOne_, false);
  }
  // Tests: somebody waits in letOne.
  bool lets() {
    std::lock_guard lock(mutex_);
    return letsOne_;
  }
  // A frame stands before the closed gate. Waits until one does, for `time` at most.
  bool awaitWanted(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [this] { return wanted_ || cut_; });
    return wanted_;
  }
  // Nobody waits at it any more: the session ends.
  void cut() {
    {
      std::lock_guard lock(mutex_);
      cut_ = true;
    }
    changed_.notify_all();
  }

 private:
  const bool expedited_ = transport::expeditedBarrier();
  std::atomic<bool> inside_{false}, closed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool cut_ = false, wanted_ = false, letsOne_ = false;  // under mutex_
};

}  // namespace gpupool::server
