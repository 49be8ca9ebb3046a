// A lease whose server is gone, and whose holder has the checkpoints of its sessions
// (TurnTerms::holderKeeps): it leaves that server as one that is held in files does (pool_holds.cpp), and is
// placed again as that is. There is nothing for the new server to restore: the holder brings the sessions,
// when it hears where.
//
// The holder says that the server does not answer, or the server's next life does, by not having the lease. A
// server that is only cut off comes back, and is told then that the lease has left it: what it has of it
// ends. Its devices count as the lease's until it has confirmed that. One that was suspended leaves it, too,
// and has devices again where it goes: what was suspended is lost with that server.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "pool-manager/pool.h"
#include "pool-manager/refusal.h"

namespace gpupool::pool {
namespace {

constexpr char kAtHolder[] = "its holder's memory", kAtStandby[] = "its standby's memory";
constexpr char kMoving[] = "something else is under way with it";
constexpr uint32_t kMostWaitMs = 24 * 3600 * 1000;

}  // namespace

void Pool::failOver(const Principal& who, const Id& id, const ServerLife& lost, uint32_t waitMs, uint64_t now,
                    bool cutOff) {
  latestMs_ = now;
  demandOwner(who, id);
  const auto at = leases_.find(id);
  if (at != leases_.end() && at->second.state == LeaseState::granting && at->second.hold &&
      at->second.hold->atHolder)
    return;  // the answer follows
  // A server has confirmed it before this manager was started: the holder knows which process of it that was.
  const bool leftOver = at != leases_.end() && at->second.leftOver && at->second.ordered.empty() &&
                        at->second.server().life() == lost;
  LeaseRecord& record = leftOver ? at->second : demandRunning(who, id, "taken to another server");
  if (!record.terms.holderKeeps) refuse(record, "is not protected by its holder");
  if (!record.hold && record.isPlaced() && record.server().life() != lost) {
    if (record.state != LeaseState::active) refuseNow(record);
    return events_.resumed(id);  // somebody has asked before, or it has moved
  }
  if (!record.hold) {
    if (waitMs == 0)
      if (const std::string why = staysForNow(who, record, now, cutOff); !why.empty())
        refuse(record, "stays where it is: " + why);
    if (!leftOver && !mayLeaveForHolder(record))
      return events_.notResumed(id, {Failure::Kind::noDevice, kMoving});
    record.changedBy = who.text();
    leaveForHolder(record, "its holder does not reach server " + lost.name + " any more");
  }
  if (!record.hold->atHolder) refuse(record, "is held in files, from which it is restored");
  if (record.change != Change::none) return;  // the answer follows
  const bool waits = std::any_of(waiters_.begin(), waiters_.end(),
                                 [&](const Waiter& one) { return one.resumes && one.request.id == id; });
  if (!waits) restore(record, who, std::min(waitMs, kMostWaitMs), now, record.hold->held.folder, {});
}

// A server that is only slow keeps its leases. That its holder does not hear it counts if the manager has
// missed a beat of it, too, or if the network is cut between the two; and if nobody else gets what the lease
// leaves before it has another place.
std::string Pool::staysForNow(const Principal& who, const LeaseRecord& record, uint64_t now,
                              bool cutOff) const {
  if ((record.state != LeaseState::active && !record.leftOver) || record.change != Change::none)
    return "something else is under way with it";
  if (record.leftOver && now < settledMs_) return "its server may be on its way back to this manager";
  const auto server = servers_.find(record.server().name);
  if (!cutOff && server != servers_.end() && server->second.connected &&
      now < server->second.beatMs + uint64_t{2} * times_.beatMs)
    return "its server is heard";
  if (!waiters_.empty()) return "others wait for GPUs";
  const Choice place = placeHeld(record, placeWanted(record, {}), inventory(who, now));
  return place.server.empty() ? "it has no other place: " + place.missing : "";
}

// Whatever else was under way has ended with its server; but not what has another one, or files. Suspended,
// and preempted, it has nothing there any more that could be resumed.
bool Pool::mayLeaveForHolder(const LeaseRecord& record) {
  return !record.hold && !isBeingHeld(record) &&
         (record.state == LeaseState::active || record.state == LeaseState::suspended);
}

// True: it does not end with its server, but waits for what its holder does.
bool Pool::leavesForHolder(LeaseRecord& record, const std::string& server, const std::string& reason) {
  if (!record.runs() || !record.terms.holderKeeps || !mayLeaveForHolder(record) || !record.isPlacedOn(server))
    return false;
  const bool suspended = record.state == LeaseState::suspended;
  leaveForHolder(record, reason);
  if (suspended) events_.notResumed(record.id, {Failure::Kind::serverLost, reason});
  return true;
}

void Pool::leaveForHolder(LeaseRecord& record, const std::string& reason) {
  GPUPOOL_WARNING("lease %s leaves server %s: %s", record.id.text().c_str(), record.server().name.c_str(),
                  reason.c_str());
  endChange(record, {Failure::Kind::serverLost, reason});
  std::erase_if(waiters_, [&](const Waiter& one) { return one.resumes && one.request.id == record.id; });
  Placement& left = record.primary();
  record.hold =
      Hold{{Id::random(), record.standby.empty() ? kAtHolder : kAtStandby, left.server.name}, left, true};
  record.hold->was.kept.clear();
  left.role = PlacementRole::left;  // with what stays of a suspended one
  record.reason.clear();            // of its suspension
  record.suspendedBy.clear();
  record.suspension = {};
  record.unheard = false;
  record.turn.reset();
  record.preemptor = {};
  record.noticeEndsMs = 0;
  setState(record, LeaseState::held);
  record.arrival = reason;
  record.arrivalEvent = AuditEvent::held;
  storePlacements(record);
}

// It has devices again. Its sessions come with its holder.
void Pool::comeFromHolder(LeaseRecord& record) {
  record.change = Change::none;
  restored(record);
  record.standbyLookedMs = latestMs_;  // the one that it has may have to hand its checkpoint on first
  tellStandby(record);
  events_.resumed(record.id);
}

Lease Pool::leaseOf(const Principal& who, const Id& id) const {
  demandOwner(who, id);
  const auto at = leases_.find(id);
  if (at == leases_.end() || !at->second.runs() || !at->second.isPlaced())
    throw std::invalid_argument("the lease has ended");
  return tell(at->second);
}

}  // namespace gpupool::pool
