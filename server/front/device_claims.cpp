#include "server/front/device_claims.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/process_name.h"

namespace gpupool::server {

struct DeviceClaims::Survivor {
  Survivor(kj::UnixEventPort& port, StoredWorker known, kj::AutoCloseFd process)
      : worker(std::move(known)),
        descriptor(kj::mv(process)),
        observer(port, descriptor, kj::UnixEventPort::FdObserver::OBSERVE_READ),
        gone(observer.whenBecomesReadable().fork()),
        spared(worker.session.has_value()) {}
  StoredWorker worker;
  kj::AutoCloseFd descriptor;  // pidfd_open(2): readable when the process is gone
  kj::UnixEventPort::FdObserver observer;
  kj::ForkedPromise<void> gone;
  bool spared;                       // it may be readopted
  kj::Promise<void> task = nullptr;  // that watches it; ends with it
};

DeviceClaims::DeviceClaims(kj::UnixEventPort& port, kj::Timer& timer, Settings settings,
                           const std::vector<Device>& found, std::vector<StoredWorker> earlier)
    : port_(port), timer_(timer), settings_(std::move(settings)), tasks_(*this) {
  for (const Device& device : found) {
    if (!isWanted(device)) continue;
    DeviceLock lock(settings_.lockFolder, device.uuid);
    const std::string why = refusal(device, lock);
    if (why.empty()) {
      claims_.push_back({device, kj::mv(lock)});
    } else {
      leftOut_.push_back(why);
    }
  }
  for (const std::string& uuid : settings_.wanted)
    if (std::none_of(found.begin(), found.end(), [&](const Device& device) {
          return strcasecmp(uuidText(device.uuid).c_str(), uuid.c_str()) == 0;
        }))
      leftOut_.push_back(uuid + ", named by --devices, is not on this machine");
  if (claims_.empty()) {
    std::string all;
    for (const std::string& one : leftOut_) all += (all.empty() ? "" : "; ") + one;
    kj::throwFatalException(kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                                          kj::str("no GPU is left for this server: ", all)));
  }
  for (const std::string& one : leftOut_) GPUPOOL_WARNING("left out: %s", one.c_str());
  watchEarlier(std::move(earlier));
  for (size_t device = 0; device < claims_.size(); ++device)
    if (lock(device) < 0) tasks_.add(awaitLock(device));
}

DeviceClaims::~DeviceClaims() noexcept = default;

bool DeviceClaims::isWanted(const Device& device) const {
  const std::string uuid = uuidText(device.uuid);
  return settings_.wanted.empty() ||
         std::any_of(settings_.wanted.begin(), settings_.wanted.end(),
                     [&](const std::string& name) { return strcasecmp(name.c_str(), uuid.c_str()) == 0; });
}

std::string DeviceClaims::refusal(const Device& device, DeviceLock& lock) const {
  if (lock.take(settings_.me)) return "";
  const LockOwner& holder = lock.holder();
  // Our own earlier life: only its workers can hold the lock still.
  if (holder.identity == settings_.me.identity && !holder.lives()) return "";
  return "GPU " + std::to_string(device.ordinal) + " (" + uuidText(device.uuid) + ") is held by " +
         holder.text() + "; stop that, or share the GPUs out with --devices";
}

void DeviceClaims::watchEarlier(std::vector<StoredWorker> workers) {
  for (StoredWorker& worker : workers) {
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, worker.pid, 0));
    if (descriptor < 0) continue;
    kj::AutoCloseFd process(descriptor);
    // Asked after it was opened: the descriptor names this very process.
    if (worker.startTicks == 0 || processStartTicks(worker.pid) != worker.startTicks) continue;
    GPUPOOL_WARNING("worker %d of lease %s, started before this server, still runs", worker.pid,
                    worker.lease.text().c_str());
    settings_.parent->spare(process);
    survivors_.push_back(kj::heap<Survivor>(port_, std::move(worker), kj::mv(process)));
    Survivor& survivor = *survivors_.back();
    survivor.task =
        (survivor.spared ? watch(survivor) : end(survivor)).eagerlyEvaluate([this](kj::Exception&& error) {
          taskFailed(kj::mv(error));
        });
  }
}

