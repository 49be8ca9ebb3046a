// Suspending and resuming: a lease whose memory leaves its devices, and comes back.
//
// Free for others is that memory only when its server has said that it is gone and the store has accepted
// that. Taken it is again before the server hears that it may bring it back. Whatever was under way when the
// manager or a connection ended, the server's beats say what the lease is.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/log.h"
#include "pool-manager/pool.h"
#include "pool-manager/refusal.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMaxQueued = 4096;
constexpr uint64_t kStoreAgainMs = 1000;  // what the store refused is tried again after this
constexpr size_t kMostFolder = 1024;

// What a lease has on its devices when it is not suspended.
std::vector<Claim> wholeClaims(const LeaseRecord& record) {
  std::vector<Claim> claims;
  claims.reserve(record.primary().devices.size());
  for (size_t i = 0; i < record.primary().devices.size(); ++i)
    claims.push_back(claimOf(record, record.primary(), i, true));
  return claims;
}

// From a server.
HeldLease checkedFiles(HeldLease held) {
  held.folder = printable(held.folder, kMostFolder);
  held.server = printable(held.server, 63);
  return held;
}

}  // namespace

// Throws unless the lease is active, suspended, held or moving, and the asker's.
LeaseRecord& Pool::demandRunning(const Principal& who, const Id& id, const char* what) {
  demandOwner(who, id);
  const auto at = leases_.find(id);
  if (at == leases_.end()) {
    for (const Waiter& waiter : waiters_)
      if (waiter.request.id == id && !waiter.resumes)
        throw std::invalid_argument("lease " + shortId(id) + " cannot be " + what +
                                    ": it waits for its devices still");
    const auto dead = tombstones_.find(id);
    throw std::invalid_argument(dead == tombstones_.end() ? "there is no lease " + id.text()
                                                          : "the lease has ended: " + dead->second.reason);
  }
  LeaseRecord& record = at->second;
  const std::string why = std::string("cannot be ") + what + ": it is ";
  if (record.state == LeaseState::granting || (record.state == LeaseState::active && record.hold))
    refuse(record, why + (record.hold ? "being restored" : "granting: its server has not confirmed it yet"));
  if (record.target() != nullptr && record.runs()) return record;
  if (record.state != LeaseState::active && record.state != LeaseState::suspended &&
      record.state != LeaseState::held)
    refuse(record, why + std::string(name(record.state)) + " (" + record.reason + ")");
  return record;
}

// Throws for a lease that has two places: it is on neither alone.
void Pool::demandArrived(const LeaseRecord& record, const char* what) const {
  if (record.state != LeaseState::moving) return;
  if (record.change != Change::none) refuseNow(record);
  refuse(record, std::string("cannot be ") + what + ": it is moving to " + describe(*record.target()) +
                     ", and has to arrive there first (gpupool migrate " + shortId(record.id) + ")");
}

// Throws if the server of that placement cannot be told anything of it now.
void Pool::demandServer(const LeaseRecord& record, const Placement& placement, const char* what,
                        uint64_t now) const {
  const std::string& server = placement.server.name;
  const auto at = servers_.find(server);
  const std::string absent = at == servers_.end()       ? "not connected"
                             : ofEarlierLife(placement) ? "it was restarted"
                                                        : absence(at->second, now);
  if (!absent.empty())
    refuse(record, std::string("cannot be ") + what + ": server " + server + ": " + absent);
}

void Pool::suspend(const Principal& who, const Id& id, uint32_t drainMs, uint64_t now,
                   const std::string& folder) {
  latestMs_ = now;
  LeaseRecord& record = demandRunning(who, id, "suspended");
  demandArrived(record, "suspended");
  if (!folder.empty() && record.change != Change::none) refuseNow(record);
  if (!folder.empty() && record.state == LeaseState::suspended) refuse(record, "is suspended already");
  if (!folder.empty() && record.state == LeaseState::held && record.hold->held.folder == folder)
    return events_.suspended(id, record.suspension);
  demandUnheld(record, folder.empty() ? "suspended" : "written into files");
  if (record.state == LeaseState::suspended) return keepSuspended(record, who);
  if (record.change == Change::storing && !record.idleReason.empty()) refuseNow(record);  // it is written
  const bool suspends = record.change == Change::suspending || record.change == Change::storing;
  if (suspends && record.intoFiles) refuseNow(record);
  if (record.change == Change::suspending) {  // now it is ordered, and stays so
    record.idleReason.clear();
    record.preemptor = {};
    record.changedBy = who.text();
  }
  if (suspends) return;  // the answer follows
  if (record.change != Change::none) refuseNow(record);
  demandServer(record, record.primary(), "suspended", now);
  record.changedBy = who.text();
  orderSuspend(record, drainMs, folder);
}

