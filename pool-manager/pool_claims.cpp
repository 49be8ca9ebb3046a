// Claims (claims.h): who uses them, and until when they are kept.
#include <algorithm>
#include <stdexcept>

#include "pool-manager/claims.h"
#include "pool-manager/pool.h"
#include "pool-manager/roles.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostAdopters = 1024;  // of one claim
constexpr size_t kMostHolder = 160;

}  // namespace

uint64_t leftBy(const LeaseRecord& record) {
  uint64_t last = 0;
  for (const auto& [id, one] : record.adoptions) last = std::max(last, one.untilMs + record.ttlMs);
  return last;
}

void Pool::nameClaim(const Principal& who, LeaseRequest& request) const {
  if (!request.job.empty()) request.id = claimId(checked(who, request).tenant, request.job);
}

Id Pool::claimNamed(const Principal& who, const std::string& tenant, const std::string& name) const {
  if (const auto id = Id::parse(name)) return *id;
  if (name.find(':') == std::string::npos)
    throw std::invalid_argument("'" + printable(name, 64) +
                                "' names no claim: name its id, 32 hexadecimal digits, or its job");
  checkJob(name);
  if (!tenant.empty() && !who.owns(tenant))
    throw std::invalid_argument("tenant '" + who.tenant + "' names its own claims alone");
  const std::string& owner = who.role != Role::user && !tenant.empty() ? tenant : who.tenant;
  if (submittedAt(name) == 0) {
    for (const Id& id : leases_.of(owner))
      if (const LeaseRecord& record = leases_.all().at(id); record.runs() && numberOf(record.job) == name)
        return id;
    for (const Waiter& waiter : waiters_)
      if (!waiter.resumes && waiter.request.tenant == owner && numberOf(waiter.request.job) == name)
        return waiter.request.id;
  }
  return claimId(owner, name);
}

// request: checked. The answer comes now, or when the claim's server has said that it has it.
void Pool::adopt(const Principal& who, const LeaseRequest& request, uint64_t now) {
  const auto refuse = [&](const std::string& why) {
    events_.failed(request.id, {Failure::Kind::refused, why});
  };
  Id id;
  try {
    id = claimNamed(who, request.tenant, request.adopts);
    demandOwner(who, id);
  } catch (const std::invalid_argument& error) {
    return refuse(error.what());
  }
  const std::string name = "claim " + printable(request.adopts, 96);
  const auto at = leases_.find(id);
  if (at == leases_.end() || isEnd(at->second.state)) {
    const bool waits = std::any_of(waiters_.begin(), waiters_.end(),
                                   [&](const Waiter& one) { return one.request.id == id && !one.resumes; });
    const auto dead = tombstones_.find(id);
    return refuse(waits                       ? name + " has no GPUs yet: it waits for them"
                  : dead != tombstones_.end() ? name + " has ended: " + dead->second.reason
                                              : "there is no " + name + ", or it has ended");
  }
  LeaseRecord& claim = at->second;
  if (claim.job.empty()) return refuse("lease " + id.text() + " is no claim, and has a holder of its own");
  if (!claim.runs()) return refuse(name + " is ending: " + claim.reason);
  if (claim.hold)
    return refuse(name + " is held in files, " + claim.hold->held.folder +
                  "; gpupool restore brings it back");
  if (claim.adoptions.size() >= kMostAdopters && !claim.adoptions.contains(request.id))
    return refuse(name + " is used by too many programs");
  const bool isNew = !claim.adoptions.contains(request.id);
  Adopter adopter{request.id, request.holder, request.ttlMs, {}, request.process};
  if (request.client.rowsHash != 0) adopter.clients.push_back(request.client);
  hold(claim, adopter, now);
  claim.adoptions.at(request.id).answered = false;
  if (isNew)
    write({}, {entryOf(AuditEvent::adopted, claim, who.text(), request.holder)}, [](const std::string&) {});
  answerAdopters(claim);
}

// From now on for its TTL, which is returned.
uint32_t Pool::hold(LeaseRecord& claim, const Adopter& adopter, uint64_t now) {
  Adoption& adoption = claim.adoptions.try_emplace(adopter.id, Adoption{adopter, 0, true}).first->second;
  auto clients = adopter.clients.empty() ? adoption.adopter.clients : adopter.clients;
  adoption.adopter = adopter;
  adoption.adopter.clients = std::move(clients);
  adoption.adopter.holder = printable(adopter.holder, kMostHolder);
  // Not more than the claim's: a manager that was started again waits so long for its adopters.
  adoption.adopter.ttlMs = std::clamp(adopter.ttlMs, std::min(times_.minTtlMs, claim.ttlMs), claim.ttlMs);
  adoption.untilMs = now + adoption.adopter.ttlMs;
  claim.deadlineMs = leftBy(claim);
  storeClients(claim);
  return adoption.adopter.ttlMs;
}

void Pool::unhold(LeaseRecord& claim, const Id& adopter, const std::string& by, const std::string& reason,
                  uint64_t now) {
  auto gone = claim.adoptions.extract(adopter);
  if (gone.empty()) return;
  claim.deadlineMs = std::max(leftBy(claim), now + claim.ttlMs);
  write({}, {entryOf(AuditEvent::left, claim, by, gone.mapped().adopter.holder + ": " + reason)},
        [](const std::string&) {});
}

void Pool::leave(const Principal& who, const Id& claim, const Id& adopter, uint64_t now) {
  latestMs_ = now;
  demandOwner(who, claim);
  const auto at = leases_.find(claim);
  if (at != leases_.end() && at->second.runs()) unhold(at->second, adopter, who.text(), "it has ended", now);
}

// Those that wait for the claim's server, or for nothing any more.
void Pool::answerAdopters(LeaseRecord& claim) {
  for (auto& [id, one] : claim.adoptions) {
    if (one.answered || (claim.runs() && claim.state == LeaseState::granting)) continue;
    one.answered = true;
    if (!claim.runs()) {
      events_.failed(id, {Failure::Kind::refused, "the claim has ended: " + claim.reason});
      continue;
    }
    Lease lease = tell(claim);
    lease.ttlMs = one.adopter.ttlMs;
    events_.adopted(id, lease);
  }
}

void Pool::checkAdopters(LeaseRecord& claim, uint64_t now) {
  if (claim.clientsUntilMs != 0 && now > claim.clientsUntilMs) {
    claim.clientsUntilMs = 0;
    claim.clients.clear();
  }
  if (claim.adoptions.empty()) return;
  answerAdopters(claim);
  if (!claim.runs()) return;
  std::vector<std::pair<Id, std::string>> gone;
  for (const auto& [id, one] : claim.adoptions) {
    if (!one.answered && !events_.wanted(id))
      gone.emplace_back(id, "nobody waits for it any more");
    else if (now > one.untilMs + times_.driftMs)
      gone.emplace_back(id, "it has not renewed the claim for " + age(one.adopter.ttlMs));
    else if (one.adopter.process.pid != 0 && hasEnded(one.adopter.process))
      gone.emplace_back(id, "it was killed");
  }
  for (const auto& [id, why] : gone) unhold(claim, id, "", why, now);
}

}  // namespace gpupool::pool
