#pragma once
// What the manager knows and decides: servers, leases, who waits. No network and no clock: the service feeds
// it calls and times (milliseconds of an AwakeClock) and does what PoolEvents orders; tests do the same by
// hand.
//
// lease_state.h has a lease's life. After its end a tombstone stays, so that the same request id is never
// granted twice.
//
// Authority: the server is the final arbiter and admits a lease's sessions only after grant. So nothing is
// granted on a server that is not connected, or that has not said since it joined which leases it holds. A
// lease that is to end occupies its devices until its server has confirmed that its sessions are gone. If the
// server does not say so until holder and server must have noticed by themselves (deadline + drift + kill
// time), the lease is lost: over for its holder, and kept until the server is heard of. While the manager is
// away leases run on; after its restart every lease has a full TTL for its holder to come back. Only a holder
// on this machine, whose process can be seen to have ended, loses its lease at once.
//
// A name may be of several processes of a server, one after the other, and messages of an earlier one may
// arrive late. What a process says of a lease counts for the lease that was placed on that process; that
// those before it have ended shows with its first beat, which it sends when its join has been answered. It
// may go on with leases that one before it had, whose workers have lived on: by its word in that join, and if
// it has the placement that the pool knows. Then they are placed on it.
//
// The store comes first: what gives a right (a grant, a device that is free again) happens when the store has
// accepted it. What takes one away happens at once, and its write is repeated until the store accepts it.
// After a restart the pool is therefore never more generous than before.
//
// One thread. Methods call PoolEvents before they return, Store::deliver does so too; the implementation must
// not call back into the Pool from there.

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "pool-manager/audit.h"
#include "pool-manager/fabric.h"
#include "pool-manager/inventory.h"
#include "pool-manager/journal.h"
#include "pool-manager/lease_record.h"
#include "pool-manager/lease_table.h"
#include "pool-manager/pool_events.h"
#include "pool-manager/pool_times.h"
#include "pool-manager/principal.h"
#include "pool-manager/queue.h"
#include "pool-manager/quotas.h"
#include "pool-manager/records.h"
#include "pool-manager/server_log.h"
#include "pool-manager/server_record.h"
#include "pool-manager/tenants.h"
#include "pool-manager/usage.h"
#include "schema/device_sample.h"

namespace gpupool::pool {

std::string age(uint64_t ms);  // for people

class Pool {
 public:
  // Reads the store: leases go on, with a full TTL from now; their devices are unknown until their server
  // reports. Throws std::runtime_error if the store cannot be read or taken over.
  Pool(Store& store, PoolEvents& events, const PoolTimes& times, const PoolStart& start);

  // --- servers: called for a connection that lives until left()
  // Throws std::invalid_argument with a text for the server's operator. reports: one a device, or none at
  // all.
  // readopted: leases of its earlier lives with which it goes on, and the epochs of their placements.
  void join(const Principal& who, const Server& facts, const std::vector<DeviceReport>& reports, uint64_t now,
            const std::map<Id, uint64_t>& readopted = {});
  // False: join first.
  bool beat(const std::string& name, const Id& incarnation, const std::vector<Id>& leases,
            const std::vector<std::string>& problems, uint32_t warmWorkers, uint64_t now,
            const std::vector<SuspendedLease>& suspended = {}, const std::vector<LeaseTurn>& turns = {},
            const std::vector<LeaseHindrances>& hindrances = {}, const std::vector<LeaseUse>& uses = {});
  // What a server that has joined says of its RDMA devices, then and whenever it changes.
  void setFabric(const std::string& name, fabric::Fabric fabric);
  // Of which versions a server that beats has workers by now.
  void setWorkers(const std::string& name, std::vector<WorkerVersion> workers, uint64_t now);
  // Of which leases a server that beats says that it keeps the checkpoints. It is told where that is not so.
  void setKept(const std::string& name, const std::vector<KeptLease>& kept, uint64_t now);
  // What the programs of its leases have done on a server that beats.
  void setCounts(const std::string& name, const std::vector<LeaseCounts>& counts, uint64_t now);
  // Of a server that beats. As many as it has devices, or none.
  void setSamples(const std::string& name, std::vector<DeviceSample> samples, uint64_t now);
  // Null: there is none that says anything any more.
  std::optional<DeviceSample> sample(const std::string& name, const std::string& uuid, uint64_t now) const;
  // An operator takes a server out of service, or back: nothing new is placed there, and its leases go on.
  // Held for a server that is away, too. done: later, with "" when the store has it, else why not; from then
  // on no lease comes to be there that leases() does not name. Both may be repeated.
  void cordon(const Principal& who, const std::string& server, Cordon cordon, Journal::Done done);
  void uncordon(const Principal& who, const std::string& server, Journal::Done done,
                const std::string& by = "");
  const std::map<std::string, Cordon>& cordons() const { return cordons_; }  // by server
  // The connection is gone (`goodbye`: the server said so, and has ended its sessions).
  void left(const std::string& name, Id incarnation, bool goodbye, uint64_t now);

