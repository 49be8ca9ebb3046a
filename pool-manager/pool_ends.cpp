// How leases begin and end on their servers, and in the store.
#include <algorithm>

#include "base/log.h"
#include "pool-manager/pool.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kRetryMs = 1000;     // an end that the store refused is tried again after this
constexpr size_t kMostForgotten = 256;  // tombstones at once
constexpr uint32_t kMostUnheardMs = 10'000, kHearMs = 1000;

bool allGone(const LeaseRecord& record) {
  return std::all_of(record.placements.begin(), record.placements.end(),
                     [](const Placement& one) { return one.gone; });
}

AuditEvent eventOf(LeaseState end) {
  return end == LeaseState::released  ? AuditEvent::released
         : end == LeaseState::expired ? AuditEvent::expired
         : end == LeaseState::revoked ? AuditEvent::revoked
                                      : AuditEvent::lost;
}

}  // namespace

void Pool::sendGrant(LeaseRecord& record) {
  const auto server = servers_.find(record.server().name);
  // Its deadline takes it from here, or the first beat of another process of its server.
  if (server == servers_.end() || !server->second.connected || ofEarlierLife(record.primary())) return;
  record.ordered.insert(record.server().name);
  events_.grant(wireLease(record));
}

void Pool::granted(const Id& id, uint64_t now) {
  latestMs_ = now;
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::granting) return;
  LeaseRecord& record = at->second;
  setState(record, LeaseState::active);
  record.ordered.erase(record.server().name);
  record.deadlineMs = std::max(record.deadlineMs, now + record.ttlMs);
  record.grantedMs = record.ranSinceMs = now;
  if (record.hold) return sendRestore(record);
  tellStandby(record);
  events_.granted(tell(record));
}

void Pool::grantFailed(const Id& id, const std::string& why, bool refused, uint64_t now) {
  latestMs_ = now;
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::granting) return;
  const std::string server = at->second.server().name;
  if (const auto known = servers_.find(server); known != servers_.end()) known->second.suspect = why;
  inventory_.touch(server);
  at->second.ordered.erase(server);
  if (at->second.hold)
    return stayHeld(at->second,
                    {Failure::Kind::serverLost, "server " + server + " did not take the lease: " + why});
  events_.failed(id, {Failure::Kind::serverLost, "server " + server + " did not take the lease: " + why});
  // Also where it was refused: the server may be ending that very lease, by order of this manager's earlier
  // life.
  startRevoke(at->second, LeaseState::lost,
              "server " + server + (refused ? " refused it: " : " did not answer: ") + why, now);
}

// From here on nobody can use it. The write only saves a restarted manager from waiting for its holder.
void Pool::startRevoke(LeaseRecord& record, LeaseState as, const std::string& reason, uint64_t now,
                       const std::string& by) {
  record.endedBy = by;
  if (record.unborn) return end(record.id, as, reason, now);  // no server has heard of it
  endChange(record, {Failure::Kind::refused, "the lease has ended: " + reason});
  setState(record, LeaseState::revoking);
  record.forget({});  // a held one may have left a server that has not confirmed it
  record.ending = as;
  record.reason = reason;
  record.revokingMs = now;
  record.ordered.clear();
  journal_.write({{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}},
                 [](const std::string&) {});
  for (const Placement& placement : record.placements)
    if (!placement.gone && !record.ordered.contains(placement.server.name))
      sendRevoke(record, placement.server.name, reason);
  close(record, now);  // if nobody has to be told
}

void Pool::sendRevoke(LeaseRecord& record, const std::string& name, const std::string& reason) {
  const auto server = servers_.find(name);
  if (server == servers_.end() || !server->second.connected) return;
  record.ordered.insert(name);
  events_.revoke(server->second.facts.life(), record.id, reason);
}

// After a lost store two servers may hold a lease of the same name: each answers for its own.
void Pool::revoked(const ServerLife& server, const Id& id, uint64_t now) {
  latestMs_ = now;
  const auto asked = servers_.find(server.name);
  if (asked != servers_.end() && asked->second.facts.life() == server) asked->second.strangers.erase(id);
  inventory_.touch(server.name);
  const auto at = leases_.find(id);
  const Placement* there = at == leases_.end() ? nullptr : at->second.on(server.name);
  if (there == nullptr || there->server.life() != server) return serveWaiters(now);
  LeaseRecord& record = at->second;
  const bool hasLeft = there->role == PlacementRole::left && !record.isPlacedOn(server.name);
  if ((record.runs() && !hasLeft) || ofEarlierLife(*there)) return;
  record.ordered.erase(server.name);
  vacate(id, server.name, record.reason, now);
}

