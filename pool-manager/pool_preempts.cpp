// Preemption: a request of a higher class that finds no devices takes them from leases of lower classes.
// These are suspended, and come back by themselves, as requests for their devices in the queue. One that
// cannot be suspended ends after a notice, where the site wants that (PreemptTimes).
//
// Which leases: as few as are enough on one server, of the lowest classes, and of those the ones that have
// run for the shortest time. Who asks for whole devices gets what the suspended leases leave of them. That a
// lease is preempted is stored before its server hears of it: whatever dies then, it comes back.
#include <algorithm>
#include <tuple>

#include "base/log.h"
#include "pool-manager/pool.h"
#include "pool-manager/refusal.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kLookAgainMs = 1000;   // for leases to preempt, after none were found
constexpr uint64_t kTryAgainMs = 60'000;  // to suspend a lease that could not be suspended
constexpr uint64_t kHurriedMs = 8000;     // who does not wait leaves so long, and not the whole grace

}  // namespace

std::string Pool::preemptText(const LeaseRecord& record) const {
  return "preempted by lease " + shortId(record.preemptor) + ", of a higher class";
}

// Why a lease is suspended, and on whose word, where it is held, or why it is about to lose its devices; for
// its owner.
std::string Pool::whyText(const LeaseRecord& record, uint64_t now) const {
  if (record.noticeEndsMs != 0 && record.runs())
    return "ends in " + age(record.noticeEndsMs - std::min(record.noticeEndsMs, now)) + ", " +
           preemptText(record) + ": it could not be suspended: " + record.notice;
  if (record.state == LeaseState::active && record.preemptor != Id{} &&
      (record.change == Change::preempting || record.change == Change::suspending))
    return "is being suspended, " + preemptText(record);
  if (const std::string others = lentTo(record, now); !others.empty())
    return "has ended, and keeps its GPUs while memory of it is in use by " + others;
  if (record.state == LeaseState::held && record.hold->atHolder)
    return "it waits for another server: its own is gone, and its holder has its checkpoint";
  if (record.state == LeaseState::held)
    return "in " + record.hold->held.folder + ", which " + record.hold->held.server +
           " has written; gpupool restore brings it back";
  if (record.state != LeaseState::suspended) return "";
  if (!record.reason.empty()) return record.reason;
  return record.suspendedBy.empty() ? "" : "on the word of " + record.suspendedBy;
}

Pool::Notice Pool::noticeOf(const Id& id, uint64_t now) const {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.noticeEndsMs == 0) return {};
  const LeaseRecord& record = at->second;
  return {preemptText(record) + ", and could not be suspended: " + record.notice,
          record.noticeEndsMs - std::min(record.noticeEndsMs, now)};
}

bool Pool::mayPreempt(const LeaseRecord& record, Priority priority, uint64_t now) const {
  return record.state == LeaseState::active && record.change == Change::none && !record.hold &&
         record.noticeEndsMs == 0 && record.terms.priority < priority &&
         now >= record.ranSinceMs + times_.preempt.minRunMs && now >= record.preemptNotBeforeMs &&
         !ofEarlierLife(record.primary());
}

// Leases are on their way off their devices for this request.
bool Pool::isPreempting(const Waiter& waiter) const {
  return std::any_of(waiter.victims.begin(), waiter.victims.end(), [&](const Id& id) {
    const auto at = leases_.all().find(id);
    if (at == leases_.all().end() || at->second.preemptor != waiter.request.id) return false;
    const LeaseRecord& record = at->second;
    return record.change == Change::preempting || record.change == Change::suspending ||
           record.change == Change::storing || record.noticeEndsMs != 0 ||
           record.state == LeaseState::revoking;
  });
}

// True: devices are being taken for the waiter. Called when it has found none.
bool Pool::preempt(Waiter& waiter, const Queue& before, Priority priority, const Fits& fits, uint64_t now) {
  if (times_.preempt.what == Preemption::off || priority == Priority::low) return false;
  if (isPreempting(waiter)) return true;
  if (waiter.preemptTriedMs != 0 && now < waiter.preemptTriedMs + kLookAgainMs) return false;
  waiter.preemptTriedMs = std::max<uint64_t>(1, now);
  if (hadNoVictims(waiter, priority, now)) return false;
  Victims best;
  for (const ServerUse& server : before.servers) {
    if (!server.unusable.empty()) continue;
    std::vector<const LeaseRecord*> there;
    for (const Id& lease : leases_.on(server.name)) there.push_back(&leases_.all().at(lease));
    const Victims victims = victimsOn(server, before, waiter, there, priority, fits, now);
    if (victims.leases.empty()) continue;
    if (best.leases.empty() ||
        std::tuple(victims.highest, victims.leases.size()) < std::tuple(best.highest, best.leases.size()))
      best = victims;
  }
  for (const Id& lease : best.leases) beginPreempt(leases_.at(lease), waiter, now);
  if (best.leases.empty())
    noVictims_.push_back({waiter.wish, waiter.request.tenant, priority, now});
  else
    waiter.victims = best.leases;
  return !best.leases.empty();
}

// An equal request has looked for leases to preempt just now: each look takes all servers.
bool Pool::hadNoVictims(const Waiter& waiter, Priority priority, uint64_t now) {
  std::erase_if(noVictims_, [&](const NoVictims& one) { return now >= one.atMs + kLookAgainMs; });
  if (waiter.resumes) return false;  // it wants its own devices
  return std::any_of(noVictims_.begin(), noVictims_.end(), [&](const NoVictims& one) {
    return one.wish == waiter.wish && one.tenant == waiter.request.tenant && one.priority == priority;
  });
}