void Pool::orderSuspend(LeaseRecord& record, uint32_t drainMs, const std::string& folder,
                        const std::string& idleReason) {
  record.idleReason = idleReason;
  record.intoFiles = !folder.empty();
  record.preemptor = {};  // whoever orders it: it gives its devices up, and needs no notice
  record.noticeEndsMs = 0;
  record.change = Change::suspending;
  record.order = ++orders_;
  record.orderedAt = record.server().name;
  events_.suspend(record.server().name, record.id, drainMs, folder, record.order);
}

// Ordered when it was suspended already: then it does not come back by itself.
void Pool::keepSuspended(LeaseRecord& record, const Principal& who) {
  if (record.comesBack()) {
    record.reason.clear();
    record.preemptor = {};
    record.suspendedBy = who.text();
    std::erase_if(waiters_, [&](const Waiter& one) {
      return one.resumes && one.request.id == record.id && !events_.resumeWanted(record.id);
    });
    write({{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}}, {},
          [this, id = record.id, result = record.suspension](const std::string& why) {
            if (why.empty()) return events_.suspended(id, result);
            events_.notSuspended(id, {Failure::Kind::refused, "the manager cannot write its store: " + why});
          });
    return;
  }
  events_.suspended(record.id, record.suspension);
}

// The lease that this answer is about; null: the order is not waited for any more.
LeaseRecord* Pool::ordered(const Id& id, Change change, uint64_t order) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.change != change || at->second.order != order) return nullptr;
  return &at->second;
}

void Pool::suspendDone(const Id& id, uint64_t order, const SuspendResult& result, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::suspending, order);
  if (record != nullptr) storeSuspended(*record, result, now);
}

// Where it is unknown what became of the order, the lease counts as active until a beat says otherwise.
void Pool::suspendFailed(const Id& id, uint64_t order, const std::string& why, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::suspending, order);
  if (record == nullptr) return;
  if (!record->idleReason.empty())
    GPUPOOL_INFO("lease %s is not suspended, though %s: %s", id.text().c_str(), record->idleReason.c_str(),
                 why.c_str());
  const std::string text = "server " + record->server().name + ": " + why;
  endChange(*record, {Failure::Kind::refused, text});
  if (record->preemptor != Id{}) notPreempted(*record, text, now);
  serveWaiters(now);
}

// It is suspended: its memory is free for others as soon as the store has accepted that.
void Pool::storeSuspended(LeaseRecord& record, SuspendResult result, uint64_t now) {
  result.kept = checkedKept(record.primary(), std::move(result.kept));
  result.held = checkedFiles(std::move(result.held));
  record.change = Change::storing;
  record.suspension = std::move(result);
  record.intoFiles = static_cast<bool>(record.suspension.held);
  record.writing = true;
  record.writtenMs = now;
  const HeldLease& held = record.suspension.held;
  const std::string why = !record.notResumed.empty() ? record.notResumed
                          : held                     ? "in " + held.folder
                                                     : record.idleReason;
  write({{kLeasePrefix + record.id.text(), encodeLease(toStore(record), bootId_)}},
        {entryOf(held ? AuditEvent::held : AuditEvent::suspended, record, record.changedBy, why)},
        [this, id = record.id](const std::string& why) { storedSuspended(id, why); });
}

void Pool::storeAgain(LeaseRecord& record, uint64_t now) {
  if (record.change == Change::storing && !record.writing && now >= record.writtenMs + kStoreAgainMs)
    storeSuspended(record, record.suspension, now);
}