void Pool::revokeFailed(const ServerLife& server, const Id& id, uint64_t now) {
  latestMs_ = now;
  // The next beat, or the clock, takes it from here. Another process of the server may have been told since.
  const auto asked = servers_.find(server.name);
  const auto at = leases_.find(id);
  if (at == leases_.end()) return;
  if (asked == servers_.end() || asked->second.facts.life() == server) at->second.ordered.erase(server.name);
}

// Its server was started again: it knows nothing of the lease, but the workers that it finds.
bool Pool::ofEarlierLife(const Placement& placement) const {
  const auto server = servers_.find(placement.server.name);
  return server != servers_.end() && server->second.facts.incarnation != placement.server.incarnation;
}

// That server was started again, and its workers still run: over for its holder, and kept; but if the lease
// is elsewhere, too, it goes on, and what it has here is kept until nothing of it runs any more.
void Pool::outlive(LeaseRecord& record, const std::string& server, const std::string& reason, uint64_t now) {
  if (record.runs() && livesBeside(record, server) != nullptr) return;
  if (isBeingHeld(record)) return;
  if (leavesForHolder(record, server, reason)) return;
  if (record.runs() && record.hold) {
    if (record.isPlacedOn(server)) stayHeld(record, {Failure::Kind::serverLost, reason});
    return;
  }
  answerEnded(record, reason);
  beginEnd(record, LeaseState::lost, reason, now);
  if (!isEnd(record.state)) close(record, now, true);
}

void Pool::answerEnded(const LeaseRecord& record, const std::string& reason) {
  if (record.state == LeaseState::granting)
    events_.failed(record.id, {Failure::Kind::serverLost, "the lease has ended: " + reason});
}

void Pool::beginEnd(LeaseRecord& record, LeaseState as, const std::string& reason, uint64_t now) {
  if (record.state == LeaseState::revoking || isEnd(record.state)) return;
  endChange(record, {Failure::Kind::refused, "the lease has ended: " + reason});
  setState(record, LeaseState::revoking);
  record.forget({});
  record.ending = as;
  record.reason = reason;
  record.revokingMs = now;
}

// Nothing of the lease runs: it is over as soon as the store has accepted that.
void Pool::end(const Id& id, LeaseState as, const std::string& reason, uint64_t now) {
  LeaseRecord& record = leases_.at(id);
  for (Placement& placement : record.placements) placement.gone = true;
  answerEnded(record, reason);
  beginEnd(record, as, reason, now);
  close(record, now);
}

// Nothing of the lease runs on that server, or will. It lives on where it is besides; else it is over.
void Pool::vacate(const Id& id, const std::string& server, const std::string& reason, uint64_t now) {
  LeaseRecord& record = leases_.at(id);
  bool lived = false;
  for (Placement& placement : record.placements) {
    if (placement.server.name != server) continue;
    placement.gone = true;
    lived = lived || placement.role != PlacementRole::left;
  }
  if (isBeingHeld(record)) return;  // storedSuspended() goes on
  if (leavesForHolder(record, server, reason)) return;
  if (record.runs() && record.hold)
    return lived ? stayHeld(record, {Failure::Kind::serverLost, reason}) : storePlacements(record);
  if (record.runs() && livesBeside(record, server) != nullptr)
    return lived ? abandon(record, server, reason) : storePlacements(record);
  if (record.runs() && !allGone(record)) {  // what it has left elsewhere has to be confirmed still
    answerEnded(record, reason);
    return startRevoke(record, LeaseState::lost, reason, now);
  }
  answerEnded(record, reason);
  beginEnd(record, LeaseState::lost, reason, now);
  close(record, now);
}

// It was to end, and a server does not confirm it.
std::string Pool::lostReason(const LeaseRecord& record, uint64_t now) const {
  std::string servers;
  for (const Placement& placement : record.placements) {
    if (placement.gone) continue;
    const auto at = servers_.find(placement.server.name);
    const bool gone = at == servers_.end() || !alive(at->second, now);
    servers += (servers.empty() ? "" : ", and ") + ("its server " + placement.server.name) +
               (gone ? " is gone" : " does not say that it has ended");
  }
  const std::string by = record.endedBy.empty() ? "" : " (" + record.endedBy + ")";
  return servers + "; it was to end: " + record.reason + by;
}