  // --- holders. All three throw std::invalid_argument for another tenant's lease.
  void request(const Principal& who, const LeaseRequest& request,
               uint64_t now);  // PoolEvents::granted or failed, now or later
  // What would become of the request if it were made now. Throws std::invalid_argument if it is refused.
  Explanation explain(const Principal& who, const LeaseRequest& request, uint64_t now);
  // The new TTL, or none with *why. adopter: of a claim, who renews it. One that the pool does not know (it
  // was started again) is known from then on.
  std::optional<uint32_t> renew(const Principal& who, const Id& id, uint64_t now, std::string* why,
                                const Adopter& adopter = {});
  // What the holder of a lease is to know: it ends in `ms`, and why; "": nothing.
  struct Notice {
    std::string text;
    uint64_t ms = 0;
  };
  Notice noticeOf(const Id& id, uint64_t now) const;
  // Which server keeps the checkpoints of a lease, as its holder is told; none: it does so itself, if anybody
  // does.
  std::optional<Server> standbyOf(const Id& id) const;
  // Gives a request for a claim its id, which follows from the job. Throws if the request is refused.
  void nameClaim(const Principal& who, LeaseRequest& request) const;
  // The id of a claim that is named by its id or its job. Throws if the text is neither.
  Id claimNamed(const Principal& who, const std::string& tenant, const std::string& name) const;
  // An adopter uses the claim no more. Nothing happens if it did not.
  void leave(const Principal& who, const Id& claim, const Id& adopter, uint64_t now);
  // True: a lease is on its way out and PoolEvents::ended follows. False: nothing to wait for.
  bool release(const Principal& who, const Id& id, uint64_t now);
  // Release by an operator, who knows of a lost lease that nothing of it runs any more. Refuses (throws) to
  // forget what a server could still report: if one that is not connected comes back and holds the lease, its
  // devices are not leased before it has ended it.
  bool drop(const Principal& who, const Id& id, uint64_t now);
  // Nobody waits any more for what was asked of that lease: it does not keep the next one from waiting.
  void dropUnwanted(const Id& id) {
    std::erase_if(waiters_, [&](const Waiter& one) {
      return one.resumes && one.request.id == id && !resumeWanted(id);
    });
  }
  // Of a lease that drop() has ended: its holder knows, or nobody waits for that any more.
  bool hasHeard(const Id& id, uint64_t now);

