#pragma once
// Which of the host's GPUs are this server's: those that it was told to offer, whose locks it has
// (device_lock.h).
//
// One that another server holds is left out, for as long as this server lives: who gets it is not a matter of
// who happens to be restarted. One that a worker of an earlier life of this very server still uses is this
// server's, but busy: the worker is killed after `stop`, and the device is free when its process is gone and
// its lock is ours. A worker whose session this life is to go on with is spared until that is decided
// (readoption.h): then it is no earlier one any more, or ends. Belongs to the event loop's thread.

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include <functional>
#include <list>
#include <string>
#include <vector>

#include "server/front/device_lock.h"
#include "server/front/leases.h"
#include "server/front/server_state.h"
#include "server/front/worker_parent.h"

namespace gpupool::server {

class DeviceClaims final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    std::string lockFolder;
    LockOwner me;
    std::vector<std::string> wanted;  // uuids, as uuidText writes them; empty: every GPU
    kj::Duration stop = 2 * kj::SECONDS;
    WorkerParent* parent = &ownChildren();        // that kills those of earlier lives
    kj::Duration check = 100 * kj::MILLISECONDS;  // of a lock that a dying worker holds
  };

  // Throws kj::Exception, saying why, if none of `found` is left.
  DeviceClaims(kj::UnixEventPort& port, kj::Timer& timer, Settings settings, const std::vector<Device>& found,
               std::vector<StoredWorker> earlier);
  ~DeviceClaims() noexcept;
  KJ_DISALLOW_COPY(DeviceClaims);

  std::vector<Device> devices() const;
  // GPUs of the host that are not among them, and why.
  const std::vector<std::string>& leftOut() const { return leftOut_; }
  // Why nothing may run on it yet; empty: it may.
  std::string busy(size_t device) const;
  // Its lock, for workers; -1 while that is not ours.
  int lock(size_t device) const { return claims_[device].lock.descriptor(); }
  // The workers of earlier lives that still run.
  std::vector<StoredWorker> earlier() const;
  // Those of them that may be readopted: they run until `readopt` or `end`.
  std::vector<StoredWorker> spared() const;
  // It is this life's from here on, and so are those of `locks` that are locks of its devices. Nothing: it is
  // gone, or never was.
  kj::Maybe<kj::AutoCloseFd> readopt(pid_t worker, std::vector<kj::AutoCloseFd> locks);
  // It does not become this life's.
  void end(pid_t worker);
  // Resolves when no worker of an earlier life is left that served this lease.
  kj::Promise<void> gone(const Id& lease);
  // Called whenever `busy` of a device may have changed.
  void onChange(std::function<void()> changed) { changed_ = std::move(changed); }
  // Once no worker of ours is left.
  void release();

 private:
  struct Claim {
    Device device;
    DeviceLock lock;
  };
  struct Survivor;

  // Why it is not ours to offer; empty: it is.
  std::string refusal(const Device& device, DeviceLock& lock) const;
  bool isWanted(const Device& device) const;
  void watchEarlier(std::vector<StoredWorker> workers);
  Survivor* find(pid_t worker) const;
  kj::Promise<void> watch(Survivor& survivor);
  kj::Promise<void> end(Survivor& survivor);
  kj::Promise<void> awaitLock(size_t device);
  void taskFailed(kj::Exception&& exception) override;

  kj::UnixEventPort& port_;
  kj::Timer& timer_;
  Settings settings_;
  std::vector<Claim> claims_;
  std::vector<std::string> leftOut_;
  std::list<kj::Own<Survivor>> survivors_;
  std::function<void()> changed_ = [] {};
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
