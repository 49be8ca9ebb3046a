#include "pool-manager/pool.h"

#include <algorithm>
#include <stdexcept>

#include "base/log.h"
#include "pool-manager/roles.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kSettleMs = 10'000;  // after its restart a manager's servers are back within this
constexpr uint64_t kForgetServerMs = 3'600'000, kLookAtServersMs = 10'000;
constexpr uint64_t kChargeMs = 1000, kWriteUsageMs = 60'000;
constexpr size_t kLeasesOfTick = 1000, kTicksForAll = 10;

// Of a lease that is not suspended.
uint64_t knownKept(const LeaseRecord& record, size_t device) {
  if (record.turn && !record.turn->kept.empty()) return record.turn->kept.at(device);
  return record.suspension.kept.empty() ? 0 : record.suspension.kept.at(device);  // when it was the last time
}

// On all of the servers where its sessions may be, each once. One that it has left may still say what it knew
// of them.
std::vector<std::string> saidOf(const LeaseRecord& record,
                                const std::map<std::string, std::vector<std::string>>& byServer) {
  std::vector<std::string> all;
  for (const auto& [server, reasons] : byServer) {
    const bool isThere =
        std::any_of(record.placements.begin(), record.placements.end(), [&](const auto& one) {
          return one.server.name == server && one.role != PlacementRole::left && !one.gone;
        });
    for (const std::string& reason : reasons)
      if (isThere && std::find(all.begin(), all.end(), reason) == all.end()) all.push_back(reason);
  }
  return all;
}

}  // namespace

Claim claimOf(const LeaseRecord& record, const Placement& placement, size_t device, bool whole) {
  Claim claim{placement.devices[device], 0, record.terms.sharePercent, false};
  claim.suspended = !whole && !placement.kept.empty();
  if (!placement.kept.empty())
    claim.kept = placement.kept.at(device);
  else if (placement.role == PlacementRole::primary)
    claim.kept = knownKept(record, device);
  return claim;
}

std::vector<uint64_t> checkedKept(const Placement& placement, std::vector<uint64_t> kept) {
  kept.resize(placement.devices.size(), ~uint64_t{0});
  for (size_t i = 0; i < kept.size(); ++i) kept[i] = std::min(kept[i], reservedBytes(placement.devices[i]));
  return kept;
}

Placement* livesBeside(LeaseRecord& record, const std::string& server) {
  const bool told = record.change != Change::placing;  // the target's server, that is
  for (Placement& one : record.placements)
    if (!one.gone && one.server.name != server &&
        (one.role == PlacementRole::primary || (one.role == PlacementRole::target && told)))
      return &one;
  return nullptr;
}

bool anyGone(const LeaseRecord& record) {
  return std::any_of(record.placements.begin(), record.placements.end(),
                     [](const Placement& one) { return one.gone; });
}

StoredLease toStore(const LeaseRecord& record) {
  StoredLease stored = record;
  if (record.change != Change::storing) return stored;
  if (record.suspension.held) {
    stored.holdIn(record.suspension.held);
    return stored;
  }
  stored.state = LeaseState::suspended;
  stored.primary().kept = record.suspension.kept;
  stored.reason = record.idleReason;
  stored.suspendedBy = record.changedBy;
  return stored;
}

std::string age(uint64_t ms) {
  if (ms < 1000) return std::to_string(ms) + " ms";
  const uint64_t s = ms / 1000;
  if (s < 120) return std::to_string(s) + " s";
  if (s < 7200) return std::to_string(s / 60) + " min";
  return std::to_string(s / 3600) + " h";
}

Pool::Pool(Store& store, PoolEvents& events, const PoolTimes& times, const PoolStart& start)
    : events_(events),
      times_(times),
      bootId_(start.bootId),
      latestMs_(start.nowMs),
      usageWrittenMs_(start.nowMs),
      usage_(times.halfLifeMs, times.weights),
      audit_(times.auditEntries),
      journal_(store, start.mark, [this] { events_.superseded(); }) {
  load(store, start);
}

