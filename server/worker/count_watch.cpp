#include "server/worker/count_watch.h"

namespace gpupool::server {

CountWatch::CountWatch(const CallCounts& counts, Report report, std::chrono::milliseconds interval)
    : counts_(counts), report_(std::move(report)), thread_([this, interval] { run(interval); }) {}

CountWatch::~CountWatch() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  over_.notify_all();
  thread_.join();
}

void CountWatch::tell() {
  std::lock_guard lock(mutex_);
  tellLocked();
}

void CountWatch::run(std::chrono::milliseconds interval) {
  std::unique_lock lock(mutex_);
  while (!over_.wait_for(lock, interval, [this] { return ending_; })) tellLocked();
}

void CountWatch::tellLocked() {
  const SessionCounts now = counts_.now();
  if (now != told_ && report_(now)) told_ = now;
}

}  // namespace gpupool::server