  // --- a lease's owner, and operators. All of these throw std::invalid_argument with the reason for a lease
  // that is another tenant's, or in no state for it. Takes its memory off its devices: PoolEvents::suspended
  // or notSuspended, now or later. Of a lease that is suspended already: the same answer again; of one that
  // is being suspended: joins that.
  // folder: not empty: into files of its server, and away from there: it is held then. One that is suspended
  // is refused, and one that is held in other files.
  void suspend(const Principal& who, const Id& id, uint32_t drainMs, uint64_t now,
               const std::string& folder = "");
  // Brings it back to its devices, when there is room: takes its place in the queue for at most waitMs.
  // PoolEvents::resumed or notResumed, now or later. Of a lease that is active: nothing to do.
  // folder: not empty: it is held in these files, and goes to devices like those that it had, where `to`
  // says (pool.capnp); one that is active is refused.
  void resume(const Principal& who, const Id& id, uint32_t waitMs, uint64_t now,
              const std::string& folder = "", const MoveTarget& to = {});
  // Of the lease's holder: see Manager.failOver. PoolEvents::resumed or notResumed, now or later.
  void failOver(const Principal& who, const Id& id, const ServerLife& lost, uint32_t waitMs, uint64_t now,
                bool cutOff = false);
  // As its holder is told of it. Throws as those above, and if it is nowhere.
  Lease leaseOf(const Principal& who, const Id& id) const;
  // Has its sessions moved, see Manager.migrate: PoolEvents::migrated or notMigrated, now or later. Of one
  // that is being moved there: joins that.
  void migrate(const Principal& who, const Id& id, uint32_t drainMs, const MoveTarget& to, uint64_t now);
  // Has its sessions written into files of its server: PoolEvents::checkpointed or notCheckpointed, later.
  // The pool keeps nothing of that.
  void checkpoint(const Principal& who, const Id& id, uint32_t drainMs, const std::string& folder,
                  uint64_t now);
  // Where its sessions are, and the target first; nothing while they are in files. Throws as those above, and
  // if the lease has ended.
  std::vector<Server> places(const Principal& who, const Id& id) const;

  // --- what the servers answered
  void granted(const Id& id, uint64_t now);
  // refused: the server said no (so it does not hold the lease); else it is unknown what happened.
  void grantFailed(const Id& id, const std::string& why, bool refused, uint64_t now);
  // server: who was asked, and answers. What another one says of the lease says nothing of this one.
  void revoked(const ServerLife& server, const Id& id, uint64_t now);
  void revokeFailed(const ServerLife& server, const Id& id, uint64_t now);
  // It has been revoked, and its server has said why it does not answer that yet.
  bool isLent(const Id& id) const;
  void suspendDone(const Id& id, uint64_t order, const SuspendResult& result, uint64_t now);
  void suspendFailed(const Id& id, uint64_t order, const std::string& why, uint64_t now);
  void resumeDone(const Id& id, uint64_t order, uint64_t now);
  // refused: the server said no (so it is suspended still); else it is unknown what happened.
  void resumeFailed(const Id& id, uint64_t order, const std::string& why, bool refused, uint64_t now);
  void migrateDone(const Id& id, uint64_t order, const MigrateResult& result, uint64_t now);
  // refused: the server said no, and has ended the order; else it is unknown what happened.
  void migrateFailed(const Id& id, uint64_t order, const std::string& why, bool refused, uint64_t now);
  void checkpointDone(const Id& id, uint64_t order, CheckpointResult result, uint64_t now);
  void checkpointFailed(const Id& id, uint64_t order, const std::string& why, uint64_t now);
  void prepareDone(const Id& id, uint64_t order, uint64_t now);
  void prepareFailed(const Id& id, uint64_t order, const std::string& why, bool refused, uint64_t now);
  // unused: no session of the lease has the target's devices, and on its own server they are given back.
  void returned(const Id& id, uint64_t order, bool unused, uint64_t now);
  void returnFailed(const Id& id, uint64_t order, const std::string& why, uint64_t now);
  void settled(const Id& id, uint64_t order, uint64_t now);
  void settleFailed(const Id& id, uint64_t order, uint64_t now);

  // Expiry, silence, waiters' deadlines. Call every 100 ms or so.
  void tick(uint64_t now);