// As few as are enough, of the lowest classes, the latest first.
Pool::Victims Pool::victimsOn(const ServerUse& server, const Queue& before, const Waiter& waiter,
                              const std::vector<const LeaseRecord*>& there, Priority priority,
                              const Fits& fits, uint64_t now) const {
  std::vector<const LeaseRecord*> may;
  for (const LeaseRecord* record : there)
    if (record->isPlacedOn(server.name) && mayPreempt(*record, priority, now)) may.push_back(record);
  std::sort(may.begin(), may.end(), [](const LeaseRecord* a, const LeaseRecord* b) {
    return std::tuple(a->terms.priority, b->ranSinceMs, a->id) <
           std::tuple(b->terms.priority, a->ranSinceMs, b->id);
  });
  std::set<Id> away;
  const auto enough = [&] { return fits(without(away, server, before, waiter.request.id, there)); };
  size_t taken = 0;
  while (taken < may.size() && (away.empty() || !enough())) away.insert(may[taken++]->id);
  if (away.empty() || !enough()) return {};
  // What the first ones have given up may not be needed.
  for (size_t i = taken; i-- > 0;) {
    away.erase(may[i]->id);
    if (away.empty() || !enough()) away.insert(may[i]->id);
  }
  Victims victims{{away.begin(), away.end()}};
  for (size_t i = 0; i < taken; ++i)
    if (away.contains(may[i]->id)) victims.highest = std::max(victims.highest, may[i]->terms.priority);
  return victims;
}

// The server as it would be if these leases were suspended, and the waiter, if it is a lease there, were not
// there.
ServerUse Pool::without(const std::set<Id>& away, const ServerUse& server, const Queue& before,
                        const Id& waiter, const std::vector<const LeaseRecord*>& there) const {
  ServerUse use = server;
  for (DeviceUse& device : use.devices) {
    device.freeBytes = leasableBytes(device.info.memoryBytes, device.overcommitPercent);
    device.asideBytes = device.largestBytes = 0;
    device.sharePercent = 0;
  }
  for (const LeaseRecord* record : there) {
    if (record->id == waiter) continue;
    for (const Placement& placement : record->placements) {
      if (placement.server.name != server.name) continue;
      for (size_t i = 0; i < placement.devices.size(); ++i) {
        Claim claim = claimOf(*record, placement, i, before.resuming.contains(record->id));
        claim.suspended = claim.suspended || away.contains(record->id);
        for (DeviceUse& device : use.devices)
          if (device.info.uuid == claim.device.info.uuid) occupy(claim, device);
      }
    }
  }
  return use;
}

// Its server is told when the store has it.
void Pool::beginPreempt(LeaseRecord& record, const Waiter& waiter, uint64_t now) {
  record.preemptor = waiter.request.id;
  record.change = Change::preempting;
  record.intoFiles = false;
  const uint64_t left = waiter.untilMs == kNever ? kNever : waiter.untilMs - std::min(waiter.untilMs, now);
  record.preemptDrainMs =
      static_cast<uint32_t>(std::min<uint64_t>(times_.preempt.graceMs, std::max(left, kHurriedMs)));
  write({{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}},
        {entryOf(AuditEvent::preempting, record, "", preemptText(record))},
        [this, id = record.id](const std::string& why) { preemptStored(id, why); });
}

void Pool::preemptStored(const Id& id, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.change != Change::preempting) return;  // it has ended meanwhile
  LeaseRecord& record = at->second;
  record.change = Change::none;
  const auto server = servers_.find(record.server().name);
  if (!why.empty() || server == servers_.end() || !server->second.connected ||
      ofEarlierLife(record.primary())) {
    record.preemptor = {};
    return;
  }
  record.changedBy.clear();
  const Id preemptor = record.preemptor;
  orderSuspend(record, record.preemptDrainMs, "", preemptText(record));
  record.preemptor = preemptor;
}

// It could not be suspended: it goes on, or has notice.
void Pool::notPreempted(LeaseRecord& record, const std::string& why, uint64_t now) {
  record.notice = why;
  if (times_.preempt.what == Preemption::revoke) {
    record.noticeEndsMs = now + times_.preempt.noticeMs;
    const std::string text = "notice of " + age(times_.preempt.noticeMs) + ": " + preemptText(record) +
                             ", and could not be suspended: " + why;
    return write({}, {entryOf(AuditEvent::preempting, record, "", text)}, [](const std::string&) {});
  }
  record.preemptor = {};
  record.preemptNotBeforeMs = now + kTryAgainMs;
}

// A notice that is over; and one that has been suspended takes its place in the queue.
void Pool::tickPreempted(LeaseRecord& record, uint64_t now) {
  if (record.change != Change::none) return;
  if (record.state == LeaseState::suspended && record.comesBack() && record.preemptor != Id{})
    bringBack(record, now);
  if (record.noticeEndsMs == 0 || !record.runs()) return;
  const bool waits = std::any_of(waiters_.begin(), waiters_.end(),
                                 [&](const Waiter& one) { return one.request.id == record.preemptor; });
  if (waits && now < record.noticeEndsMs) return;
  leases_.touch(record);
  record.noticeEndsMs = 0;
  if (waits) {
    const std::string why = preemptText(record) + ", and could not be suspended: " + record.notice;
    startRevoke(record, LeaseState::revoked, why, now);
    return;
  }
  record.preemptor = {};  // it has been served without, or has gone
  record.preemptNotBeforeMs = now + kTryAgainMs;
  record.notice.clear();
}

}  // namespace gpupool::pool
