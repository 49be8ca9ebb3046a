#pragma once
// A lease as the pool knows it: what the store has (records.h), and besides what is under way with it and
// what its server and its holder have said since the manager was started.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/audit.h"
#include "pool-manager/failure.h"
#include "pool-manager/inventory.h"
#include "pool-manager/lease_totals.h"
#include "pool-manager/records.h"

namespace gpupool::pool {

// A lease that is about to be suspended or resumed is active, and all of its reservation counts.
enum class Change {
  none,
  preempting,  // it is to be suspended for a request of a higher class; the store has not accepted that yet
  suspending,  // its server drains it and takes its memory off the devices
  storing,     // its server says that it is suspended; the store has not accepted that yet
  reserving,   // it is to be resumed; the store has not accepted that yet
  resuming,    // its server brings its memory back
  goingBack,   // it runs, and its server brings it back into a checkpoint that it has not gone on from
  restoring,   // held, and has devices again: the store, and then their server, have not accepted that yet
  restored,    // its sessions have come from their files; the store has not accepted that yet
  copying,     // its server writes its sessions into files
  placing,     // it is to move to its target; the store has not accepted that yet
  preparing,   // its target's server reserves the devices
  migrating,   // its server moves its sessions, to its target or, if it has none, to other workers
  returning,   // a session could not be moved: is the target unused, so that it can be given back?
  settling,    // it is on one of its placements; the store has not accepted that yet
};
constexpr bool isMove(Change change) { return change >= Change::placing; }

// A program's holder that uses a claim.
struct Adoption {
  Adopter adopter;
  uint64_t untilMs = 0;   // it has to renew before
  bool answered = false;  // it has been given the lease
};

struct LeaseRecord : StoredLease {
  uint64_t deadlineMs = 0;           // of the holder's right
  std::map<Id, Adoption> adoptions;  // of a claim, by adopter; not stored: they renew
  uint64_t grantedMs = 0;            // the latest time: one that is restored is granted again
  // Since its first grant, as of agedAtMs: this and not the calendar counts on from there.
  uint64_t agedMs = 0, agedAtMs = 0;
  uint64_t chargedMs = 0;         // its tenant is charged until then
  uint64_t endsMs = kNever;       // when its time limit is over
  uint64_t revokingMs = 0;        // since when
  std::string endedBy;            // revoking: on whose word
  std::string droppedBy;          // lost: whose word it is that nothing of it runs; empty: its server's
  std::set<std::string> ordered;  // servers that a grant or revoke is on its way to
  bool unborn = false;            // the store has not accepted it yet
  bool leftOver = false;   // granting since the manager was started: its server may have confirmed it before
  bool stillborn = false;  // nor will it: nobody has heard of it, and its id may be asked for again
  bool closing = false;    // its end is on its way to the store
  uint64_t triedMs = 0;    // when that was tried last

  Change change = Change::none;
  std::string changedBy;     // on whose word
  uint64_t order = 0;        // the number of the order that is under way, which the answer repeats
  std::string orderedAt;     // the server that carries it out
  SuspendResult suspension;  // storing, suspended, held: what the server said
  std::string folder;        // restoring, resuming: the files in which its sessions are; empty: they are not
  std::string notResumed;    // storing: why it is suspended again; empty: it was to be suspended
  bool writing = false;      // storing: the write is on its way
  uint64_t writtenMs = 0;    // storing: when that was tried last
  uint64_t killedMs = 0;     // since then its holder's process is known to be gone; 0: it is not
  bool unheard = false;      // the server may still have an order to resume before it
  std::string idleReason;    // suspending, storing: why by the pool itself; empty: by order
  bool intoFiles = false;    // suspending, storing: it is to be held
  uint64_t idleNotBeforeMs = 0;  // it is not tried again to suspend it because it is idle
  uint64_t broughtBackMs = 0;    // its server refused to resume it then; 0: never

