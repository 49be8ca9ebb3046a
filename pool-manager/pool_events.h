#pragma once
// What the pool orders of servers, and answers to those who ask: implemented by the service, and by tests.

#include <cstdint>
#include <string>

#include "pool-manager/audit.h"
#include "pool-manager/failure.h"
#include "pool-manager/local_process.h"
#include "pool-manager/model.h"

namespace gpupool::pool {

class PoolEvents {
 public:
  virtual ~PoolEvents() = default;
  // Tell the server; answer with granted() or grantFailed().
  virtual void grant(const Lease& lease) = 0;
  // Tell the server; answer with revoked() or revokeFailed(). Also for leases the pool does not know.
  virtual void revoke(const ServerLife& server, const Id& id, const std::string& reason) = 0;
  // Tell the server; answer with suspendDone() or suspendFailed(), resumeDone() or resumeFailed(),
  // migrateDone() or migrateFailed(), and `order`. target: null: other workers on the same devices.
  // folder: not empty: into files, and from there.
  virtual void suspend(const std::string& server, const Id& id, uint32_t drainMs, const std::string& folder,
                       uint64_t order) = 0;
  // running: the lease is neither suspended nor held, and goes back into a checkpoint.
  virtual void resume(const std::string& server, const Id& id, const std::string& folder, bool running,
                      uint64_t order) = 0;
  virtual void migrate(const std::string& server, const Id& id, uint32_t drainMs, const Lease* target,
                       uint64_t order) = 0;
  // The same, with checkpointDone() or checkpointFailed(). folder: as the asker names it.
  virtual void checkpoint(const std::string& server, const Id& id, uint32_t drainMs,
                          const std::string& folder, uint64_t order) = 0;
  // Tell the target's server, on which the lease is already (here) or not: that it reserves these devices;
  // that they are given back if no session uses them; that the lease now has these devices instead of those
  // that it had there. Answer with prepareDone() or prepareFailed(), returned() or returnFailed(),
  // settled() or settleFailed(), and `order`.
  virtual void prepare(const Lease& target, bool here, uint64_t order) = 0;
  virtual void giveBack(const Lease& target, bool here, uint64_t order) = 0;
  virtual void settle(const std::string& server, const Id& id, uint64_t order) = 0;
  // Tell the standby that it is to keep this lease's checkpoints, or that it is not any more. There is no
  // answer: its beats say what it keeps.
  virtual void keep(const ServerLife&, const Lease&) {}
  virtual void dropKept(const ServerLife&, const Id&) {}
  // The answer to every suspend(), resume() or migrate() of this lease so far.
  virtual void suspended(const Id& id, const SuspendResult& result) = 0;
  virtual void notSuspended(const Id& id, const Failure& failure) = 0;
  virtual void resumed(const Id& id) = 0;
  virtual void notResumed(const Id& id, const Failure& failure) = 0;
  virtual void migrated(const Id& id, const MigrateResult& result) = 0;
  virtual void notMigrated(const Id& id, const Failure& failure) = 0;
  // The answer to checkpoint().
  virtual void checkpointed(const Id& id, const CheckpointResult& result) = 0;
  virtual void notCheckpointed(const Id& id, const Failure& failure) = 0;
  // False: nobody waits any more for the lease to be resumed.
  virtual bool resumeWanted(const Id& id) = 0;
  // The answer to every request() with this id so far.
  virtual void granted(const Lease& lease) = 0;
  // The answer to a request to adopt a claim, whose lease this is; else failed() with the adopter's id.
  virtual void adopted(const Id& adopter, const Lease& lease) = 0;
  virtual void failed(const Id& id, const Failure& failure) = 0;
  virtual void ended(const Id& id) = 0;
  // False: nobody waits for an answer to request `id` any more.
  virtual bool wanted(const Id& id) = 0;
  // Whether the holder, a process of this machine, is known to have ended: its lease need not run out then.
  virtual bool hasEnded(const LocalProcess& holder) { return pool::hasEnded(holder); }
  // The wall clock, since 1970: for what has to be told, or outlives the manager.
  virtual uint64_t calendarMs() { return pool::calendarMs(); }
  // By how much the pool's clock has stood still so far, while the machine's went on (AwakeClock).
  virtual uint64_t stoodStillMs() { return 0; }
  // Another manager has taken over the store: this one must end.
  virtual void superseded() {}
};

}  // namespace gpupool::pool