void Pool::storedSuspended(const Id& id, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end()) return;
  LeaseRecord& record = at->second;
  record.writing = false;
  if (record.change != Change::storing) return;  // it has ended meanwhile
  const std::string text = std::exchange(record.notResumed, "");
  if (!why.empty()) {  // tick() tries again
    const std::string store =
        "it is suspended on its server, but its memory is not free before the manager can write its store: " +
        why;
    events_.notSuspended(id, {Failure::Kind::refused, store});
    if (!text.empty()) events_.notResumed(id, {Failure::Kind::noDevice, text});
    return;
  }
  record.change = Change::none;
  if (record.suspension.held) {
    record.holdIn(record.suspension.held);
    record.turn.reset();
    if (anyGone(record)) storePlacements(record);
    for (const Placement& placement : record.placements) tellLeft(record, placement);
  } else {
    record.primary().kept = record.suspension.kept;
    record.reason = std::exchange(record.idleReason, "");
    record.suspendedBy = record.changedBy;
    record.idleNotBeforeMs = 0;
    setState(record, LeaseState::suspended);
    if (record.comesBack() && record.preemptor != Id{}) bringBack(record, latestMs_);
  }
  events_.suspended(id, record.suspension);
  if (!text.empty()) events_.notResumed(id, {Failure::Kind::noDevice, text});
  serveWaiters(latestMs_);
}

void Pool::resume(const Principal& who, const Id& id, uint32_t waitMs, uint64_t now,
                  const std::string& folder, const MoveTarget& to) {
  latestMs_ = now;
  const char* what = folder.empty() ? "resumed" : "restored";
  LeaseRecord& record = demandRunning(who, id, what);
  demandArrived(record, what);
  if (!folder.empty() && record.change != Change::none) refuseNow(record);
  if (!folder.empty() && record.state == LeaseState::active) return goBack(record, who, now, folder, to);
  if (!folder.empty() && record.state == LeaseState::suspended)
    refuse(record,
           "cannot be restored: it is not held in files, but suspended (gpupool resume " + shortId(id) + ")");
  if (record.hold && record.hold->atHolder) demandUnheld(record, what);
  if (record.state == LeaseState::held && !folder.empty())
    return restore(record, who, waitMs, now, folder, to);
  demandUnheld(record, what);
  if (record.change == Change::suspending || record.change == Change::storing) refuseNow(record);
  if (isMove(record.change) || record.change == Change::copying) return events_.resumed(id);
  if (record.change != Change::none) return;  // the answer follows
  if (record.state == LeaseState::active) {
    // It counts as running since an order was sent. Was that lost, its server says so when it is back.
    demandServer(record, record.primary(), what, now);
    if (record.unheard) return sendResume(record);
    return events_.resumed(id);
  }
  const auto waits = std::find_if(waiters_.begin(), waiters_.end(), [&](const Waiter& one) {
    return one.resumes && one.request.id == id && resumeWanted(id);
  });
  if (waits != waiters_.end()) {
    if (waitMs == 0) refuse(record, "waits already to be resumed: " + missingToResume(record, who, {}, now));
    // One that the pool has queued by itself waits for ever: whoever orders it gets an answer in time.
    waits->untilMs = waits->untilMs == kNever ? now + waitMs : std::max(waits->untilMs, now + waitMs);
    return;
  }
  if (waiters_.size() >= kMaxQueued) refuse(record, "cannot be resumed: too many requests wait for devices");
  LeaseRequest place;
  place.id = id;
  enqueue({place, who, now + waitMs, true}, now);
}

// resumed: those whose devices are not for this one.
std::string Pool::missingToResume(const LeaseRecord& record, const Principal& who,
                                  const std::set<Id>& resumed, uint64_t now) const {
  const std::string& name = record.server().name;
  const auto server = servers_.find(name);
  if (server == servers_.end()) return name + ": not connected";
  ServerUse use = useOf(server->second, who, now, {.without = &record.id, .resumed = &resumed});
  use.unusable = absence(server->second, now);  // a cordon keeps new leases away: this one is there
  return missingFor(wholeClaims(record), use);
}

