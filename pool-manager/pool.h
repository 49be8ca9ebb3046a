#pragma once
// What the manager knows and decides: servers, leases, who waits. No network and no clock: the service feeds
// it calls and times (CLOCK_BOOTTIME, milliseconds) and does what PoolEvents orders; tests do the same by
// hand.
//
// A lease's life:
//
//   request ──► waiting ──► granting ──► active ──► revoking ──► ended
//               (queue)    (server is   (renewed)  (server is    (devices free, a tombstone stays so that
//                           being told)             being told)   the same request id is never granted twice)
//
// Authority: the server is the final arbiter and admits a lease's sessions only after grant. So nothing is
// granted on a server that is not connected, or that has not said since it joined which leases it holds. A
// lease that is to end occupies its devices until its server confirmed, or until its holder and server must
// have noticed by themselves: deadline + drift + kill time. While the manager is away leases run on; after
// its restart every lease has a full TTL for its holder to come back. Only a holder on this machine, whose
// process can be seen to have ended, loses its lease at once.
//
// One thread. Methods call PoolEvents before they return; the implementation must not call back into the Pool
// from there. A failing store surfaces as std::runtime_error from the method that needed it, with nothing
// changed.

#include <deque>
#include <map>
#include <optional>

#include "pool-manager/fabric.h"
#include "pool-manager/placement.h"
#include "pool-manager/store/store.h"

namespace gpupool::pool {

enum class LeaseState : uint32_t { granting = 0, active = 1, revoking = 2 };

// Refused for a reason that time may cure (nothing free, a server that went away), because the pool has
// nothing of the kind, or for good.
struct Failure {
  enum class Kind { noDevice, nothingFits, serverLost, refused } kind = Kind::refused;
  std::string text;
};

struct LeaseRecord {
  Lease lease;
  LeaseState state = LeaseState::granting;
  uint64_t deadlineMs = 0;  // of the holder's right
  uint64_t grantedMs = 0;
  uint64_t storedMs = 0;    // the deadline as the store has it
  uint64_t revokingMs = 0;  // since when
  std::string reason;       // why it is being revoked
  LocalProcess process;     // the holder, if it is on this machine
  bool ordered = false;     // a grant or revoke is on its way to the server
};

class PoolEvents {
 public:
  virtual ~PoolEvents() = default;
  // Tell the server; answer with granted() or grantFailed().
  virtual void grant(const Lease& lease) = 0;
  // Tell the server; answer with revoked() or revokeFailed(). Also for leases the pool does not know.
  virtual void revoke(const std::string& server, const Id& id, const std::string& reason) = 0;
  // The answer to every request() with this id so far.
  virtual void granted(const Lease& lease) = 0;
  virtual void failed(const Id& id, const Failure& failure) = 0;
  virtual void ended(const Id& id) = 0;
  // False: nobody waits for an answer to request `id` any more.
  virtual bool wanted(const Id& id) = 0;
  // Whether the holder, a process of this machine, is known to have ended: its lease need not run out then.
  virtual bool hasEnded(const LocalProcess& holder) { return pool::hasEnded(holder); }
};

struct PoolTimes {
  uint32_t beatMs = 1000;    // servers beat this often
  uint32_t silentMs = 5000;  // and are not placed on after this long without
  uint32_t minTtlMs = 1000, maxTtlMs = 3'600'000;
  uint32_t driftMs = 500;  // clocks and message delays, added to every deadline
  uint32_t killMs = 3000;  // what a server needs to end a lease's sessions
  uint32_t tombstoneMs = 3'600'000;
};

struct ServerRecord {
  Server facts;
  bool connected = false;
  bool reported = false;  // has named its leases since it joined
  uint64_t beatMs = 0;    // last sign of life
  uint32_t warmWorkers = 0;
  std::string suspect;  // why grants failed; until the next beat
  fabric::Fabric fabric;
};

class Pool {
 public:
  // Reads the store: leases go on, with a full TTL from `now`; their devices are unknown until their server
  // reports.
  Pool(Store& store, PoolEvents& events, const PoolTimes& times, std::string bootId, uint64_t now);

  // --- servers: called for a connection that lives until left()
  // ------------------------------------------------ Throws std::invalid_argument with a text for the
  // server's operator.
  void join(const Server& facts, uint64_t now);
  // False: join first.
  bool beat(const std::string& name, const Id& incarnation, const std::vector<Id>& leases,
            const std::vector<std::string>& problems, uint32_t warmWorkers, uint64_t now);
  // What a server that has joined says of its RDMA devices, then and whenever it changes.
  void setFabric(const std::string& name, fabric::Fabric fabric);
  // The connection is gone (`goodbye`: the server said so, and has ended its sessions).
  void left(const std::string& name, const Id& incarnation, bool goodbye, uint64_t now);

  // --- holders
  // ------------------------------------------------------------------------------------------------------
  void request(const LeaseRequest& request, uint64_t now);  // PoolEvents::granted or failed, now or later
  // The new TTL, or none with *why.
  std::optional<uint32_t> renew(const Id& id, uint64_t now, std::string* why);
  // Whose lease, or request, that is; none: nobody's that is known.
  std::optional<std::string> tenantOf(const Id& id) const;
  // True: a lease is on its way out and PoolEvents::ended follows. False: nothing to wait for.
  bool release(const Id& id, uint64_t now);

  // --- what the servers answered
  // -------------------------------------------------------------------------------------
  void granted(const Id& id, uint64_t now);
  // refused: the server said no (so it does not hold the lease); else it is unknown what happened.
  void grantFailed(const Id& id, const std::string& why, bool refused, uint64_t now);
  void revoked(const Id& id, uint64_t now);
  void revokeFailed(const Id& id, uint64_t now);

  // Expiry, silence, waiters' deadlines. Call every 100 ms or so.
  void tick(uint64_t now);

  // --- for people
  // -----------------------------------------------------------------------------------------------------
  const std::map<Id, LeaseRecord>& leases() const { return leases_; }
  const std::map<std::string, ServerRecord>& servers() const { return servers_; }
  bool alive(const ServerRecord& server, uint64_t now) const;
  std::vector<ServerUse> inventory(uint64_t now) const;
  uint32_t beatMs() const { return times_.beatMs; }

 private:
  struct Waiter {
    LeaseRequest request;
    uint64_t untilMs = 0;
  };
  struct Tombstone {
    std::string reason;
    uint64_t endedMs = 0;
  };

  void load(uint64_t now);
  void setProblem(Server& server, size_t index, const std::string& said);
  bool tryPlace(const LeaseRequest& request, uint64_t now, Choice* missing);
  bool ending(uint64_t now) const;
  void serveWaiters(uint64_t now);
  void sendGrant(LeaseRecord& record);
  void startRevoke(LeaseRecord& record, const std::string& reason, uint64_t now);
  void sendRevoke(LeaseRecord& record);
  void end(const Id& id, const std::string& reason, uint64_t now);
  void bury(const Id& id, const std::string& reason, uint64_t now);
  uint64_t nextEpoch() const;
  std::string encode(const LeaseRecord& record) const;
  std::string describeHolder(const LeaseRecord& record, uint64_t now) const;

  Store& store_;
  PoolEvents& events_;
  PoolTimes times_;
  std::string bootId_;
  std::map<std::string, ServerRecord> servers_;
  std::map<Id, LeaseRecord> leases_;
  std::map<Id, Tombstone> tombstones_;
  std::deque<Waiter> waiters_;
  uint64_t epoch_ = 0;
};

}  // namespace gpupool::pool