void Pool::load(Store& store, const PoolStart& start) {
  settledMs_ = journal_.used() ? start.nowMs + kSettleMs : start.nowMs;
  // Above what the store says, and above the calendar: the store may be an old copy, or a fresh one. Servers
  // that join say what they have seen: join().
  epoch_ = start.calendarS << 20;
  for (const Entry& entry : store.range(kEpochKey))
    if (entry.key == kEpochKey) epoch_ = std::max<uint64_t>(epoch_, std::stoull(entry.value));
  const uint64_t calendarMs = events_.calendarMs();
  stoodStillMs_ = events_.stoodStillMs();
  audit_.load(store.range(kAuditPrefix));
  serverLog_.load(audit_.entries());
  usage_.load(store.range(kUsagePrefix), start.nowMs, calendarMs);
  quotas_.load(store.range(kQuotaPrefix), store.range(kHoursPrefix));
  for (const Entry& entry : store.range(kLeasePrefix)) {
    LeaseRecord record{decodeLease(entry.value, bootId_)};
    if (record.endsAtMs != 0) record.endsMs = start.nowMs + timeLeftMs(record, start.nowMs + stoodStillMs_);
    // Its server says whether it has it.
    const bool moves = record.state == LeaseState::moving && record.target() != nullptr;
    if (record.state == LeaseState::active || (record.state == LeaseState::moving && !moves))
      record.state = LeaseState::granting;
    record.leftOver = record.state == LeaseState::granting && !record.hold;
    if (record.isPlaced()) record.suspension.kept = record.primary().kept;
    if (record.hold) record.suspension.held = record.hold->held;
    record.deadlineMs = start.nowMs + record.ttlMs;
    record.grantedMs = record.revokingMs = record.ranSinceMs = record.chargedMs = record.agedAtMs =
        start.nowMs;
    if (record.grantedAtMs != 0) record.agedMs = calendarMs - std::min(calendarMs, record.grantedAtMs);
    if (!record.standby.empty()) standbyFor_[record.standby].insert(record.id);
    epoch_ = std::max(epoch_, record.standbyEpoch);
    if (record.state == LeaseState::revoking) revoking_.insert(record.id);
    leases_[record.id] = std::move(record);
  }
  loadClients(store.range(kClientsPrefix), start.nowMs);
  for (const Entry& entry : store.range(kCordonPrefix))
    cordons_[entry.key.substr(kCordonPrefix.size())] = decodeCordon(entry.value);
  for (const Entry& entry : store.range(kEndedPrefix)) {
    if (const auto id = Id::parse(entry.key.substr(kEndedPrefix.size()))) bury(*id, entry.value, start.nowMs);
  }
}

void Pool::write(std::vector<Write> writes, std::vector<AuditEntry> entries, Journal::Done done) {
  std::vector<AuditLog::Pending> pending;
  for (AuditEntry& entry : entries) {
    entry.timeMs = events_.calendarMs();
    pending.push_back(audit_.write(std::move(entry), writes));
  }
  journal_.write(std::move(writes), [this, pending = std::move(pending),
                                     done = std::move(done)](const std::string& why) mutable {
    if (why.empty())
      for (AuditLog::Pending& one : pending) audit_.accepted(std::move(one));
    done(why);
  });
}

AuditEntry Pool::entryOf(AuditEvent event, const StoredLease& lease, const std::string& by,
                         const std::string& reason) const {
  AuditEntry entry;
  entry.event = event;
  entry.lease = lease.id;
  if (lease.isPlaced() || lease.hold)
    entry.server = describe(lease.isPlaced() ? lease.primary() : lease.hold->was);
  entry.tenant = lease.tenant;
  entry.holder = lease.holder;
  entry.by = by.empty() ? "the manager" : by;
  entry.reason = reason;
  return entry;
}