// True: it has been answered, or will be by what was begun.
bool Pool::serveResume(Waiter& waiter, Queue& before, uint64_t now) {
  const Id& id = waiter.request.id;
  if (!resumeWanted(id)) return true;
  const auto at = leases_.find(id);
  if (!waiter.folder.empty() && at != leases_.end() && at->second.state == LeaseState::held)
    return serveRestore(waiter, at->second, before, now);
  if (at == leases_.end() || at->second.state != LeaseState::suspended) {
    const auto dead = tombstones_.find(id);
    if (at != leases_.end() && at->second.state == LeaseState::active)
      events_.resumed(id);  // its server said so
    else
      events_.notResumed(id, {Failure::Kind::refused,
                              "the lease has ended: " + (at != leases_.end()         ? at->second.reason
                                                         : dead != tombstones_.end() ? dead->second.reason
                                                                                     : "it is gone")});
    return true;
  }
  LeaseRecord& record = at->second;
  const bool mayTry = !isClaimed(record);
  std::string missing = missingToResume(record, waiter.who, {}, now);
  const std::string overQuota = quotaHindersResume(record, before);
  const bool room = missing.empty() && (before.resuming.empty() ||
                                        missingToResume(record, waiter.who, before.resuming, now).empty());
  if (mayTry && room && overQuota.empty()) {
    record.changedBy = record.preemptor == Id{} ? waiter.who.text() : "";
    reserve(record);
    refresh(before, now);
    return true;
  }
  const Fits fits = [&](const ServerUse& server) {
    return server.name == record.server().name && missingFor(wholeClaims(record), server).empty();
  };
  const bool preempting =
      mayTry && !room && overQuota.empty() && preempt(waiter, before, record.terms.priority, fits, now);
  if (tooLate(waiter, now, preempting)) {
    if (missing.empty()) missing = overQuota;
    if (missing.empty()) missing = "the devices that are free are for those who waited longer";
    missing += behind(before);
    events_.notResumed(id,
                       {Failure::Kind::noDevice, "lease " + shortId(id) + " cannot be resumed: " + missing});
    return true;
  }
  if (overQuota.empty()) stay(waiter, before, now);
  return false;
}

// Who waits for new devices cannot have those of a cordoned server.
bool Pool::isClaimed(const LeaseRecord& record) const {
  const ServerUse* server = inventory_.find(record.server().name);
  if (server == nullptr) return false;
  for (const DeviceUse& device : server->devices)
    for (const LeasedDevice& one : record.primary().devices)
      if (one.info.uuid == device.info.uuid && device.claimedMs != kNever) return true;
  return false;
}

// All of its memory is its own again from now on; its server hears of it when the store has accepted it.
void Pool::reserve(LeaseRecord& record) {
  record.folder.clear();
  record.suspension.kept = std::move(record.primary().kept);
  record.primary().kept.clear();
  record.change = Change::reserving;
  record.idleReason = std::exchange(record.reason, "");  // for it may be suspended again
  setState(record, LeaseState::active);
  write({{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}},
        {entryOf(AuditEvent::resumed, record, record.changedBy, "")},
        [this, id = record.id](const std::string& why) { reserved(id, why); });
}

void Pool::reserved(const Id& id, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.change != Change::reserving) return;  // it has ended meanwhile
  LeaseRecord& record = at->second;
  if (why.empty()) return sendResume(record);
  record.primary().kept = record.suspension.kept;
  record.reason = record.idleReason;
  setState(record, LeaseState::suspended);
  endChange(record, {Failure::Kind::refused, "the manager cannot write its store: " + why});
  serveWaiters(latestMs_);
}

void Pool::sendResume(LeaseRecord& record) {
  const std::string& server = record.server().name;
  const auto at = servers_.find(server);
  if (at == servers_.end() || !at->second.connected) {
    record.notResumed = "lost the connection to server " + server;
    return storeSuspended(record, record.suspension, latestMs_);
  }
  record.change = Change::resuming;
  record.order = ++orders_;
  record.orderedAt = server;
  events_.resume(server, record.id, record.folder, false, record.order);
}

void Pool::resumeDone(const Id& id, uint64_t order, uint64_t now) {
  latestMs_ = now;
  if (LeaseRecord* back = ordered(id, Change::goingBack, order)) {
    back->change = Change::none;
    return events_.resumed(id);
  }
  LeaseRecord* record = ordered(id, Change::resuming, order);
  if (record == nullptr) return;
  record->change = Change::none;
  record->unheard = false;
  record->ranSinceMs = now;
  record->preemptor = {};
  record->idleReason.clear();
  if (record->hold) {
    record->change = Change::restored;  // the answer follows
    return restored(*record);
  }
  events_.resumed(id);
}

void Pool::resumeFailed(const Id& id, uint64_t order, const std::string& why, bool refused, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::resuming, order);
  if (record == nullptr) record = ordered(id, Change::goingBack, order);
  if (record == nullptr) return;
  const std::string text = "server " + record->server().name + ": " + why;
  // Where it is held now, a beat says so.
  if (record->change == Change::goingBack)
    return endChange(*record, {refused ? Failure::Kind::refused : Failure::Kind::serverLost, text});
  if (refused && record->hold) return stayHeld(*record, {Failure::Kind::refused, text});
  if (refused) {
    record->unheard = false;
    record->notResumed = text;
    record->broughtBackMs = now;
    return storeSuspended(*record, record->suspension, now);
  }
  // It may have the order before it still: its memory stays reserved.
  record->unheard = true;
  endChange(*record, {Failure::Kind::serverLost, text});
}

