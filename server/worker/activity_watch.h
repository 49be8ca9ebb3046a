#pragma once
// Tells the server whether a session's program does something, where leases take turns (schema::Activity):
// the server puts aside whom that costs least, and brings back who has something to do.
//
// Busy and quiet go by the frames that arrive: a program that waits for a long kernel is quiet, and what its
// device does is the concern of whoever wants to suspend it. A thread of its own looks four times a second.

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "server/worker/session.h"
#include "server/worker_process.h"

namespace gpupool::server {

class ActivityWatch {
 public:
  static constexpr std::chrono::milliseconds kLook{250};
  static constexpr std::chrono::milliseconds kQuietAfter{500};

  // Called on the thread of its own, once for each change; the server takes a new session for a busy one.
  using Report = std::function<void(Activity)>;
  ActivityWatch(Session& session, Report report);
  ~ActivityWatch();
  ActivityWatch(const ActivityWatch&) = delete;
  ActivityWatch& operator=(const ActivityWatch&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  Activity look();

  Session& session_;
  Report report_;
  uint64_t seen_ = 0;  // frames; what follows is thread_'s own, too
  Clock::time_point seenAt_ = Clock::now();
  Activity told_ = Activity::busy;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace gpupool::server