// Writes what is left of it: nothing, or, given up or lost before, where something of it may run still.
void Pool::close(LeaseRecord& record, uint64_t now, bool givenUp) {
  if (record.closing) return;  // closed() looks again
  StoredLease lost = record;
  const std::set<uint64_t> gone = record.goneEpochs();
  lost.forget(gone);
  lost.state = LeaseState::lost;
  const bool forgotten = lost.placements.empty();
  if (!forgotten && !givenUp && !isEnd(record.state)) return;  // its other server has not answered yet
  if (!forgotten && !isEnd(record.state) && record.ending != LeaseState::lost)
    lost.reason = lostReason(record, now);
  record.closing = true;
  record.triedMs = now;
  const std::string key = kLeasePrefix + record.id.text();
  std::vector<Write> writes;
  std::vector<AuditEntry> entries;
  if (!isEnd(record.state)) {
    if (!record.stillborn) writes.push_back({kEndedPrefix + record.id.text(), lost.reason});
    entries.push_back(forgotten ? entryOf(eventOf(record.ending), record, record.endedBy, record.reason)
                                : entryOf(AuditEvent::lost, record, "", lost.reason));
  } else if (forgotten && !record.droppedBy.empty()) {
    entries.push_back(
        entryOf(AuditEvent::released, record, record.droppedBy, "dropped, lost: " + record.reason));
  }
  writes.push_back({key, forgotten ? std::nullopt : std::optional(encodeLease(lost, bootId_))});
  if (forgotten && record.clientsInStore) writes.push_back({kClientsPrefix + record.id.text(), std::nullopt});
  write(std::move(writes), std::move(entries),
        [this, id = record.id, gone, forgotten, reason = lost.reason](const std::string& why) {
          closed(id, gone, forgotten, reason, why);
        });
}

void Pool::closed(const Id& id, const std::set<uint64_t>& gone, bool forgotten, const std::string& reason,
                  const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end()) return;
  LeaseRecord& record = at->second;
  record.closing = false;
  if (!why.empty()) return;  // tick() tries again
  if (!isEnd(record.state)) {
    setState(record, forgotten ? record.ending : LeaseState::lost);
    record.reason = reason;
    if (!record.stillborn) bury(id, record.reason, latestMs_);
    events_.ended(id);
  }
  answerAdopters(record);
  if (forgotten) {
    leases_.erase(at);
    events_.ended(id);  // whoever dropped a lost one waits for it
  } else {
    record.forget(gone);
    if (anyGone(record)) return close(record, latestMs_);  // its server was heard of meanwhile
  }
  serveWaiters(latestMs_);
}

void Pool::expire(LeaseRecord& record, uint64_t now) {
  const bool runs = record.runs();
  if (runs && now > record.deadlineMs + times_.driftMs) {
    if (record.state == LeaseState::granting && !record.hold) {
      const std::string server = "server " + record.server().name;
      events_.failed(record.id, {Failure::Kind::serverLost, server + " does not answer"});
      startRevoke(record, LeaseState::lost, server + " did not answer", now);
    } else {
      startRevoke(record, LeaseState::expired,
                  record.job.empty() ? "its holder has not renewed it for " + age(record.ttlMs)
                                     : "no program has used the claim for " + age(record.ttlMs),
                  now);
    }
  } else if (runs && now >= record.endsMs) {
    startRevoke(record, LeaseState::expired, "its time limit of " + age(record.limitMs) + " is over", now);
  } else if (runs && record.process.pid != 0 && hasEnded(record.process)) {
    if (record.killedMs == 0) record.killedMs = now;
    if (now >= record.killedMs + times_.takeOverMs)
      startRevoke(record, LeaseState::expired,
                  "its holder, process " + std::to_string(record.process.pid) + ", was killed", now);
  }
  if (!lentTo(record, now).empty()) record.lentMs = now;
  const bool tooLate =
      record.state == LeaseState::revoking &&
      now > std::max({record.deadlineMs, record.revokingMs, record.lentMs}) + times_.driftMs + times_.killMs;
  if ((anyGone(record) || tooLate) && !record.runs() && now >= record.triedMs + kRetryMs)
    close(record, now, tooLate);
}

