#include "server/worker/activity_watch.h"

namespace gpupool::server {

ActivityWatch::ActivityWatch(Session& session, Report report)
    : session_(session), report_(std::move(report)), thread_([this] { run(); }) {}

// The thread leaves its wait at the latest when it looks again.
ActivityWatch::~ActivityWatch() {
  ending_ = true;
  thread_.join();
}

void ActivityWatch::run() {
  while (!ending_ && !session_.stopping()) {
    const Activity now = look();
    if (now != told_) {
      told_ = now;
      report_(now);
    }
    // Told that a frame waits, nothing can change before the gate opens.
    if (now == Activity::waiting)
      std::this_thread::sleep_for(kLook);
    else
      session_.gate().awaitWanted(kLook);
  }
}

Activity ActivityWatch::look() {
  if (session_.gate().awaitWanted(std::chrono::milliseconds(0))) return Activity::waiting;
  const uint64_t admitted = session_.admitted();
  const auto now = Clock::now();
  // The frame that waited has been admitted, or will be at once.
  if (admitted != seen_ || told_ == Activity::waiting) {
    seen_ = admitted;
    seenAt_ = now;
  }
  return now - seenAt_ < kQuietAfter ? Activity::busy : Activity::quiet;
}

}  // namespace gpupool::server