  // --- for people: `who` is told that other tenants' devices are in use, not by whom
  std::vector<Lease> list(const Principal& who, uint64_t now) const;
  std::vector<ServerUse> inventory(const Principal& who, uint64_t now) const;
  // The oldest first, at most `most`. Of other tenants' leases it does not say whose, nor why.
  std::vector<AuditEntry> audit(const Principal& who, const AuditQuery& query, size_t most) const;
  uint64_t latestAudit() const { return audit_.latest(); }  // the number of the last entry; 0: none
  double deviceSeconds(const std::string& tenant, uint64_t now) const {
    return usage_.deviceSeconds(tenant, now);
  }
  const std::map<Id, LeaseRecord>& leases() const { return leases_.all(); }
  const std::set<Id>& leasesOn(const std::string& server) const { return leases_.on(server); }
  // For tests: what the kept inventory has otherwise than one that is made anew; "": nothing.
  std::string inventoryFault(uint64_t now);
  // Who waits, in the order in which they are served; of other tenants' requests only that they are there.
  // explained: says of so many, from the first on, why they wait; each takes a look at all devices.
  std::vector<QueuedRequest> queue(const Principal& who, uint64_t now, size_t explained = 0) const;

  // --- quotas (pool_quotas.cpp). Replaces the tenant's; none(): takes it away. done: as Journal::write's.
  // Throws std::invalid_argument if `who` may not, or if there can be no such quota.
  void setQuota(const Principal& who, const Quota& quota, const std::string& by, Journal::Done done);
  // Of all tenants that have one or have used anything; or, of whoever is no operator, of his own.
  std::vector<QuotaUse> quotas(const Principal& who) const;

  // Those that there are (pool_tenants.cpp), by name; or, of whoever is no operator, his own, whatever it
  // has. tokens: how many each has that are good.
  std::vector<TenantUse> tenants(const Principal& who, const std::map<std::string, uint32_t>& tokens,
                                 uint64_t now) const;

  // For what else is kept in this manager's store, with what the audit log tells of it. done: called later.
  void write(std::vector<Write> writes, std::vector<AuditEntry> entries, Journal::Done done);

  const std::map<std::string, ServerRecord>& servers() const { return servers_; }
  bool alive(const ServerRecord& server, uint64_t now) const;
  // In so long, as of the latest call, the servers that this pool has are there, if they are; 0: by now.
  uint64_t settlesInMs() const { return settledMs_ - std::min(settledMs_, latestMs_); }
  size_t waiting() const { return waiters_.size(); }  // requests in the queue, those to resume too
  // LeaseRequest::fingerprint of a lease, or of one that waits for its devices; null: there is none of that
  // id.
  const std::string* fingerprintOf(const Id& id) const;
  // Why a lease has ended that this pool has known; null: there was none, or it has not ended.
  const std::string* endedBecause(const Id& id) const;
  uint32_t beatMs() const { return times_.beatMs; }

 private:
  // What inventory() counts otherwise than it is.
  struct Unlike {
    const Id* without = nullptr;            // this lease is not there
    const std::set<Id>* resumed = nullptr;  // these are not suspended
    bool named = true;                      // the holders' names are wanted
  };
  struct Tombstone {
    std::string reason;
  };
  struct Unheard {
    LocalProcess process;  // its holder, if that is on this machine
    uint64_t untilMs = 0;
  };

  void load(Store& store, const PoolStart& start);
  AuditEntry entryOf(AuditEvent event, const StoredLease& lease, const std::string& by,
                     const std::string& reason) const;
  Lease tell(const LeaseRecord& record) const;
  void charge(LeaseRecord& record, uint64_t now);
  void writeUsage(uint64_t now);
  void tickLeases(uint64_t now);
  void forgetServers(uint64_t now);
  void setState(LeaseRecord& record, LeaseState to);
  // Who may not touch what: throws.
  void demandOwner(const Principal& who, const Id& id) const;

