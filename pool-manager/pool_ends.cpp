// How leases begin and end on their servers, and in the store.
#include <algorithm>

#include "base/log.h"
#include "pool-manager/pool.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kRetryMs = 1000;     // an end that the store refused is tried again after this
constexpr size_t kMostForgotten = 256;  // tombstones at once

}  // namespace

void Pool::sendGrant(LeaseRecord& record) {
  const auto server = servers_.find(record.server().name);
  // Its deadline takes it from here, or the first beat of another process of its server.
  if (server == servers_.end() || !server->second.connected || ofEarlierLife(record)) return;
  record.ordered = true;
  events_.grant(wireLease(record));
}

void Pool::granted(const Id& id, uint64_t now) {
  latestMs_ = now;
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::granting) return;
  LeaseRecord& record = at->second;
  setState(record, LeaseState::active);
  record.ordered = false;
  record.deadlineMs = now + record.ttlMs;
  record.grantedMs = now;
  events_.granted(wireLease(record));
}

void Pool::grantFailed(const Id& id, const std::string& why, bool refused, uint64_t now) {
  latestMs_ = now;
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::granting) return;
  const std::string server = at->second.server().name;
  if (const auto known = servers_.find(server); known != servers_.end()) known->second.suspect = why;
  at->second.ordered = false;
  events_.failed(id, {Failure::Kind::serverLost, "server " + server + " did not take the lease: " + why});
  // Also where it was refused: the server may be ending that very lease, by order of this manager's earlier
  // life.
  startRevoke(at->second, LeaseState::lost,
              "server " + server + (refused ? " refused it: " : " did not answer: ") + why, now);
}

// From here on nobody can use it. The write only saves a restarted manager from waiting for its holder.
void Pool::startRevoke(LeaseRecord& record, LeaseState as, const std::string& reason, uint64_t now) {
  if (record.unborn) return end(record.id, as, reason, now);  // no server has heard of it
  endChange(record, {Failure::Kind::refused, "the lease has ended: " + reason});
  setState(record, LeaseState::revoking);
  record.ending = as;
  record.reason = reason;
  record.revokingMs = now;
  record.ordered = false;
  journal_.write({{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}},
                 [](const std::string&) {});
  sendRevoke(record);
}

void Pool::sendRevoke(LeaseRecord& record) {
  const auto server = servers_.find(record.server().name);
  if (server == servers_.end() || !server->second.connected) return;
  record.ordered = true;
  events_.revoke(server->second.facts.life(), record.id, record.reason);
}

// After a lost store two servers may hold a lease of the same name: each answers for its own.
void Pool::revoked(const ServerLife& server, const Id& id, uint64_t now) {
  latestMs_ = now;
  const auto asked = servers_.find(server.name);
  if (asked != servers_.end() && asked->second.facts.life() == server) asked->second.strangers.erase(id);
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.server().life() != server) return serveWaiters(now);
  const bool ends = at->second.state == LeaseState::revoking || at->second.state == LeaseState::lost;
  if (ends && !ofEarlierLife(at->second)) end(id, at->second.ending, at->second.reason, now);
}

void Pool::revokeFailed(const ServerLife& server, const Id& id, uint64_t now) {
  latestMs_ = now;
  // The next beat, or the clock, takes it from here. Another process of the server may have been told since.
  const auto asked = servers_.find(server.name);
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.server().name != server.name) return;
  if (asked == servers_.end() || asked->second.facts.life() == server) at->second.ordered = false;
}

// Its server was started again: it knows nothing of the lease, but the workers that it finds.
bool Pool::ofEarlierLife(const LeaseRecord& record) const {
  const auto server = servers_.find(record.server().name);
  return server != servers_.end() && server->second.facts.incarnation != record.server().incarnation;
}

// Its server was started again, and its workers still run: over for its holder, and kept.
void Pool::outlive(LeaseRecord& record, const std::string& reason, uint64_t now) {
  answerEnded(record, reason);
  beginEnd(record, LeaseState::lost, reason, now);
  if (!isEnd(record.state)) close(record, now);
}

