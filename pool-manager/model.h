#pragma once
// The data of pool.capnp as plain structs, without Cap'n Proto's lifetimes. convert.h converts between the
// two.

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pool-manager/local_process.h"
#include "schema/device.h"
#include "schema/id.h"
#include "schema/lease_memory.h"

namespace gpupool::pool {

inline constexpr uint32_t kMaxDevices = 64;                          // of one server
inline constexpr uint32_t kMostLeased = schema::kMostLeasedDevices;  // of one lease
inline constexpr unsigned kMostClients = 16;  // client libraries that a holder tells of
inline constexpr size_t kMostReason = 200;    // bytes of what people say a lease or a cordon is for
inline constexpr uint64_t kLeastMemory = uint64_t{1} << 20;  // of a lease on each device, if it names any

// One process of a server: its name may be another process's before it, and after it.
struct ServerLife {
  std::string name;
  Id incarnation;
  auto operator<=>(const ServerLife&) const = default;
};

// A worker program of a server, or a client library: schema::WorkerVersion.
struct WorkerVersion {
  uint64_t rowsHash = 0;  // of a client, 0: unknown
  std::string release;
  bool operator==(const WorkerVersion&) const = default;
};

struct Server {
  std::string name;
  Id incarnation;
  std::string localPath, host;
  uint16_t port = 0;
  std::string bootId;
  std::vector<Device> devices;
  uint64_t rowsHash = 0;
  uint32_t pid = 0;
  std::vector<std::string> leftOut;  // GPUs of its host that it does not offer, and why; for people
  uint32_t overcommitPercent = 100;  // of each device's memory, so much may be leased
  std::vector<std::string> walls, missingWalls;  // around its workers, and why others are not; for people
  std::vector<WorkerVersion> workers;            // whose sessions it takes, the current program first
  uint64_t keepBytes = 0;  // of its memory for checkpoints, also of other servers' leases; 0: it keeps none

  ServerLife life() const { return {name, incarnation}; }
};

// What a joining server knows of one of its devices from before.
struct DeviceReport {
  uint64_t highestEpoch = 0;
  std::vector<Id> running;  // leases whose workers still live there
};

// As in pool.capnp. A value beyond the last one is another version's.
enum class Priority : uint32_t { low, normal, high };
enum class Policy : uint32_t { pack, spread };
enum class TurnPlace : uint32_t { resident, aside, waiting };

// How a lease takes turns with others on devices of which more is leased than they have.
struct TurnTerms {
  uint32_t sharePercent = 0;  // of a device's time; 0: an equal part of what others leave
  Priority priority = Priority::normal;
  uint32_t protectMs = 0;        // its sessions are checkpointed so often; 0: it is not protected
  uint32_t idleMs = 0;           // it is given back when it has not been used for so long; 0: it is not
  bool holderKeeps = false;      // its holder keeps the checkpoints: it may go on when its server dies
  bool protectByTenant = false;  // of a request: protectMs, if it is 0, is its tenant's
  bool standbyKeeps = false;     // with holderKeeps: another server keeps them instead, while there is one
};

// A lease whose sessions are in files, as in pool.capnp.
struct HeldLease {
  Id checkpoint;  // all zero: none is
  std::string folder = {}, server = {};

