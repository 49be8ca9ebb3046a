#include "server/fabric/watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "base/signals.h"

namespace gpupool::fabric {
namespace {

// What follows an event (addresses, other ports) comes within this; and a storm of events costs no more.
constexpr int kSettleMs = 50;

void logChanges(const Fabric& before, const Fabric& after) {
  for (const Change& change : changes(before, after)) {
    if (change.worse)
      GPUPOOL_WARNING("fabric: %s", change.text.c_str());
    else
      GPUPOOL_INFO("fabric: %s", change.text.c_str());
  }
}

}  // namespace

struct Watch::Shared {
  std::unique_ptr<Verbs> verbs;
  Settings settings;
  int stop = -1;  // an eventfd: readable when the thread is to end
  std::mutex lock;
  std::condition_variable ended;
  bool running = false;
  std::shared_ptr<const Fabric> report = std::make_shared<Fabric>();

  ~Shared() {
    if (stop >= 0) ::close(stop);
  }
  void publish(Fabric now);
  bool stopWithin(int ms) const;
  Fabric look();
  void run();
};

void Watch::Shared::publish(Fabric now) {
  if (now == *report) return;  // only this thread writes it
  logChanges(*report, now);
  auto next = std::make_shared<const Fabric>(std::move(now));
  std::lock_guard guard(lock);
  report = std::move(next);
}

bool Watch::Shared::stopWithin(int ms) const {
  pollfd waited{stop, POLLIN, 0};
  return ::poll(&waited, 1, ms) > 0;
}

Fabric Watch::Shared::look() {
  try {
    return takeInventory(*verbs, Sysfs(settings.sysfs), settings.gpus);
  } catch (const std::exception& error) {
    Fabric none;
    none.note = std::string("cannot be looked at: ") + error.what();
    return none;
  }
}

void Watch::Shared::run() {
  for (;;) {
    publish(look());
    std::vector<pollfd> waited{{stop, POLLIN, 0}};
    for (int descriptor : verbs->descriptors()) waited.push_back({descriptor, POLLIN, 0});
    const int ready = ::poll(waited.data(), waited.size(), static_cast<int>(settings.period.count()));
    if (waited[0].revents != 0) break;
    if (ready <= 0) continue;
    for (const std::string& text : verbs->events()) GPUPOOL_INFO("fabric: %s", text.c_str());
    if (stopWithin(kSettleMs)) break;
  }
}

Watch::Watch(std::unique_ptr<Verbs> verbs, Settings settings) : shared_(std::make_shared<Shared>()) {
  shared_->verbs = std::move(verbs);
  shared_->settings = std::move(settings);
  shared_->stop = ::eventfd(0, EFD_CLOEXEC);
  if (shared_->stop < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  Fabric first;
  first.note = "not looked at yet";
  shared_->report = std::make_shared<const Fabric>(std::move(first));
  shared_->running = true;
  // Signals are for the loop's thread: this one inherits a mask that blocks them all.
  SignalsBlocked inherited;
  std::thread([shared = shared_] {
    shared->run();
    shared->verbs = nullptr;
    std::lock_guard guard(shared->lock);
    shared->running = false;
    shared->ended.notify_all();
  }).detach();
}

Watch::Watch(std::string note) : shared_(std::make_shared<Shared>()) {
  Fabric fixed;
  fixed.note = std::move(note);
  shared_->report = std::make_shared<const Fabric>(std::move(fixed));
}

Watch::~Watch() {
  if (shared_->stop < 0) return;
  eventfd_write(shared_->stop, 1);
  std::unique_lock guard(shared_->lock);
  if (!shared_->ended.wait_for(guard, shared_->settings.stopBound, [this] { return !shared_->running; }))
    GPUPOOL_WARNING("fabric: an RDMA device does not answer; its thread is abandoned");
}

std::shared_ptr<const Fabric> Watch::latest() const {
  std::lock_guard guard(shared_->lock);
  return shared_->report;
}

std::unique_ptr<Watch> watchFabric(const std::string& library, Watch::Settings settings) {
  if (library == "none") return std::make_unique<Watch>("not looked at (--fabric none)");
  std::string why;
  auto verbs = loadVerbs(library, &why);
  if (verbs == nullptr) {
    GPUPOOL_INFO("fabric: %s", why.c_str());
    return std::make_unique<Watch>("no RDMA library: " + why);
  }
  return std::make_unique<Watch>(std::move(verbs), std::move(settings));
}

}  // namespace gpupool::fabric
