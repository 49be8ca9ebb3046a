#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

namespace gpupool::server {

// What the writers of a checkpoint have in common: the moment in which all of its sessions stand still, and
// that in which all of its files are whole. Any thread.
class CheckpointCut {
 public:
  explicit CheckpointCut(size_t sessions) : moving_(sessions), unwritten_(sessions) {}
  // One more stands still. Waits for all: "" or why it does not come to that.
  std::string arrive() {
    std::unique_lock lock(mutex_);
    if (--moving_ == 0) changed_.notify_all();
    // Each session's worker answers in its time, or is ended: either is seen by who calls `fail`.
    changed_.wait(lock, [this] { return moving_ == 0 || !why_.empty(); });
    return why_;
  }
  // The file of one more is whole; behind the last one the checkpoint is published ("" or why not). waits:
  // until that is done. "" or why not.
  std::string finish(const std::function<std::string()>& publish, bool waits) {
    std::unique_lock lock(mutex_);
    if (!why_.empty()) return why_;
    if (--unwritten_ == 0) {
      publishing_ = true;
      lock.unlock();
      std::string why = publish();
      lock.lock();
      publishing_ = false;
      published_ = why.empty();
      if (why_.empty()) why_ = why;
      changed_.notify_all();
      return why;
    }
    // A session that ends meanwhile decides nothing any more: only whether the files have their place does.
    if (waits) changed_.wait(lock, [this] { return published_ || (!publishing_ && !why_.empty()); });
    return waits && !published_ ? why_ : "";
  }
  void fail(const std::string& why) {
    std::lock_guard lock(mutex_);
    if (why_.empty()) why_ = why;
    changed_.notify_all();
  }
  std::string why() const {
    std::lock_guard lock(mutex_);
    return why_;
  }
  bool published() const {
    std::lock_guard lock(mutex_);
    return published_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  size_t moving_, unwritten_;
  bool publishing_ = false, published_ = false;
  std::string why_;
};

}  // namespace gpupool::server
