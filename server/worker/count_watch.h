#pragma once
// Tells the server what a session's program has done (schema::SessionCounts), once a second when that has
// changed. A thread of its own.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "server/worker/call_counts.h"

namespace gpupool::server {

class CountWatch {
 public:
  // Called by one thread at a time. False: it could not be told, and is told again.
  using Report = std::function<bool(const SessionCounts&)>;
  CountWatch(const CallCounts& counts, Report report,
             std::chrono::milliseconds interval = std::chrono::seconds(1));
  ~CountWatch();
  CountWatch(const CountWatch&) = delete;
  CountWatch& operator=(const CountWatch&) = delete;

  // Any thread: what has not been told is, now.
  void tell();

 private:
  void run(std::chrono::milliseconds interval);
  void tellLocked();  // under mutex_

  const CallCounts& counts_;
  Report report_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool ending_ = false;
  SessionCounts told_;
  std::thread thread_;
};

}  // namespace gpupool::server