  // pool_servers.cpp
  void settle(ServerRecord& server, uint64_t now);
  bool goesOn(const ServerRecord& server, LeaseRecord& record);
  void claimDevices(ServerRecord& server, uint64_t now);
  std::string whoseElse(const std::string& uuid, const ServerRecord& server) const;
  bool holdsOn(const ServerRecord& server, const std::string& uuid, const ServerRecord& asks) const;
  std::string strangerOn(const ServerRecord& server, size_t device) const;
  void endElsewhere(const std::string& uuid, const std::string& server, uint64_t now);
  void compareLeases(ServerRecord& server, const std::set<Id>& reported,
                     const std::vector<SuspendedLease>& suspended, uint64_t now);
  void comparePrimary(LeaseRecord& record, bool held, const SuspendedLease* suspended, uint64_t now);
  void compareOther(LeaseRecord& record, const Placement& there, bool held);
  void noteTurns(const ServerRecord& server, const std::vector<LeaseTurn>& turns);
  void noteHindrances(const ServerRecord& server, const std::vector<LeaseHindrances>& hindrances);
  void setProblem(Server& server, size_t index, const std::string& said);
  bool isCordoned(const std::string& server) const;

  // pool_requests.cpp
  LeaseRequest checked(const Principal& who, const LeaseRequest& asked) const;
  void enqueue(Waiter waiter, uint64_t now);
  std::string impossible(const Waiter& waiter, const Queue& before, uint64_t now) const;
  bool serve(Waiter& waiter, Queue& before, uint64_t now);
  void failLate(const Waiter& waiter, const Queue& before, uint64_t now);
  bool tooLate(const Waiter& waiter, uint64_t now, bool preempting = false) const;
  void noteQueued(Waiter& waiter);
  void fail(const Waiter& waiter, const Failure& failure);
  bool releaseFor(const Principal& who, const Id& id, const std::string& reason, uint64_t now);
  void create(const Waiter& waiter, Choice choice, uint64_t now);
  void born(const Id& id, const std::string& why);
  bool ending(uint64_t now) const;

  // pool_rounds.cpp
  std::vector<Waiter> inOrder(std::vector<Waiter> waiters, uint64_t now) const;
  void refresh(Queue& queue, uint64_t now);
  Queue beginRound(uint64_t now);
  void endRound(bool claimed, uint64_t now);
  Choice placeFor(const Waiter& waiter, Queue& before) const;
  void stay(const Waiter& waiter, Queue& before, uint64_t now);
  void claimFor(const Waiter& waiter, Queue& before, uint64_t now);
  void serveWaiters(uint64_t now);
  std::string whyQueued(const Waiter& waiter, const Principal& who, const std::vector<ServerUse>& servers,
                        size_t ahead, uint64_t now) const;

  // pool_quotas.cpp
  Held held(const std::string& tenant) const;
  const Held& held(const std::string& tenant, HeldCounts& counted) const;
  QuotaUse quotaUse(const std::string& tenant) const;
  std::string neverByQuota(const LeaseRequest& request, const Wish& wish,
                           const std::vector<ServerUse>& servers) const;
  Quotas::Hindrance quotaHinders(const LeaseRequest& request, const Choice& choice,
                                 HeldCounts& counted) const;
  std::string quotaHindersResume(const LeaseRecord& record, const Queue& before) const;
  bool waitForQuota(const Waiter& waiter, const Quotas::Hindrance& hindrance, uint64_t now);

  // pool_claims.cpp
  void adopt(const Principal& who, const LeaseRequest& request, uint64_t now);
  uint32_t hold(LeaseRecord& claim, const Adopter& adopter, uint64_t now);
  void unhold(LeaseRecord& claim, const Id& adopter, const std::string& by, const std::string& reason,
              uint64_t now);
  void answerAdopters(LeaseRecord& claim);
  void checkAdopters(LeaseRecord& claim, uint64_t now);

  // pool_clients.cpp
  void storeClients(LeaseRecord& record);
  void loadClients(const std::vector<Entry>& stored, uint64_t now);