void Pool::answerEnded(const LeaseRecord& record, const std::string& reason) {
  if (record.state == LeaseState::granting)
    events_.failed(record.id, {Failure::Kind::serverLost, "the lease has ended: " + reason});
}

void Pool::beginEnd(LeaseRecord& record, LeaseState as, const std::string& reason, uint64_t now) {
  if (record.state == LeaseState::revoking || isEnd(record.state)) return;
  endChange(record, {Failure::Kind::refused, "the lease has ended: " + reason});
  setState(record, LeaseState::revoking);
  record.ending = as;
  record.reason = reason;
  record.revokingMs = now;
}

// Nothing of the lease runs: it is over as soon as the store has accepted that.
void Pool::end(const Id& id, LeaseState as, const std::string& reason, uint64_t now) {
  LeaseRecord& record = leases_.at(id);
  answerEnded(record, reason);
  beginEnd(record, as, reason, now);
  record.gone = true;
  close(record, now);
}

void Pool::close(LeaseRecord& record, uint64_t now) {
  if (record.closing) return;  // closed() looks again
  record.closing = true;
  record.triedMs = now;
  const std::string key = kLeasePrefix + record.id.text();
  std::vector<Write> writes;
  if (!isEnd(record.state)) writes.push_back({kEndedPrefix + record.id.text(), record.reason});
  if (record.gone) {
    writes.push_back({key, std::nullopt});
  } else {
    StoredLease lost = record;
    lost.state = LeaseState::lost;
    writes.push_back({key, encodeLease(lost, bootId_)});
  }
  journal_.write(std::move(writes), [this, id = record.id, forgotten = record.gone](const std::string& why) {
    closed(id, forgotten, why);
  });
}

void Pool::closed(const Id& id, bool forgotten, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end()) return;
  LeaseRecord& record = at->second;
  record.closing = false;
  if (!why.empty()) return;  // tick() tries again
  if (!isEnd(record.state)) {
    setState(record, forgotten ? record.ending : LeaseState::lost);
    tombstones_[id] = {record.reason, latestMs_};
    events_.ended(id);
  }
  if (!forgotten && record.gone) return close(record, latestMs_);  // its server was heard of meanwhile
  if (forgotten) {
    leases_.erase(at);
    events_.ended(id);  // whoever dropped a lost one waits for it
  }
  serveWaiters(latestMs_);
}

void Pool::expire(LeaseRecord& record, uint64_t now) {
  const bool runs = record.state != LeaseState::revoking && !isEnd(record.state);
  if (runs && now > record.deadlineMs + times_.driftMs) {
    if (record.state == LeaseState::granting) {
      const std::string server = "server " + record.server().name;
      events_.failed(record.id, {Failure::Kind::serverLost, server + " does not answer"});
      startRevoke(record, LeaseState::lost, server + " did not answer", now);
    } else {
      startRevoke(record, LeaseState::expired, "its holder has not renewed it for " + age(record.ttlMs), now);
    }
  } else if (runs && record.process.pid != 0 && events_.hasEnded(record.process)) {
    startRevoke(record, LeaseState::expired,
                "its holder, process " + std::to_string(record.process.pid) + ", was killed", now);
  }
  const bool tooLate = record.state == LeaseState::revoking &&
                       now > std::max(record.deadlineMs, record.revokingMs) + times_.driftMs + times_.killMs;
  if ((record.gone || tooLate) && now >= record.triedMs + kRetryMs) close(record, now);
}

void Pool::forgetTombstones(uint64_t now) {
  if (forgetting_) return;
  std::vector<Write> writes;
  std::vector<Id> old;
  for (const auto& [id, tombstone] : tombstones_) {
    if (now < tombstone.endedMs + times_.tombstoneMs || leases_.contains(id)) continue;
    old.push_back(id);
    writes.push_back({kEndedPrefix + id.text(), std::nullopt});
    if (writes.size() == kMostForgotten) break;
  }
  if (writes.empty()) return;
  forgetting_ = true;
  journal_.write(std::move(writes), [this, old = std::move(old)](const std::string& why) {
    forgetting_ = false;
    if (!why.empty()) return;
    for (const Id& id : old) tombstones_.erase(id);
  });
}

}  // namespace gpupool::pool
