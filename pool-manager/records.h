#pragma once
// What lies in the store: a lease, schema::StoredLease under "lease/<id>"; that a server is cordoned, a
// Cordon under "cordon/<name>".

#include <string>
#include <vector>

#include "pool-manager/lease_state.h"
#include "pool-manager/model.h"

namespace gpupool::pool {

inline const std::string kLeasePrefix = "lease/", kEndedPrefix = "ended/", kEpochKey = "epoch",
                         kCordonPrefix = "cordon/";

// Holds the session; is to hold it when it has moved; would hold it if the primary were lost. As in
// pool.capnp.
enum class PlacementRole : uint32_t { primary, target, standby };

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
};

struct StoredLease {
  Id id;
  LeaseState state = LeaseState::queued;
  std::vector<Placement> placements;  // exactly one is the primary
  uint32_t ttlMs = 0;
  std::string tenant, holder;
  LeaseState ending = LeaseState::lost;  // revoking: what it ends as
  std::string reason;                    // revoking or ended: why
  LocalProcess process;                  // the holder, if it is on this machine
  TurnTerms terms;

  const Placement& primary() const;
  Placement& primary();
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

// What its holder and its server are told of it.
Lease wireLease(const StoredLease& lease);

// bootId: of now; what the store says of processes holds within one boot.
std::string encodeLease(const StoredLease& lease, const std::string& bootId);
// Throws std::runtime_error if the bytes are no such lease.
StoredLease decodeLease(const std::string& bytes, const std::string& bootId);

}  // namespace gpupool::pool
