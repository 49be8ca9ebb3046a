#include "server/front/worker_pool.h"

#include <algorithm>

#include "base/log.h"
#include "server/walls/devices.h"

namespace gpupool::server {

WorkerPool::WorkerPool(kj::UnixEventPort& port, kj::Timer& timer, Settings settings)
    : port_(port), timer_(timer), settings_(std::move(settings)), tasks_(*this) {
  View all;
  for (const auto& [ordinal, address] : settings_.gpus) all.push_back(ordinal);
  latest_.push_back(std::move(all));
  refill();
  startContexts();
}

WorkerPool::~WorkerPool() { stopped_ = true; }

WorkerPool::View WorkerPool::viewOf(std::vector<int> ordinals) const {
  if (settings_.gpus.empty()) return {};
  std::sort(ordinals.begin(), ordinals.end());
  return ordinals;
}

int WorkerPool::fitness(const Slot& slot, const Wanted& wanted) const {
  if (slot.view != viewOf(wanted.ordinals)) return 0;
  if (slot.device < 0) return 1;
  const auto& ordinals = wanted.ordinals;
  return wanted.context && std::find(ordinals.begin(), ordinals.end(), slot.device) != ordinals.end() ? 2 : 0;
}

kj::Maybe<kj::Own<WorkerChild>> WorkerPool::takeReady(const Wanted& wanted) {
  for (int least : {2, 1}) {
    for (auto at = ready_.begin(); at != ready_.end();) {
      if (fitness(**at, wanted) != least) {
        ++at;
        continue;
      }
      alive_.erase((*at)->child.get());
      auto child = kj::mv((*at)->child);
      at = ready_.erase(at);
      if (child->gone()) continue;
      if (least == 1) note(viewOf(wanted.ordinals));
      return kj::mv(child);
    }
  }
  note(viewOf(wanted.ordinals));
  return nullptr;
}

kj::Promise<kj::Own<WorkerChild>> WorkerPool::take(Wanted wanted, kj::Duration bound) {
  if (stopped_) return KJ_EXCEPTION(FAILED, "the server is shutting down");
  auto ready = takeReady(wanted);
  KJ_IF_MAYBE (child, ready) {
    refill();
    return kj::mv(*child);
  }
  auto pair = kj::newPromiseAndFulfiller<kj::Own<WorkerChild>>();
  waiters_.push_back({kj::mv(pair.fulfiller), std::move(wanted)});
  refill();
  return pair.promise.exclusiveJoin(
      timer_.afterDelay(bound).then([this, bound]() -> kj::Promise<kj::Own<WorkerChild>> {
        return kj::Exception(kj::Exception::Type::OVERLOADED, __FILE__, __LINE__,
                             kj::str("no worker became ready in ", bound / kj::MILLISECONDS, " ms",
                                     lastFailure_.empty() ? "" : "; lately ", lastFailure_));
      }));
}

void WorkerPool::expect(std::vector<int> ordinals) {
  const auto& contexts = settings_.contexts;
  const bool context =
      ordinals.size() == 1 && std::find(contexts.begin(), contexts.end(), ordinals[0]) != contexts.end();
  if (settings_.gpus.empty() || settings_.warm == 0 || context) return;
  note(viewOf(std::move(ordinals)));
  refill();
}

// Of sessions that find no context.
void WorkerPool::note(const View& view) {
  std::erase(latest_, view);
  latest_.push_front(view);
  latest_.resize(std::min<size_t>(latest_.size(), std::max(settings_.warm, 1u)));
}

std::map<WorkerPool::View, size_t> WorkerPool::demand(bool ahead) const {
  std::map<View, size_t> demand;
  for (size_t i = 0; ahead && i < settings_.warm; ++i) ++demand[latest_[i % latest_.size()]];
  for (const Waiter& waiter : waiters_) ++demand[viewOf(waiter.wanted.ordinals)];
  return demand;
}

void WorkerPool::refill() {
  if (stopped_ || pausing_) return;
  std::erase_if(waiters_, [](Waiter& waiter) { return !waiter.fulfiller->isWaiting(); });
  for (bool ahead : {false, true})
    for (const auto& [view, many] : demand(ahead))
      while (mayStart() && count(-1, view) < many) start(-1, view);
  dismissOthers(demand(true));
  checkContextsLater();
}

// What waits for sessions on devices of which there were none lately.
void WorkerPool::dismissOthers(const std::map<View, size_t>& demand) {
  if (settings_.gpus.empty()) return;
  std::map<View, size_t> kept;
  for (auto at = ready_.begin(); at != ready_.end();) {
    const auto wanted = demand.find((*at)->view);
    if ((*at)->device >= 0 || (wanted != demand.end() && kept[(*at)->view]++ < wanted->second)) {
      ++at;
      continue;
    }
    (*at)->dismissed = true;
    (*at)->child->kill();
    at = ready_.erase(at);
  }
}

void WorkerPool::startContexts() {
  if (stopped_ || pausing_) return;
  for (int device : settings_.contexts) {
    const View view = viewOf({device});
    if (!mayStart() || count(device, view) != 0) continue;
    if (settings_.mayHold(device))
      start(device, view);
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

size_t WorkerPool::count(int device, const View& view) const {
  const auto same = [&](const auto& slot) { return slot->device == device && slot->view == view; };
  return std::count_if(ready_.begin(), ready_.end(), same) +
         std::count_if(starting_.begin(), starting_.end(), same);
}

// After a failure one at a time: the next one shows whether the cause is gone.
bool WorkerPool::mayStart() const {
  return !pausing_ && starting_.size() < (failures_ > 0 ? 1 : settings_.atOnce);
}

void WorkerPool::start(int device, const View& view) {
  auto slot = kj::refcounted<Slot>();
  slot->device = device;
  slot->view = view;
  auto arguments = settings_.arguments;
  walls::Devices devices{{}, settings_.rdma};
  for (int ordinal : view) devices.gpus.push_back(settings_.gpus.at(ordinal));
  if (!view.empty()) arguments.insert(arguments.end(), {"--devices", devices.text()});
  // The worker counts what it has: of one device only, that is the first.
  const int place = view.empty() ? device : 0;
  if (device >= 0) arguments.insert(arguments.end(), {"--warm-context", std::to_string(place)});
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
        if (!stopped_ && !slot->dismissed) failed("a waiting worker " + exit.text);
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
  const auto waiter = std::find_if(waiters_.begin(), waiters_.end(),
                                   [&](const Waiter& waiter) { return fitness(slot, waiter.wanted) > 0; });
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