// Nobody waits any more for what was under way.
void Pool::endChange(LeaseRecord& record, const Failure& failure) {
  const Change was = record.change;
  const bool resumed = was == Change::reserving || was == Change::restoring || was == Change::resuming ||
                       was == Change::restored || was == Change::goingBack || !record.notResumed.empty();
  record.change = Change::none;
  record.notResumed.clear();
  record.idleReason.clear();
  if (was == Change::placing && record.target() != nullptr) record.target()->gone = true;  // nobody knows it
  if (was == Change::suspending || was == Change::storing) events_.notSuspended(record.id, failure);
  if (was == Change::copying) events_.notCheckpointed(record.id, failure);
  if (isMove(was)) events_.notMigrated(record.id, failure);
  if (resumed) events_.notResumed(record.id, failure);
}

// Orders that went over a connection that is no more: their answers do not come, and what the server had not
// read of them it will not read.
void Pool::disconnected(const std::string& server) {
  for (const Id& id : std::set<Id>(leases_.on(server))) {
    LeaseRecord& record = leases_.at(id);
    record.ordered.erase(server);
    orderLost(record, server);
    record.hindrances.erase(server);
    record.protection.erase(server);
    if (!record.isPlacedOn(server)) continue;
    record.unheard = false;
    record.turn.reset();
    record.settleOrder = 0;
  }
}

void Pool::orderLost(LeaseRecord& record, const std::string& server) {
  const Change change = record.change;
  const bool suspends =
      change == Change::suspending || change == Change::resuming || change == Change::goingBack;
  const bool moves =
      change == Change::preparing || change == Change::migrating || change == Change::returning;
  const bool copies = change == Change::copying;
  if ((!suspends && !moves && !copies) || record.orderedAt != server) return;
  const std::string lost = "lost the connection to server " + server;
  endChange(record,
            {Failure::Kind::serverLost,
             lost + (suspends ? "; what the lease is now, `gpupool leases` shows when the server is back"
                     : copies ? "; whether the checkpoint is written, its folder shows"
                              : "; whether its sessions have moved is not known")});
}

// What a beat says of a lease that its server holds: it is suspended, or (null) it is not.
void Pool::compareSuspended(LeaseRecord& record, const SuspendedLease* reported, uint64_t now) {
  if (record.change != Change::none) return;  // the beat may be older than what is under way
  Placement& placement = record.primary();
  if (reported == nullptr) {
    record.unheard = false;
    if (record.hold && record.runs())
      return sendRestore(record);  // it is restored, or about to be: this order says which
    if (placement.kept.empty()) {
      if (record.noticeEndsMs == 0) record.preemptor = {};  // the order has not reached it
      return;
    }
    GPUPOOL_WARNING(
        "lease %s is suspended, but its server %s says that it runs: its memory is reserved again",
        record.id.text().c_str(), record.server().name.c_str());
    placement.kept.clear();
    if (record.state != LeaseState::suspended) return;
    record.reason.clear();
    record.preemptor = {};
    record.ranSinceMs = now;
    setState(record, LeaseState::active);
    // Should the store refuse it, the server will say it again to a restarted manager.
    write({{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}},
          {entryOf(AuditEvent::resumed, record, "", "its server says that it runs")},
          [](const std::string&) {});
    return;
  }
  if (record.state == LeaseState::active) {
    // An order to resume it that the server has not read yet would be carried out when its memory is gone.
    if (record.unheard) return record.hold ? sendRestore(record) : sendResume(record);
    GPUPOOL_INFO("server %s says that lease %s is suspended", record.server().name.c_str(),
                 record.id.text().c_str());
    record.changedBy.clear();
    // Whoever ordered it has not heard that it was done; if it was the pool, a program must not wait for
    // ever.
    if (record.preemptor != Id{})
      record.idleReason = preemptText(record);
    else if (record.terms.idleMs != 0 && !reported->held)
      record.idleReason = "it was idle";
    return storeSuspended(record, {reported->kept, 0, 0, 0, reported->held}, now);
  }
  if (record.state != LeaseState::suspended) return;
  const auto kept = checkedKept(placement, reported->kept);
  for (size_t i = 0; i < kept.size(); ++i) placement.kept[i] = std::max(placement.kept[i], kept[i]);
}

}  // namespace gpupool::pool