  uint32_t drainMs = 0;            // preparing: of the order to migrate that follows
  MigrateResult moved;             // settling: the answer, if it is not `failure`
  std::optional<Failure> failure;  // returning, settling
  uint64_t settleOrder = 0;        // to give up the devices that it has left on its own server; 0: none
  // The store has other placements than these. What has been left is told of it when it has not.
  bool rewrite = false, rewriting = false;
  uint64_t rewrittenMs = 0;
  // For the audit log, with the next rewrite: what has become of its move, or that it is restored; empty:
  // nothing.
  std::string arrival;
  AuditEvent arrivalEvent = AuditEvent::moved;

  uint64_t ranSinceMs = 0;          // it has its devices
  uint32_t preemptDrainMs = 0;      // preempting: of the order to suspend it
  uint64_t preemptNotBeforeMs = 0;  // it could not be suspended: it is not tried again
  uint64_t noticeEndsMs = 0;        // it ends then for a request of a higher class; 0: it has no notice
  std::string notice;               // why it could not be suspended

  std::string standbyMissing;    // why it has none
  uint64_t standbyLookedMs = 0;  // when one was looked for last

  std::optional<LeaseTurn> turn;      // as its server's last beat says; none: it takes no turns
  uint64_t idleMs = 0, idleAtMs = 0;  // LeaseUse::idleMs, and when its server said so; 0: never
  LeaseTotals totals;
  // By server, as their last beats say.
  std::map<std::string, std::vector<std::string>> hindrances, protection;
  std::map<std::string, std::string> lentTo;
  uint64_t lentMs = 0;  // when a server that answers said so last
  // As its holder last said, to this manager or to the one before. Of a claim: as its adopters had said to
  // the one before, and only as long as they may not have renewed since (until clientsUntilMs).
  std::vector<WorkerVersion> clients;
  uint64_t clientsUntilMs = 0;
  std::vector<WorkerVersion> storedClients;  // what the store has of them
  bool clientsInStore = false;               // it may have something
  bool storingClients = false;
  bool touched = false;  // the lease table's own

  // Of where it is no longer no answer counts either, nor what was said there.
  void forget(const std::set<uint64_t>& epochs) {
    StoredLease::forget(epochs);
    std::erase_if(ordered, [this](const std::string& name) { return on(name) == nullptr; });
    const auto isLeft = [this](const auto& said) { return on(said.first) == nullptr; };
    std::erase_if(hindrances, isLeft);
    std::erase_if(protection, isLeft);
    std::erase_if(lentTo, isLeft);
  }
  uint64_t ageMs(uint64_t now) const { return agedMs + now - agedAtMs; }
  bool runs() const { return state != LeaseState::revoking && !isEnd(state); }
  // Suspended, until its programs call or, if there is a preemptor, until it is its turn.
  bool comesBack() const { return state == LeaseState::suspended && !reason.empty(); }
};

// Where sessions of the lease may be, besides that server; null: nowhere.
Placement* livesBeside(LeaseRecord& record, const std::string& server);
bool anyGone(const LeaseRecord& record);
// As the store is to have it. What is suspended or held is so there first (Change::storing): whatever else of
// the lease is written meanwhile says that, too, for it is written behind that.
StoredLease toStore(const LeaseRecord& record);
// Of a claim: when its last adopter's time is over at the latest, and then its own; 0: nobody uses it.
uint64_t leftBy(const LeaseRecord& record);
// Which worker programs its server has to have, wherever it goes: by what its holders say, and as long as
// they have not, by its request. Empty: unknown.
std::vector<WorkerVersion> clientsOf(const LeaseRecord& record);
// What the lease has on that device of the placement. whole: as if it were not suspended.
Claim claimOf(const LeaseRecord& record, const Placement& placement, size_t device, bool whole);
// One value a device; what the server did not say, or says too high, is the whole reservation.
std::vector<uint64_t> checkedKept(const Placement& placement, std::vector<uint64_t> kept);

}  // namespace gpupool::pool