  // pool_suspends.cpp
  LeaseRecord& demandRunning(const Principal& who, const Id& id, const char* what);
  void demandArrived(const LeaseRecord& record, const char* what) const;
  void demandServer(const LeaseRecord& record, const Placement& placement, const char* what,
                    uint64_t now) const;
  LeaseRecord* ordered(const Id& id, Change change, uint64_t order);
  void storeSuspended(LeaseRecord& record, SuspendResult result, uint64_t now);
  void storeAgain(LeaseRecord& record, uint64_t now);
  void storedSuspended(const Id& id, const std::string& why);
  std::string missingToResume(const LeaseRecord& record, const Principal& who, const std::set<Id>& resumed,
                              uint64_t now) const;
  // Leases that are not used (pool_idle.cpp).
  uint32_t idleTime(uint32_t asked) const;
  void noteUses(const std::string& server, const Id& incarnation, const std::vector<LeaseUse>& uses,
                uint64_t now);
  void endIdle(LeaseRecord& record, const LeaseUse& use, uint64_t now);
  void bringBack(LeaseRecord& record, uint64_t now);
  bool resumeWanted(const Id& id) const;
  // idleReason: why by the pool itself; empty: by order.
  void orderSuspend(LeaseRecord& record, uint32_t drainMs, const std::string& folder,
                    const std::string& idleReason = "");
  void keepSuspended(LeaseRecord& record, const Principal& who);
  bool serveResume(Waiter& waiter, Queue& before, uint64_t now);
  bool isClaimed(const LeaseRecord& record) const;
  void reserve(LeaseRecord& record);
  void reserved(const Id& id, const std::string& why);
  void sendResume(LeaseRecord& record);
  void endChange(LeaseRecord& record, const Failure& failure);
  void disconnected(const std::string& server);
  void orderLost(LeaseRecord& record, const std::string& server);
  void compareSuspended(LeaseRecord& record, const SuspendedLease* reported, uint64_t now);

  // pool_preempts.cpp
  // Whether a server, with the leases of a lower class away that are tried, has what is wanted.
  using Fits = std::function<bool(const ServerUse&)>;
  struct Victims {
    std::vector<Id> leases;  // empty: none would help
    Priority highest = Priority::low;
  };
  bool preempt(Waiter& waiter, const Queue& before, Priority priority, const Fits& fits, uint64_t now);
  bool hadNoVictims(const Waiter& waiter, Priority priority, uint64_t now);
  bool isPreempting(const Waiter& waiter) const;
  bool mayPreempt(const LeaseRecord& record, Priority priority, uint64_t now) const;
  ServerUse without(const std::set<Id>& away, const ServerUse& server, const Queue& before, const Id& waiter,
                    const std::vector<const LeaseRecord*>& there) const;
  Victims victimsOn(const ServerUse& server, const Queue& before, const Waiter& waiter,
                    const std::vector<const LeaseRecord*>& there, Priority priority, const Fits& fits,
                    uint64_t now) const;
  void beginPreempt(LeaseRecord& record, const Waiter& waiter, uint64_t now);
  void preemptStored(const Id& id, const std::string& why);
  void notPreempted(LeaseRecord& record, const std::string& why, uint64_t now);
  void tickPreempted(LeaseRecord& record, uint64_t now);
  std::string preemptText(const LeaseRecord& record) const;
  std::string whyText(const LeaseRecord& record, uint64_t now) const;