  explicit operator bool() const { return checkpoint != Id{}; }
};

// Where such a lease is, as its server says.
struct LeaseTurn {
  Id id;
  TurnPlace place = TurnPlace::resident;
  uint64_t servedMs = 0;
  uint32_t turns = 0;
  std::string note;            // why it could not be put aside, lately; for people
  std::vector<uint64_t> kept;  // as in SuspendResult; empty: unknown
};

// As its server sees it; schema/pool.capnp says what each is.
struct LeaseUse {
  Id id;
  uint64_t idleMs = 0;
  uint32_t sessions = 0;
  bool wanted = false;
};

// What its programs have done on a server; schema/pool.capnp says what each is.
struct LeaseCounts {
  Id id;
  uint64_t calls = 0, awaited = 0, toDeviceBytes = 0, fromDeviceBytes = 0;
  int64_t checkpointAgeMs = -1;
};

// Instead of a lease's holder, to those that may not know him (Principal::owns).
inline constexpr char kInUse[] = "in use";

// What is known of why sessions of a lease could not be moved, and of why its end cannot be confirmed, as in
// pool.capnp.
struct LeaseHindrances {
  Id id;
  std::vector<std::string> reasons = {};
  std::vector<std::string> protection = {};
  std::string lentTo = {};
};

struct LeaseRequest {
  Id id;
  uint32_t deviceCount = 1;
  uint64_t memoryBytes = 0;
  std::string tenant, holder, server;
  uint32_t ttlMs = 15000;
  uint32_t waitMs = 0;
  TurnTerms turns = {};
  std::string gpu = {};  // a DeviceFilter's text
  Policy policy = Policy::pack;
  std::string reason = {};  // for people
  uint64_t limitMs = 0;     // the lease ends so long after its grant; 0: no limit
  std::string job = {};     // this and the next: as in pool.capnp, and claims.h
  std::string adopts = {};
  WorkerVersion client = {};
  std::string fingerprint = {};  // as in pool.capnp
  LocalProcess process = {};     // the process that asks, if it is on this machine; not on the wire
};

struct Lease {
  Id id;
  Server server;
  std::vector<LeasedDevice> devices;
  uint32_t ttlMs = 0;
  uint64_t epoch = 0;
  std::string key;  // 32 bytes, secret
  std::string holder, tenant;
  uint64_t ageMs = 0;  // this, and all but terms below: only in what the manager lists
  std::string state;
  TurnTerms terms = {};
  std::optional<LeaseTurn> turn;             // none: it takes no turns
  std::string movesTo;                       // as in pool.capnp; for people
  std::vector<std::string> hindrances = {};  // likewise
  std::string reason = {};                   // this, too: why it was asked for
  uint64_t endsInMs = 0;                     // until its time limit is over; 0: it has none
  std::vector<std::string> protection = {};  // as hindrances
  std::string job = {};                      // this and the next: of a claim, as in pool.capnp
  std::vector<std::string> adopters = {};
  HeldLease held = {};   // to be restored from there, in what a server is told; in what is listed: is held
  std::string why = {};  // this and the next: as in pool.capnp
  int64_t idleMs = -1;
  std::optional<Server> standby = {};  // keeps its checkpoints; none: its holder does, or its server alone
  uint64_t standbyEpoch = 0;           // as in pool.capnp
};

// A lease whose checkpoints a server says that it keeps as its standby, as in pool.capnp.
struct KeptLease {
  Id id;
  uint64_t standbyEpoch = 0, deviceEpoch = 0;
};

// Who renews a lease: of a claim, who uses it.
struct Adopter {
  Id id;               // all zero: none
  std::string holder;  // for people
  uint32_t ttlMs = 0;
  std::vector<WorkerVersion> clients = {};  // of the programs that have opened sessions over it
  LocalProcess process = {};                // if it is on this machine; not on the wire
};

// What the server says when it has suspended a lease.
struct SuspendResult {
  std::vector<uint64_t> kept;  // by device of the lease: bytes that stay there, besides contexts and code
  uint64_t movedBytes = 0;
  uint32_t drainMs = 0, moveMs = 0;
  HeldLease held = {};  // none: it is not in files
};

// What the server says when it has moved a lease's sessions.
struct MigrateResult {
  uint32_t sessions = 0;
  uint64_t movedBytes = 0;  // of all together
  uint32_t longestPauseMs = 0;
  std::string server = {};  // where the lease is now; from the manager, for people
};

// As in pool.capnp.
struct CheckpointResult {
  uint32_t sessions = 0;
  uint64_t bytes = 0;
  uint32_t longestPauseMs = 0;
  std::string folder = {}, server = {};
};

// Where a lease is to go, as in pool.capnp. All empty: to other workers on the same devices.
struct MoveTarget {
  std::string server = {};             // empty: the lease's own, or with `elsewhere` any other
  std::vector<uint32_t> devices = {};  // ordinals; empty: any that fit and are not the lease's
  bool elsewhere = false;

  bool empty() const { return server.empty() && devices.empty() && !elsewhere; }
};

// What would become of a request that is made now, as in pool.capnp.
enum class Outlook : uint32_t { now, devices, queue, server, anOperator, never, quota };
struct DeviceVerdict {
  uint32_t ordinal = 0;
  std::string name, reason;  // empty: it could have it
};
struct ServerVerdict {
  std::string name, reason;  // empty: nothing but its devices
  std::vector<DeviceVerdict> devices;
};
struct Explanation {
  Outlook outlook = Outlook::now;
  std::string text;    // one line
  uint32_t ahead = 0;  // requests before it in the queue
  std::vector<ServerVerdict> servers = {};
};

// A request in the queue, or a lease there that is to be resumed or restored.
struct QueuedRequest {
  Id id;
  bool resumes = false;
  std::string tenant, holder, reason;
  Priority priority = Priority::normal;
  uint64_t waitedMs = 0;
  std::string why = {};  // what it waits for, in one line; "": that was not asked
};

// A lease that a server's beat says is suspended.
struct SuspendedLease {
  Id id;
  std::vector<uint64_t> kept;  // as in SuspendResult
  HeldLease held = {};         // likewise
};

inline constexpr char kLongReason[] = "a reason has at most 200 bytes";

const char* name(Priority priority);
const char* name(TurnPlace place);
const char* name(Policy policy);
const char* name(Outlook outlook);
// Cuts to `limit` bytes and replaces control characters: names come from other machines and end up on
// terminals.
std::string printable(const std::string& text, size_t limit);
// /proc/sys/kernel/random/boot_id, or "unknown".
std::string bootId();
// Milliseconds of CLOCK_BOOTTIME: goes on while the machine sleeps, and nobody sets it.
uint64_t bootTimeMs();
uint64_t calendarMs();                  // since 1970
std::string utcText(uint64_t seconds);  // since 1970: "2026-12-01 00:00 UTC"

}  // namespace gpupool::pool