std::vector<AuditEntry> Pool::audit(const Principal& who, const AuditQuery& query, size_t most) const {
  std::vector<AuditEntry> found;
  const uint64_t nowMs = events_.calendarMs();
  const uint64_t fromMs = query.sinceMs == 0 ? 0 : nowMs - std::min(nowMs, query.sinceMs);
  for (auto at = audit_.after(query.after); at != audit_.entries().end() && found.size() != most; ++at) {
    const AuditEntry& entry = *at;
    if (entry.timeMs < fromMs) continue;
    if (!query.lease.empty() && !entry.lease.text().starts_with(query.lease)) continue;
    const bool ofTenant = entry.lease == Id{} && entry.server.empty();
    if (ofTenant && !who.owns(entry.tenant)) continue;
    AuditEntry& shown = found.emplace_back(entry);
    if (entry.lease == Id{} || who.owns(entry.tenant)) continue;
    shown.holder = "in use";
    shown.tenant = shown.by = shown.reason = "";
  }
  return found;
}

// What its holder is told.
Lease Pool::tell(const LeaseRecord& record) const {
  Lease lease = wireLease(record);
  lease.reason = record.purpose;
  if (record.endsMs != kNever)
    lease.endsInMs = std::max<uint64_t>(1, record.endsMs - std::min(record.endsMs, latestMs_));
  lease.standby = standbyOf(record);
  lease.standbyEpoch = record.standbyEpoch;
  return lease;
}

void Pool::writeUsage(uint64_t now) {
  if (now < usageWrittenMs_ + kWriteUsageMs) return;
  usageWrittenMs_ = now;
  auto writes = usage_.changes(now, events_.calendarMs());
  for (Write& one : quotas_.changes(events_.calendarMs() / 1000)) writes.push_back(std::move(one));
  // What the store refuses is written anew with what follows it.
  if (!writes.empty()) journal_.write(std::move(writes), [](const std::string&) {});
}

void Pool::setState(LeaseRecord& record, LeaseState to) {
  if (!mayFollow(record.state, to))
    throw std::logic_error("a lease cannot go from " + std::string(name(record.state)) + " to " +
                           std::string(name(to)));
  charge(record, latestMs_);
  record.state = to;
  record.leftOver = false;
  noVictims_.clear();  // this one may be preempted now
  leases_.touch(record);
  if (to == LeaseState::revoking)
    revoking_.insert(record.id);
  else
    revoking_.erase(record.id);
  if (const auto named = standbyFor_.find(record.standby); named != standbyFor_.end() && !record.runs())
    named->second.erase(record.id);
}

void Pool::demandOwner(const Principal& who, const Id& id) const {
  const std::string* tenant = nullptr;
  if (const auto at = leases_.find(id); at != leases_.end()) tenant = &at->second.tenant;
  for (const Waiter& waiter : waiters_)
    if (waiter.request.id == id && !waiter.resumes) tenant = &waiter.request.tenant;
  if (!who.mayLease()) throw std::invalid_argument(refusalOf(who, Operation::lease));
  if (tenant != nullptr && !who.owns(*tenant)) throw std::invalid_argument("that lease is another tenant's");
}

void Pool::tick(uint64_t now) {
  latestMs_ = now;
  gone_.clear();
  countStandstill();
  tickLeases(now);
  forgetTombstones(now);
  writeUsage(now);
  forgetServers(now);
  tickServerLog(now);
  serveWaiters(now);
}

void Pool::forgetServers(uint64_t now) {
  if (now < forgotServersMs_ + kLookAtServersMs) return;
  forgotServersMs_ = now;
  serverLog_.forget(now, kForgetServerMs);
  std::erase_if(servers_, [&](const auto& one) {
    const bool forgotten = !one.second.connected && now > one.second.beatMs + kForgetServerMs;
    if (forgotten) inventory_.touch(one.first);
    return forgotten;
  });
}