  // pool_holds.cpp
  void demandUnheld(const LeaseRecord& record, const char* what) const;
  void restore(LeaseRecord& record, const Principal& who, uint32_t waitMs, uint64_t now,
               const std::string& folder, const MoveTarget& to);
  MoveWish placeWanted(const LeaseRecord& record, const MoveTarget& to) const;
  Choice placeHeld(const LeaseRecord& record, const MoveWish& wish, std::vector<ServerUse> servers) const;
  void goBack(LeaseRecord& record, const Principal& who, uint64_t now, const std::string& folder,
              const MoveTarget& to);
  bool serveRestore(const Waiter& waiter, LeaseRecord& record, Queue& before, uint64_t now);
  void beginRestore(const Waiter& waiter, LeaseRecord& record, Choice choice);
  void restorePlaced(const Id& id, const std::string& why);
  void sendRestore(LeaseRecord& record);
  void stayHeld(LeaseRecord& record, const Failure& failure);
  void restored(LeaseRecord& record);
  static bool isBeingHeld(const LeaseRecord& record);
  void noteFound(ServerRecord& server, const std::set<Id>& has, const std::vector<SuspendedLease>& suspended,
                 uint64_t now);

  // pool_failovers.cpp
  std::string staysForNow(const Principal& who, const LeaseRecord& record, uint64_t now, bool cutOff) const;
  static bool mayLeaveForHolder(const LeaseRecord& record);
  bool leavesForHolder(LeaseRecord& record, const std::string& server, const std::string& reason);
  void leaveForHolder(LeaseRecord& record, const std::string& reason);
  void comeFromHolder(LeaseRecord& record);

  // pool_standbys.cpp
  static bool wantsStandby(const LeaseRecord& record);
  bool standbyServes(const LeaseRecord& record, uint64_t now) const;
  StandbyChoice chooseStandby(const LeaseRecord& record, uint64_t now) const;
  void nameStandby(LeaseRecord& record, uint64_t now);
  void lookAtStandby(LeaseRecord& record, uint64_t now);
  void tellStandby(const LeaseRecord& record);
  std::optional<Server> standbyOf(const LeaseRecord& record) const;
  bool standbyOnHost(const LeaseRecord& record) const;
  std::string standbyText(const LeaseRecord& record) const;

  // pool_moves.cpp
  Choice chooseTarget(const LeaseRecord& record, const Principal& who, const MoveTarget& to,
                      uint64_t now) const;
  void addTarget(LeaseRecord& record, Choice choice);
  void placed(const Id& id, const std::string& why);
  void sendPrepare(LeaseRecord& record);
  void sendMigrate(LeaseRecord& record);
  void sendGiveBack(LeaseRecord& record, const Failure& failure);
  void keepBoth(LeaseRecord& record, Failure failure);
  void stayOn(LeaseRecord& record, Placement& kept, const std::string& arrival);
  void stayAfter(LeaseRecord& record, Placement& kept, const Failure& failure);
  void abandon(LeaseRecord& record, const std::string& server, const std::string& reason);
  void storePlacements(LeaseRecord& record);
  void storePlacementsAgain(LeaseRecord& record, uint64_t now);
  void placementsStored(const Id& id, const std::set<uint64_t>& gone, const std::string& why);
  void answerMove(LeaseRecord& record);
  void tellLeft(LeaseRecord& record, const Placement& left);

  // pool_ends.cpp
  void sendGrant(LeaseRecord& record);
  void startRevoke(LeaseRecord& record, LeaseState as, const std::string& reason, uint64_t now,
                   const std::string& by = "");
  void sendRevoke(LeaseRecord& record, const std::string& server, const std::string& reason);
  void end(const Id& id, LeaseState as, const std::string& reason, uint64_t now);
  void vacate(const Id& id, const std::string& server, const std::string& reason, uint64_t now);
  bool ofEarlierLife(const Placement& placement) const;
  void outlive(LeaseRecord& record, const std::string& server, const std::string& reason, uint64_t now);
  void answerEnded(const LeaseRecord& record, const std::string& reason);
  void beginEnd(LeaseRecord& record, LeaseState as, const std::string& reason, uint64_t now);
  std::string lostReason(const LeaseRecord& record, uint64_t now) const;
  void close(LeaseRecord& record, uint64_t now, bool givenUp = false);
  void closed(const Id& id, const std::set<uint64_t>& gone, bool forgotten, const std::string& reason,
              const std::string& why);
  void expire(LeaseRecord& record, uint64_t now);
  std::string lentTo(const LeaseRecord& record, uint64_t now) const;
  uint64_t timeLeftMs(const StoredLease& lease, uint64_t bootMs) const;
  void countStandstill();
  bool hasEnded(const LocalProcess& process);
  // Of a lease that somebody ends for its holder; none: there is nobody to hear of it.
  static std::optional<Unheard> unheardOf(const LeaseRecord& record, uint64_t now);
  void noteUnheard(const Id& id, const Unheard& unheard, uint64_t now);
  void takeOver(LeaseRecord& record, const LocalProcess& process);
  void bury(const Id& id, const std::string& reason, uint64_t now);
  void forgetTombstones(uint64_t now);

