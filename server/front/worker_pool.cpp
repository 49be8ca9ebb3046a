#include "server/front/worker_pool.h"

#include <algorithm>

#include "base/log.h"

namespace gpupool::server {

WorkerPool::WorkerPool(kj::UnixEventPort& port, kj::Timer& timer, Settings settings)
    : port_(port), timer_(timer), settings_(std::move(settings)), tasks_(*this) {
  refill();
  startContexts();
}

WorkerPool::~WorkerPool() { stopped_ = true; }

namespace {

// A context of the session's own device first, none second, another's never.
int fitness(int device, const std::vector<int>& ordinals) {
  if (device < 0) return 1;
  return std::find(ordinals.begin(), ordinals.end(), device) != ordinals.end() ? 2 : 0;
}

}  // namespace

kj::Promise<kj::Own<WorkerChild>> WorkerPool::take(std::vector<int> ordinals, kj::Duration bound) {
  if (stopped_) return KJ_EXCEPTION(FAILED, "the server is shutting down");
  for (int wanted : {2, 1}) {
    for (auto at = ready_.begin(); at != ready_.end();) {
      if (fitness((*at)->device, ordinals) != wanted) {
        ++at;
        continue;
      }
      alive_.erase((*at)->child.get());
      auto child = kj::mv((*at)->child);
      at = ready_.erase(at);
      if (child->gone()) continue;
      refill();
      return kj::mv(child);
    }
  }
  auto pair = kj::newPromiseAndFulfiller<kj::Own<WorkerChild>>();
  waiters_.push_back({kj::mv(pair.fulfiller), std::move(ordinals)});
  refill();
  return pair.promise.exclusiveJoin(
      timer_.afterDelay(bound).then([this, bound]() -> kj::Promise<kj::Own<WorkerChild>> {
        return kj::Exception(kj::Exception::Type::OVERLOADED, __FILE__, __LINE__,
                             kj::str("no worker became ready in ", bound / kj::MILLISECONDS, " ms",
                                     lastFailure_.empty() ? "" : "; lately ", lastFailure_));
      }));
}

void WorkerPool::refill() {
  if (stopped_ || pausing_) return;
  std::erase_if(waiters_, [](Waiter& waiter) { return !waiter.fulfiller->isWaiting(); });
  while (mayStart() && count(-1) < settings_.warm + waiters_.size()) start(-1);
  checkContextsLater();
}

void WorkerPool::startContexts() {
  if (stopped_ || pausing_) return;
  for (int device : settings_.contexts) {
    if (!mayStart() || count(device) != 0) continue;
    if (settings_.mayHold(device))
      start(device);
    else
      checkContextsLater();
  }
}

// Later: a worker just taken is not yet the session that has the device.
void WorkerPool::checkContextsLater() {
  if (checking_ || settings_.contexts.empty()) return;
  checking_ = true;
  tasks_.add(timer_.afterDelay(settings_.contextCheck).then([this] {
    checking_ = false;
    startContexts();
  }));
}

size_t WorkerPool::count(int device) const {
  const auto same = [device](const auto& slot) { return slot->device == device; };
  return std::count_if(ready_.begin(), ready_.end(), same) +
         std::count_if(starting_.begin(), starting_.end(), same);
}

// After a failure one at a time: the next one shows whether the cause is gone.
bool WorkerPool::mayStart() const {
  return !pausing_ && starting_.size() < (failures_ > 0 ? 1 : settings_.atOnce);
}

void WorkerPool::start(int device) {
  auto slot = kj::refcounted<Slot>();
  slot->device = device;
  auto arguments = settings_.arguments;
  if (device >= 0) arguments.insert(arguments.end(), {"--warm-context", std::to_string(device)});
  try {
    slot->child = WorkerChild::start(port_, settings_.program, arguments, *settings_.parent);
  } catch (const kj::Exception& exception) {
    failed(exception.getDescription().cStr());
    return;
  }
  alive_.insert(slot->child.get());
  starting_.push_back(slot.get());
  tasks_.add(awaitReady(kj::mv(slot)));
}

std::string WorkerPool::lacking(schema::WorkerReport::Reader report) const {
  for (const std::string& wall : settings_.walls) {
    bool stands = false;
    for (auto one : report.getWalls()) stands = stands || wall == one.cStr();
    if (!stands) return wall;
  }
  return "";
}

kj::Promise<void> WorkerPool::awaitReady(kj::Own<Slot> slot) {
  auto report = timer_.timeoutAfter(settings_.startBound, slot->child->receive());
  auto kept = kj::addRef(*slot);
  return report.then(
      [this, slot = kj::mv(slot)](kj::Maybe<kj::Own<WorkerMessage>> maybe) mutable -> kj::Promise<void> {
        KJ_IF_MAYBE (message, maybe) {
          const auto report = (*message)->get();
          if (report.isFailed()) return discard(kj::mv(slot), report.getFailed());
          if (!report.isReady()) return discard(kj::mv(slot), "sent something else than that it is ready");
          if (report.getRowsHash() != settings_.rowsHash)
            return discard(kj::mv(slot), "speaks other call rows than this server's: restart the server");
          if (const std::string wall = lacking(report); !wall.empty())
            return discard(kj::mv(slot), "has no wall '" + wall + "', which this server's workers have");
          starting_.remove(slot.get());
          failures_ = 0;
          auto task = watchIdle(kj::addRef(*slot));
          offer(*slot);
          refill();
          return task;
        }
        return discard(kj::mv(slot), "");
      },
      [this, slot = kj::mv(kept)](kj::Exception&& exception) mutable -> kj::Promise<void> {
        const bool late = exception.getType() == kj::Exception::Type::OVERLOADED;
        return discard(kj::mv(slot), late ? "did not get ready in time" : exception.getDescription().cStr());
      });
}

kj::Promise<void> WorkerPool::watchIdle(kj::Own<Slot> slot) {
  auto exit = slot->child->exited();
  return exit.then(
      [this, slot = kj::mv(slot)](const WorkerChild::Exit& exit) mutable {
        if (slot->child.get() == nullptr) return;  // taken: the session's concern
        std::erase_if(ready_, [&](const kj::Own<Slot>& other) { return other.get() == slot.get(); });
        if (!stopped_) failed("a waiting worker " + exit.text);
        forget(*slot);
      },
      [](kj::Exception&&) {});  // taken, and dropped before it exited
}

kj::Promise<void> WorkerPool::discard(kj::Own<Slot> slot, std::string why) {
  slot->child->kill();
  auto exit = slot->child->exited();
  return exit.then([this, slot = kj::mv(slot), why = std::move(why)](const WorkerChild::Exit& exit) mutable {
    starting_.remove(slot.get());
    const std::string text = "a worker failed to start: " + (why.empty() ? "it " + exit.text : why);
    if (!stopped_ && slot->device >= 0) {
      suspendContext(slot->device, text);
    } else if (!stopped_) {
      failed(text);
    }
    forget(*slot);
  });
}

// Most likely leases hold the device's memory: no reason to call the device ill.
void WorkerPool::suspendContext(int device, const std::string& why) {
  GPUPOOL_WARNING("cannot make a context ahead of time on device %d: %s", device, why.c_str());
  std::erase(settings_.contexts, device);
  tasks_.add(timer_.afterDelay(settings_.contextPause).then([this, device] {
    settings_.contexts.push_back(device);
    refill();
  }));
  refill();
}

void WorkerPool::forget(Slot& slot) {
  alive_.erase(slot.child.get());
  if (!alive_.empty()) return;
  for (auto& fulfiller : emptied_) fulfiller->fulfill();
  emptied_.clear();
}

void WorkerPool::failed(const std::string& why) {
  lastFailure_ = why;
  auto pause = settings_.firstPause;
  for (uint32_t i = 0; i < failures_ && pause < settings_.longestPause; ++i) pause = pause * 2;
  pause = std::min(pause, settings_.longestPause);
  ++failures_;
  GPUPOOL_ERROR("%s (next attempt in %lld ms)", why.c_str(),
                static_cast<long long>(pause / kj::MILLISECONDS));
  if (pausing_) return;
  pausing_ = true;
  tasks_.add(timer_.afterDelay(pause).then([this] {
    pausing_ = false;
    refill();
  }));
}

void WorkerPool::offer(Slot& slot) {
  std::erase_if(waiters_, [](Waiter& waiter) { return !waiter.fulfiller->isWaiting(); });
  const auto waiter = std::find_if(waiters_.begin(), waiters_.end(), [&](const Waiter& waiter) {
    return fitness(slot.device, waiter.ordinals) > 0;
  });
  if (waiter == waiters_.end()) {
    ready_.push_back(kj::addRef(slot));
    return;
  }
  alive_.erase(slot.child.get());
  waiter->fulfiller->fulfill(kj::mv(slot.child));
  waiters_.erase(waiter);
}

kj::Promise<void> WorkerPool::stop(const std::string& why) {
  stopped_ = true;
  for (auto& waiter : waiters_)
    waiter.fulfiller->reject(kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(why)));
  waiters_.clear();
  if (alive_.empty()) return kj::READY_NOW;
  for (auto* child : alive_) child->kill();
  auto pair = kj::newPromiseAndFulfiller<void>();
  emptied_.add(kj::mv(pair.fulfiller));
  return kj::mv(pair.promise);
}

void WorkerPool::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("worker pool: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
