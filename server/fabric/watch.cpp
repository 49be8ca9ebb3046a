#include "server/fabric/watch.h"

#include <poll.h>

#include <mutex>

#include "base/log.h"

namespace gpupool::fabric {
namespace {

// What follows an event (addresses, other ports) comes within this; and a storm of events costs no more.
constexpr std::chrono::milliseconds kSettle{50};

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
  std::mutex lock;
  std::shared_ptr<const Fabric> report = std::make_shared<Fabric>();

  void publish(Fabric now);
  Fabric look();
  void run(const WatchThread::Stop& stop);
};

void Watch::Shared::publish(Fabric now) {
  if (now == *report) return;  // only this thread writes it
  logChanges(*report, now);
  auto next = std::make_shared<const Fabric>(std::move(now));
  std::lock_guard guard(lock);
  report = std::move(next);
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

void Watch::Shared::run(const WatchThread::Stop& stop) {
  for (;;) {
    publish(look());
    std::vector<pollfd> waited{{stop.descriptor(), POLLIN, 0}};
    for (int descriptor : verbs->descriptors()) waited.push_back({descriptor, POLLIN, 0});
    const int ready = ::poll(waited.data(), waited.size(), static_cast<int>(settings.period.count()));
    if (waited[0].revents != 0) break;
    if (ready <= 0) continue;
    for (const std::string& text : verbs->events()) GPUPOOL_INFO("fabric: %s", text.c_str());
    if (stop.within(kSettle)) break;
  }
}

Watch::Watch(std::unique_ptr<Verbs> verbs, Settings settings) : shared_(std::make_shared<Shared>()) {
  shared_->verbs = std::move(verbs);
  shared_->settings = std::move(settings);
  Fabric first;
  first.note = "not looked at yet";
  shared_->report = std::make_shared<const Fabric>(std::move(first));
  thread_ = std::make_unique<WatchThread>([shared = shared_](const WatchThread::Stop& stop) {
    shared->run(stop);
    shared->verbs = nullptr;
  });
}

Watch::Watch(std::string note) : shared_(std::make_shared<Shared>()) {
  Fabric fixed;
  fixed.note = std::move(note);
  shared_->report = std::make_shared<const Fabric>(std::move(fixed));
}

Watch::~Watch() {
  if (thread_ != nullptr && !thread_->end(shared_->settings.stopBound))
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