DeviceClaims::Survivor* DeviceClaims::find(pid_t worker) const {
  for (const auto& survivor : survivors_)
    if (survivor->worker.pid == worker) return const_cast<Survivor*>(survivor.get());
  return nullptr;
}

std::vector<StoredWorker> DeviceClaims::spared() const {
  std::vector<StoredWorker> list;
  for (const auto& survivor : survivors_)
    if (survivor->spared) list.push_back(survivor->worker);
  return list;
}

kj::Maybe<kj::AutoCloseFd> DeviceClaims::readopt(pid_t worker, std::vector<kj::AutoCloseFd> locks) {
  Survivor* survivor = find(worker);
  if (survivor == nullptr || !survivor->spared) return nullptr;
  for (kj::AutoCloseFd& lock : locks)
    for (Claim& claim : claims_)
      if (lock.get() >= 0) claim.lock.takeBack(lock, settings_.me);
  int process;
  KJ_SYSCALL(process = fcntl(survivor->descriptor, F_DUPFD_CLOEXEC, 0));
  survivors_.remove_if([&](const kj::Own<Survivor>& other) { return other.get() == survivor; });
  return kj::AutoCloseFd(process);
}

void DeviceClaims::end(pid_t worker) {
  Survivor* survivor = find(worker);
  if (survivor == nullptr || !std::exchange(survivor->spared, false)) return;
  survivor->task =
      end(*survivor).eagerlyEvaluate([this](kj::Exception&& error) { taskFailed(kj::mv(error)); });
}

// Until it is gone, on the loop's next turn: what removes it ends this very promise.
kj::Promise<void> DeviceClaims::watch(Survivor& survivor) {
  return survivor.gone.addBranch().then([this, pid = survivor.worker.pid] {
    GPUPOOL_INFO("worker %d is gone", pid);
    tasks_.add(kj::evalLater([this, pid] {
      survivors_.remove_if([&](const kj::Own<Survivor>& other) { return other->worker.pid == pid; });
      changed_();
    }));
  });
}

kj::Promise<void> DeviceClaims::end(Survivor& survivor) {
  auto killed = timer_.afterDelay(settings_.stop).then([this, &survivor] {
    GPUPOOL_WARNING("worker %d did not end with its server: killed", survivor.worker.pid);
    if (!settings_.parent->killEarlier(survivor.descriptor))
      GPUPOOL_ERROR("worker %d is not this server's to kill: was it started with other --worker-users?",
                    survivor.worker.pid);
  });
  return killed.exclusiveJoin(survivor.gone.addBranch()).then([this, &survivor] { return watch(survivor); });
}

kj::Promise<void> DeviceClaims::gone(const Id& lease) {
  kj::Vector<kj::Promise<void>> ends;
  for (auto& survivor : survivors_)
    if (survivor->worker.lease == lease) ends.add(survivor->gone.addBranch());
  return kj::joinPromises(ends.releaseAsArray());
}

kj::Promise<void> DeviceClaims::awaitLock(size_t device) {
  return timer_.afterDelay(settings_.check).then([this, device]() -> kj::Promise<void> {
    if (lock(device) < 0 && !claims_[device].lock.take(settings_.me)) return awaitLock(device);
    changed_();
    return kj::READY_NOW;
  });
}

std::vector<Device> DeviceClaims::devices() const {
  std::vector<Device> list;
  list.reserve(claims_.size());
  for (const Claim& claim : claims_) list.push_back(claim.device);
  return list;
}

std::string DeviceClaims::busy(size_t device) const {
  for (const auto& survivor : survivors_)
    for (const std::string& uuid : survivor->worker.devices)
      if (uuid == claims_[device].device.uuid)
        return "worker " + std::to_string(survivor->worker.pid) + " of lease " +
               survivor->worker.lease.text() + ", started before the server's restart, still runs";
  return lock(device) < 0 ? "a worker that was started before the server's restart still holds it" : "";
}

std::vector<StoredWorker> DeviceClaims::earlier() const {
  std::vector<StoredWorker> list;
  for (const auto& survivor : survivors_) list.push_back(survivor->worker);
  return list;
}

void DeviceClaims::release() {
  for (Claim& claim : claims_) claim.lock.release();
}

void DeviceClaims::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("devices: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
