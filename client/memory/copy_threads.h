#pragma once
// A few threads that copy between staging memory and the application's, so that a large copy is not bound by
// what one core can move. Started when the first large copy needs them, at most kMost and never more than
// half the cores with the caller; asleep otherwise. Between jobs they hold no memory of the application. They
// are never joined: they end with the process.
//
// Threads: any; the one that waits for a job works on queued ones meanwhile, so nothing depends on a helper
// being there.

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>

namespace gpupool::client {

class CopyThreads {
 public:
  static constexpr unsigned kMost = 4;  // with the caller

  struct Job {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    size_t bytes = 0;
    bool streaming = false;  // past the caches: the target is not read soon
    bool shared = false;     // a helper may take it
    bool done = false;       // under the mutex
  };

  // `job` stays where it is until finish() has returned for it. parallel: a helper may start it before then.
  void start(Job& job, bool parallel);
  void finish(Job& job);
  // Threads that can copy at once, the caller among them.
  static unsigned width();

 private:
  void help();
  void runNext(std::unique_lock<std::mutex>& lock);  // there is one

  std::mutex mutex_;
  std::condition_variable queued_, finished_;
  std::deque<Job*> queue_;
  unsigned helpers_ = 0, idle_ = 0;
};

CopyThreads& copyThreads();

}  // namespace gpupool::client