  // pool_server_log.cpp
  void noteServer(const std::string& name, AuditEvent event, const std::string& why, uint64_t now);
  void tellOfServer(AuditEntry entry);
  void noteAlive(ServerRecord& server, uint64_t now);
  void noteGone(ServerRecord& server, AuditEvent event, const std::string& why, uint64_t now);
  void tickServerLog(uint64_t now);

  // pool_inventory.cpp
  std::string absence(const ServerRecord& server, uint64_t now) const;
  std::vector<ServerUse> inventory(const Principal& who, uint64_t now, const Unlike& unlike) const;
  ServerUse useOf(const ServerRecord& server, const Principal& who, uint64_t now, const Unlike& unlike) const;
  void touchSilent(uint64_t now);
  void refreshInventory(uint64_t now);
  std::string describeHolder(const LeaseRecord& record, const Principal& who, uint64_t now) const;

  PoolEvents& events_;
  PoolTimes times_;
  std::string bootId_;
  std::map<std::string, ServerRecord> servers_;
  std::map<std::string, Cordon> cordons_;  // by server
  std::map<std::string, unsigned>
      cordoning_;  // by server: how many orders to cordon it the store has not answered
  std::map<std::string, std::string> owners_;  // UUID: the server whose device it is
  LeaseTable<LeaseRecord> leases_;
  Inventory inventory_;
  uint64_t silentAtMs_ = 0;  // no server falls silent before
  std::set<Id> resuming_;    // Queue::resuming, while the queue is served
  bool inRound_ = false;     // it is
  std::map<Id, Tombstone> tombstones_;
  std::deque<std::pair<uint64_t, Id>> forgettable_;  // tombstones, by when they were set or looked at
  std::set<Id> revoking_;                            // the leases in that state
  std::map<std::string, std::set<Id>> standbyFor_;   // by server: those whose standby it was named at last
  std::pair<uint64_t, unsigned> standbyLooks_;       // at that time, so many were looked for
  std::map<std::pair<int, uint64_t>, bool> gone_;    // processes of this machine, as of this tick
  std::vector<Waiter> waiters_;                      // as they came
  std::vector<NoVictims> noVictims_;                 // lately
  mutable std::map<Id, Unheard> unheard_;            // ended, and its holder has not asked since
  std::deque<Id> unknownReleased_;                   // the latest: their requests may still arrive
  uint64_t settledMs_ = 0;                           // from then on the servers that this pool has are there
  uint64_t epoch_ = 0;
  uint64_t orders_ = 0;        // the number of the latest one
  uint64_t joins_ = 0;         // likewise
  uint64_t latestMs_ = 0;      // the time of the latest call, for what the store tells in between
  uint64_t stoodStillMs_ = 0;  // PoolEvents::stoodStillMs, as leases' time limits have it
  bool forgetting_ = false;    // tombstones are being erased
  uint64_t requests_ = 0;      // the number of the latest one
  uint64_t usageWrittenMs_ = 0, forgotServersMs_ = 0;
  Id visited_;  // the lease that a tick has looked at last
  Usage usage_;
  Quotas quotas_;
  AuditLog audit_;
  ServerLog serverLog_;
  bool comparedLog_ = false;  // with the servers that have come back since the manager was started
  Journal journal_;
};

}  // namespace gpupool::pool