// A part of a large pool's leases in each tick, and so all of them in a second: requests wait for a tick.
void Pool::tickLeases(uint64_t now) {
  auto& leases = leases_.quietly();  // setState() marks those that change
  const size_t count = std::min(leases.size(), std::max(kLeasesOfTick, leases.size() / kTicksForAll + 1));
  auto at = leases.upper_bound(visited_);
  for (size_t i = 0; i < count; ++i, ++at) {
    if (at == leases.end()) at = leases.begin();
    LeaseRecord& record = at->second;
    checkAdopters(record, now);
    expire(record, now);
    storeAgain(record, now);
    storePlacementsAgain(record, now);
    tickPreempted(record, now);
    lookAtStandby(record, now);
    if (now >= record.chargedMs + kChargeMs) charge(record, now);
    visited_ = at->first;
  }
}

// --- for people

std::vector<Lease> Pool::list(const Principal& who, uint64_t now) const {
  std::vector<Lease> list;
  for (const auto& [id, record] : leases_) {
    Lease& lease = list.emplace_back(wireLease(record));
    lease.key.clear();
    lease.ageMs = record.ageMs(now);
    if (record.state == LeaseState::held) {
      lease.server = {};
      lease.devices.clear();
    } else {
      lease.held = {};
    }
    lease.reason = record.purpose;
    if (record.endsMs != kNever)
      lease.endsInMs = std::max<uint64_t>(1, record.endsMs - std::min(record.endsMs, now));
    lease.state = name(record.state);
    lease.why = whyText(record, now);
    if (record.idleAtMs != 0 && record.runs())
      lease.idleMs = static_cast<int64_t>(record.idleMs + now - std::min(now, record.idleAtMs));
    if (record.state == LeaseState::active) lease.turn = record.turn;
    if (record.target() != nullptr) lease.movesTo = describe(*record.target());
    lease.hindrances = saidOf(record, record.hindrances);
    lease.protection = saidOf(record, record.protection);
    if (const std::string text = standbyText(record); !text.empty()) lease.protection.push_back(text);
    lease.standby = standbyOf(record);
    lease.job = record.job;
    for (const auto& [adopter, one] : record.adoptions) lease.adopters.push_back(one.adopter.holder);
    if (who.owns(record.tenant)) continue;
    lease.hindrances.clear();
    lease.protection.clear();
    lease.standby.reset();
    lease.why.clear();
    lease.idleMs = -1;
    lease.job.clear();
    lease.adopters.clear();
    if (lease.turn) lease.turn->note.clear();
    lease.holder = kInUse;
    lease.held = {};
    lease.tenant.clear();
    lease.reason.clear();
  }
  return list;
}

const std::string* Pool::fingerprintOf(const Id& id) const {
  if (const auto at = leases_.find(id); at != leases_.end()) return &at->second.fingerprint;
  for (const Waiter& waiter : waiters_)
    if (waiter.request.id == id && !waiter.resumes) return &waiter.request.fingerprint;
  return nullptr;
}

const std::string* Pool::endedBecause(const Id& id) const {
  const auto dead = tombstones_.find(id);
  return dead == tombstones_.end() ? nullptr : &dead->second.reason;
}

// "" for what `who` may not know.
std::string Pool::describeHolder(const LeaseRecord& record, const Principal& who, uint64_t now) const {
  if (!who.owns(record.tenant)) return "";
  std::string text = record.holder.empty() ? "lease " + record.id.text() : record.holder;
  text += " (" + (record.tenant.empty() ? "" : "tenant " + record.tenant + ", ") + age(record.ageMs(now));
  if (record.state == LeaseState::revoking) text += ", ending";
  if (const std::string others = lentTo(record, now); !others.empty())
    text += ": memory of it is in use by " + others;
  if (record.state == LeaseState::suspended) text += ", suspended";
  if (record.state == LeaseState::moving) text += ", moving";
  if (record.runs() && record.hold) text += ", being restored";
  if (record.runs() && now < record.preemptNotBeforeMs && !record.notice.empty())
    text += ", could not be suspended for a request of a higher class: " + record.notice;
  if (record.state == LeaseState::lost) text += ", ended; its server has not said that nothing of it runs";
  return text + ")";
}

}  // namespace gpupool::pool
