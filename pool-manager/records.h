#pragma once
// What lies in the store: a lease, schema::StoredLease under "lease/<id>"; that a server is cordoned, a
// Cordon under "cordon/<name>"; that it is being emptied, a StoredDrain under "drain/<name>"; what its
// holders say of a lease's clients, under "clients/<id>": apart from the lease, which is written only
// together with what becomes of it.

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/lease_state.h"
#include "pool-manager/model.h"
#include "pool-manager/principal.h"

namespace gpupool::pool {

inline const std::string kLeasePrefix = "lease/", kEndedPrefix = "ended/", kEpochKey = "epoch",
                         kCordonPrefix = "cordon/", kDrainPrefix = "drain/", kClientsPrefix = "clients/";

// Holds the sessions; is to hold them when they have moved; would hold them if the primary were lost; held
// them or was to, and its server has not said yet that it has given the devices up. As in store.capnp.
enum class PlacementRole : uint32_t { primary, target, standby, left };

// Devices of one server, and the epoch and key with which that server admits the lease's sessions.
struct Placement {
  Server server;
  std::vector<LeasedDevice> devices;
  uint64_t epoch = 0;
  std::string key;  // 32 bytes, secret
  PlacementRole role = PlacementRole::primary;
  // By device: what stays there while the lease is suspended (SuspendResult::kept). Empty: its reservation is
  // whole.
  std::vector<uint64_t> kept;
  bool gone = false;  // not stored: nothing of the lease runs there any more
};

// The files in which a lease is held, and where it was.
struct Hold {
  HeldLease held;
  Placement was;
  bool atHolder = false;  // not in files: its server is gone, and its holder has the checkpoints
};

struct StoredLease {
  Id id;
  LeaseState state = LeaseState::queued;
  // Exactly one is the primary; but a held lease has only such as it has left, or none.
  std::vector<Placement> placements;
  uint32_t ttlMs = 0;
  std::string tenant, holder;
  LeaseState ending = LeaseState::lost;  // revoking: what it ends as
  // revoking or ended: why. Suspended: why the pool did it by itself; it comes back when its programs call,
  // or if there is a preemptor, when it is its turn.
  std::string reason;
  LocalProcess process;  // the holder, if it is on this machine
  TurnTerms terms;
  std::string gpu;  // this and the following: what its request named
  Policy policy = Policy::pack;
  std::string purpose;    // the request's reason
  uint64_t limitMs = 0;   // 0: no limit
  uint64_t endsAtMs = 0;  // since 1970: when the limit is over; 0: there is none
  // The same on bootTimeMs(), which nobody sets; 0: there is none, or it was on another boot of the machine.
  uint64_t endsAtBootMs = 0;
  std::string job;  // of a claim (claims.h); empty: it is none
  // Held; or it is being restored on its placement, and held again if that fails.
  std::optional<Hold> hold = {};
  std::string suspendedBy;   // suspended: on whose word; empty: the pool's own
  Id preemptor;              // suspended: the request that has taken its devices; all zero: none
  WorkerVersion client;      // of its request
  std::string fingerprint;   // likewise
  std::string standby = {};  // the server that keeps its checkpoints (pool_standbys.cpp); empty: none does
  uint64_t standbyEpoch = 0;
  uint64_t grantedAtMs = 0;  // since 1970; 0: unknown, of an earlier gpupool

  // Not of a held lease.
  const Placement& primary() const;
  Placement& primary();
  bool isPlaced() const;                             // it has one
  bool isPlacedOn(const std::string& server) const;  // and that is there
  // Null: it does not move.
  const Placement* target() const;
  Placement* target();
  // Any one on that server; null: none. All of a lease on one server are of one life of it.
  const Placement* on(const std::string& server) const;
  std::set<uint64_t> goneEpochs() const;  // of the placements that are gone
  // Without these placements; of the others, if there are any and it is not held, one is the primary then.
  void forget(const std::set<uint64_t>& epochs);
  // It leaves its placement, whose server keeps nothing but what it was granted there, for these files.
  void holdIn(const HeldLease& held);
  const Server& server() const { return primary().server; }
};

// Why nothing new is placed on a server, on whose word, and since when. For people.
struct Cordon {
  std::string reason, by;
  uint64_t sinceS = 0;  // since 1970; 0: unknown
};

// Three lines: since when, by whom, why. Texts are printable (model.h), and so have no line ends.
std::string encodeCordon(const Cordon& cordon);
// Never fails: what is no such text is a reason.
Cordon decodeCordon(const std::string& text);

// On behalf of which operator a server is emptied, and until when its leases are tried again.
struct StoredDrain {
  Principal who;
  uint64_t untilMs = 0;  // since 1970
};

// Three lines: until when, the operator's tenant and token. What follows them is of a later gpupool.
std::string encodeDrain(const StoredDrain& drain);
// None: it is no such text.
std::optional<StoredDrain> decodeDrain(const std::string& text);

// A line for each: the rows, as 16 hexadecimal digits, and the release.
std::string encodeClients(const std::vector<WorkerVersion>& clients);
// Never fails: lines that say something else are left out.
std::vector<WorkerVersion> decodeClients(const std::string& text);

// What its holder and its server are told of it.
Lease wireLease(const StoredLease& lease);
Lease wireLease(const StoredLease& lease, const Placement& placement);

// "node8 GPU 1", "node8 GPUs 0,1".
std::string describe(const Placement& placement);

// bootId: of now; what the store says of processes holds within one boot.
std::string encodeLease(const StoredLease& lease, const std::string& bootId);
// Throws std::runtime_error if the bytes are no such lease.
StoredLease decodeLease(const std::string& bytes, const std::string& bootId);

}  // namespace gpupool::pool