// Who of its tenant's other leases has memory of a lease that has been revoked, as a server says that answers
// still: until that is over the lease is neither at its end nor lost, and its tenant has its devices.
std::string Pool::lentTo(const LeaseRecord& record, uint64_t now) const {
  if (record.state != LeaseState::revoking) return "";
  for (const Placement& placement : record.placements) {
    const auto said = record.lentTo.find(placement.server.name);
    const auto server = servers_.find(placement.server.name);
    if (!placement.gone && said != record.lentTo.end() && server != servers_.end() &&
        alive(server->second, now) && server->second.facts.life() == placement.server.life())
      return said->second;
  }
  return "";
}

bool Pool::isLent(const Id& id) const {
  const auto at = leases_.find(id);
  return at != leases_.end() && !lentTo(at->second, latestMs_).empty();
}

// Of its time limit, when the manager starts. Somebody may have set the wall clock since its grant. So that
// counts only where the machine was started again, or is another one; and then a lease does not get more than
// its limit anew.
uint64_t Pool::timeLeftMs(const StoredLease& lease, uint64_t bootMs) const {
  const bool sameBoot = lease.endsAtBootMs != 0 && bootId_ != "unknown";
  const uint64_t end = sameBoot ? lease.endsAtBootMs : lease.endsAtMs;
  return std::min(lease.limitMs, end - std::min(end, sameBoot ? bootMs : events_.calendarMs()));
}

// The pool's clock stands still while the manager does, so that nobody loses a lease whose renewals it has
// not read. A time limit needs nobody's renewal, and goes on.
void Pool::countStandstill() {
  const uint64_t gapMs = events_.stoodStillMs() - stoodStillMs_;
  if (gapMs == 0) return;
  stoodStillMs_ += gapMs;
  for (auto& [id, record] : leases_)
    if (record.endsMs != kNever) record.endsMs -= std::min(record.endsMs, gapMs);
}

// One process may hold many leases: it is looked up once a tick.
bool Pool::hasEnded(const LocalProcess& process) {
  const auto [at, isNew] = gone_.try_emplace({process.pid, process.startTicks}, false);
  if (isNew) at->second = events_.hasEnded(process);
  return at->second;
}

// It was held in files when somebody else ended it: no server tells its programs, but its holder, which asks
// three times in the lease's time, and more often while a program waits.
std::optional<Pool::Unheard> Pool::unheardOf(const LeaseRecord& record, uint64_t now) {
  if (!record.runs() || !record.hold) return std::nullopt;
  return Unheard{record.process, now + std::min(record.ttlMs / 3, kMostUnheardMs) + kHearMs};
}

void Pool::noteUnheard(const Id& id, const Unheard& unheard, uint64_t now) {
  std::erase_if(unheard_, [now](const auto& one) { return now >= one.second.untilMs; });
  unheard_[id] = unheard;
}

bool Pool::hasHeard(const Id& id, uint64_t now) {
  const auto at = unheard_.find(id);
  if (at == unheard_.end()) return true;
  const auto& [process, untilMs] = at->second;
  if (now < untilMs && (process.pid == 0 || !events_.hasEnded(process))) return false;
  unheard_.erase(at);
  return true;
}

void Pool::bury(const Id& id, const std::string& reason, uint64_t now) {
  if (tombstones_.insert_or_assign(id, Tombstone{reason}).second) forgettable_.emplace_back(now, id);
}

void Pool::forgetTombstones(uint64_t now) {
  if (forgetting_) return;
  std::vector<Write> writes;
  while (writes.size() < std::min(kMostForgotten, forgettable_.size())) {
    const auto at = forgettable_.begin() + static_cast<std::ptrdiff_t>(writes.size());
    if (now < at->first + times_.tombstoneMs) break;
    const Id id = at->second;
    if (leases_.contains(id)) {  // a lost one
      forgettable_.erase(at);
      forgettable_.emplace_back(now, id);
      continue;
    }
    writes.push_back({kEndedPrefix + id.text(), std::nullopt});
  }
  if (writes.empty()) return;
  forgetting_ = true;
  const size_t count = writes.size();
  journal_.write(std::move(writes), [this, count](const std::string& why) {
    forgetting_ = false;
    if (!why.empty()) return;
    for (size_t i = 0; i < count; ++i, forgettable_.pop_front())
      tombstones_.erase(forgettable_.front().second);
  });
}

}  // namespace gpupool::pool
