#include "server/watch_thread.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/signals.h"

namespace gpupool {

struct WatchThread::Shared {
  int stop = ::eventfd(0, EFD_CLOEXEC);
  std::mutex lock;
  std::condition_variable ended;
  bool running = true;

  ~Shared() {
    if (stop >= 0) ::close(stop);
  }
};

bool WatchThread::Stop::within(std::chrono::milliseconds time) const {
  pollfd waited{descriptor_, POLLIN, 0};
  return ::poll(&waited, 1, static_cast<int>(time.count())) > 0;
}

WatchThread::WatchThread(std::function<void(const Stop&)> body) : shared_(std::make_shared<Shared>()) {
  if (shared_->stop < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  SignalsBlocked inherited;
  std::thread([shared = shared_, body = std::move(body)]() mutable {
    body(Stop(shared->stop));
    body = nullptr;
    std::lock_guard guard(shared->lock);
    shared->running = false;
    shared->ended.notify_all();
  }).detach();
}

WatchThread::~WatchThread() { end(std::chrono::milliseconds(0)); }

bool WatchThread::end(std::chrono::milliseconds bound) {
  eventfd_write(shared_->stop, 1);
  std::unique_lock guard(shared_->lock);
  return shared_->ended.wait_for(guard, bound, [this] { return !shared_->running; });
}

}  // namespace gpupool
