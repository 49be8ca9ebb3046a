// Requests: the queue, placement, renewal and release.
#include <algorithm>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

#include "base/hmac.h"
#include "base/log.h"
#include "base/tokens.h"
#include "pool-manager/claims.h"
#include "pool-manager/pool.h"
#include "pool-manager/roles.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMaxWaiters = 4096;
constexpr size_t kMostUnknownReleased = 256;
constexpr uint64_t kPreemptingMs = 10'000;  // who does not wait, waits so long for leases that it preempts
constexpr uint64_t kEndingMs = 2000;        // a released lease's devices are free within this, almost always
constexpr char kByHand[] = "somebody has released it (gpupool release)";

constexpr size_t kMostHolder = 160;
constexpr uint64_t kMostLimitMs = uint64_t{366} * 86'400'000;
constexpr char kOtherVersion[] = "the manager runs another version of gpupool";

Wish wishOf(const LeaseRequest& request, Preemption preemption) {
  Wish wish{request.deviceCount,
            request.memoryBytes,
            request.server,
            request.turns.sharePercent,
            parseDeviceFilter(request.gpu),
            request.policy};
  wish.besideSuspended = preemption != Preemption::off;
  if (request.client.rowsHash != 0) wish.clients.push_back(request.client);
  return wish;
}

// Of a wish that can never be served.
Failure::Kind neverKind(const Wish& wish, std::span<const ServerUse> servers) {
  return servedByNone(wish, servers) ? Failure::Kind::otherVersion : Failure::Kind::nothingFits;
}

// Whether those of its servers that are there, with all devices that are in order, could serve it one day.
bool couldHere(const Wish& wish, std::vector<ServerUse> servers) {
  std::erase_if(servers, [](const ServerUse& server) { return server.cordoned || !server.unusable.empty(); });
  for (ServerUse& server : servers)
    std::erase_if(server.devices, [](const DeviceUse& device) { return !device.info.problem.empty(); });
  return couldEver(wish, servers);
}

}  // namespace

// As it is asked, within what it may be. Throws std::invalid_argument.
LeaseRequest Pool::checked(const Principal& who, const LeaseRequest& asked) const {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  LeaseRequest request = asked;
  request.holder = printable(request.holder, kMostHolder);
  if (request.tenant.size() > kMostTenantBytes)
    refuse("a tenant's name has at most " + std::to_string(kMostTenantBytes) + " bytes");
  if (request.reason.size() > kMostReason) refuse(kLongReason);
  if (request.memoryBytes != 0 && request.memoryBytes < kLeastMemory)
    refuse("a lease has at least 1 MiB of each GPU's memory, or whole GPUs");
  const bool named = who.role != Role::user && !request.tenant.empty();
  request.tenant = named ? printable(request.tenant, kMostTenantBytes) : who.tenant;
  request.ttlMs = std::clamp(request.ttlMs, times_.minTtlMs, times_.maxTtlMs);
  request.gpu = printable(request.gpu, request.gpu.size());
  request.reason = printable(request.reason, kMostReason);
  if (!request.job.empty()) {
    checkJob(request.job);
    if (!asked.tenant.empty() && !who.owns(printable(asked.tenant, kMostTenantBytes)))
      refuse("tenant '" + who.tenant +
             "' makes claims for itself alone: for others operators and schedulers do");
    request.process = {};  // who asks is not who uses it
    request.holder =
        printable("claim " + request.job + (asked.holder.empty() ? "" : " of " + asked.holder), kMostHolder);
  }
  if (const Quota* quota = quotas_.of(request.tenant);
      request.turns.protectByTenant && request.turns.protectMs == 0 && quota != nullptr)
    request.turns.protectMs = quota->protectMs;
  request.turns.protectByTenant = false;
  // The programs of a claim have a holder each, and a server sends its checkpoints to one.
  request.turns.holderKeeps =
      request.turns.holderKeeps && request.turns.protectMs != 0 && request.job.empty();
  request.turns.standbyKeeps = request.turns.standbyKeeps && request.turns.holderKeeps;
  if (request.deviceCount == 0 || request.deviceCount > kMostLeased)
    refuse("a lease has 1 to " + std::to_string(kMostLeased) + " devices, and " +
           std::to_string(request.deviceCount) + " are asked for");
  if (request.turns.sharePercent > 100) refuse("a lease's share of a device's time is at most 100%");
  if (request.turns.priority > Priority::high)
    refuse(std::string("there is no such priority: ") + kOtherVersion);
  if (request.turns.protectMs != 0 && request.turns.protectMs < 1000)
    refuse("a protected lease's sessions are checkpointed once a second at most");
  if (request.turns.idleMs != 0 && request.turns.idleMs < 1000)
    refuse("a lease that is given back when it is idle has at least a second");
  request.turns.idleMs = idleTime(request.turns.idleMs);
  if (request.policy > Policy::spread) refuse(std::string("there is no such placement: ") + kOtherVersion);
  if (request.limitMs > kMostLimitMs) refuse("a lease's time limit is at most 366 days");
  parseDeviceFilter(request.gpu);
  return request;
}

// By a holder that asks for a lease that there is: the same one again, or the one after it.
void Pool::takeOver(LeaseRecord& record, const LocalProcess& process) {
  if (process.pid == 0 ||
      (process.pid == record.process.pid && process.startTicks == record.process.startTicks))
    return;
  record.process = process;
  record.killedMs = 0;
  storePlacements(record);
}

void Pool::request(const Principal& who, const LeaseRequest& asked, uint64_t now) {
  latestMs_ = now;
  demandOwner(who, asked.id);
  const auto refuse = [&](const std::string& why) {
    events_.failed(asked.id, {Failure::Kind::refused, why});
  };
  LeaseRequest request;
  try {
    request = checked(who, asked);
  } catch (const std::invalid_argument& error) {
    return refuse(error.what());
  }
  if (!request.adopts.empty()) return adopt(who, request, now);
  if (!request.job.empty() && request.id != claimId(request.tenant, request.job))
    return refuse("that is not the id of a claim for this job");
  if (const auto dead = tombstones_.find(request.id); dead != tombstones_.end())
    return refuse("this lease has ended: " + dead->second.reason);
  if (const auto at = leases_.find(request.id); at != leases_.end()) {
    const LeaseState state = at->second.state;
    if (at->second.runs() && state != LeaseState::granting) {
      takeOver(at->second, request.process);
      events_.granted(tell(at->second));
    }
    if (state == LeaseState::revoking) refuse("this lease is ending: " + at->second.reason);
    return;  // granting: the answer follows
  }
  if (std::find(unknownReleased_.begin(), unknownReleased_.end(), request.id) != unknownReleased_.end())
    return refuse("this lease has ended: released");
  for (const Waiter& waiter : waiters_)
    if (waiter.request.id == request.id && !waiter.resumes) return;
  if (!request.job.empty()) {
    std::vector<Id> earlier;  // claims of jobs that had the same number before
    const auto compare = [&](const Id& id, const std::string& tenant, const std::string& job) {
      if (tenant != request.tenant || numberOf(job) != numberOf(request.job)) return true;
      earlier.push_back(id);
      return submittedAt(job) < submittedAt(request.job);
    };
    bool latest = true;
    for (const Id& id : leases_.of(request.tenant))
      if (const LeaseRecord& record = leases_.all().at(id); record.runs())
        latest = compare(id, record.tenant, record.job) && latest;
    for (const Waiter& waiter : waiters_)
      if (!waiter.resumes)
        latest = compare(waiter.request.id, waiter.request.tenant, waiter.request.job) && latest;
    if (!latest) return refuse("a job that was submitted later has that number, and a claim");
    for (const Id& id : earlier)
      releaseFor(who, id, "a job that was submitted later has the number of its job", now);
  }
  if (waiters_.size() >= kMaxWaiters) return refuse("too many requests wait for devices; try again later");
  enqueue({request, who, now + request.waitMs, false, 0, wishOf(request, times_.preempt.what)}, now);
}

void Pool::enqueue(Waiter waiter, uint64_t now) {
  waiter.number = ++requests_;
  waiter.sinceMs = now;
  waiters_.push_back(std::move(waiter));
  serveWaiters(now);
}

std::vector<QueuedRequest> Pool::queue(const Principal& who, uint64_t now, size_t explained) const {
  std::vector<QueuedRequest> all;
  const auto servers = explained == 0 ? std::vector<ServerUse>() : inventory(who, now);
  for (const Waiter& waiter : inOrder(waiters_, now)) {
    const LeaseRequest& asked = waiter.request;
    const auto lease = waiter.resumes ? leases_.find(asked.id) : leases_.end();
    QueuedRequest one{asked.id,
                      waiter.resumes,
                      asked.tenant,
                      asked.holder,
                      asked.reason,
                      asked.turns.priority,
                      now - std::min(now, waiter.sinceMs)};
    if (lease != leases_.end()) {
      one.tenant = lease->second.tenant;
      one.holder = lease->second.holder;
      one.reason = lease->second.purpose;
      one.priority = lease->second.terms.priority;
    }
    const bool own = who.owns(one.tenant);
    if (own && all.size() < explained) one.why = whyQueued(waiter, who, servers, all.size(), now);
    if (!own) one.tenant = one.reason = "", one.holder = "in use";
    all.push_back(std::move(one));
  }
  return all;
}

// What is missing for it alone, else that others come first. servers: with the names that `who` may know.
std::string Pool::whyQueued(const Waiter& waiter, const Principal& who, const std::vector<ServerUse>& servers,
                            size_t ahead, uint64_t now) const {
  std::string why;
  const auto lease = waiter.resumes ? leases_.find(waiter.request.id) : leases_.end();
  if (lease != leases_.end() && lease->second.isPlaced()) {
    why = missingToResume(lease->second, who, {}, now);
  } else {
    const Choice choice = place(waiter.wish, servers);
    HeldCounts counted;
    why = waiter.resumes ? "" : quotaHinders(waiter.request, choice, counted).text;
    if (why.empty()) why = choice.missing;
  }
  if (!why.empty()) return why;
  return ahead == 0 ? "it is about to be served" : "the devices that are free are for those before it";
}

void Pool::noteQueued(Waiter& waiter) {
  if (waiter.noted || waiter.resumes) return;
  waiter.noted = true;
  StoredLease lease;
  lease.id = waiter.request.id;
  lease.tenant = waiter.request.tenant;
  lease.holder = waiter.request.holder;
  write({}, {entryOf(AuditEvent::queued, lease, waiter.who.text(), waiter.request.reason)},
        [](const std::string&) {});
}

void Pool::fail(const Waiter& waiter, const Failure& failure) {
  events_.failed(waiter.request.id, failure);
  if (!waiter.noted) return;
  StoredLease lease;
  lease.id = waiter.request.id;
  lease.tenant = waiter.request.tenant;
  lease.holder = waiter.request.holder;
  write({}, {entryOf(AuditEvent::unserved, lease, "", failure.text)}, [](const std::string&) {});
}

// Why the request cannot be served whatever becomes free; "" if it may be. A pool without servers, or one
// whose servers may still be on their way back, cannot tell.
std::string Pool::impossible(const Waiter& waiter, const Queue& before, uint64_t now) const {
  if (before.servers.empty() || now < settledMs_ ||
      couldEver(waiter.wish, before.servers, inventory_.index()))
    return "";
  return pool::explain(waiter.wish, inventory(waiter.who, now));
}

// True: it has been answered.
bool Pool::serve(Waiter& waiter, Queue& before, uint64_t now) {
  const LeaseRequest& request = waiter.request;
  if (!events_.wanted(request.id)) {
    fail(waiter, {Failure::Kind::refused, "nobody waits for it any more"});
    return true;
  }
  if (const std::string why = impossible(waiter, before, now); !why.empty()) {
    fail(waiter, {neverKind(waiter.wish, before.servers), why});
    return true;
  }
  // Once: what a smaller quota makes of those that wait shows when they would be served.
  const std::string beyond = waiter.noted ? "" : neverByQuota(request, waiter.wish, before.servers);
  if (!beyond.empty()) {
    fail(waiter, {Failure::Kind::refused, beyond});
    return true;
  }
  waiter.wish.endsMs = request.limitMs == 0 ? kNever : now + request.limitMs;
  Choice choice = placeFor(waiter, before);
  if (const auto hindrance = quotaHinders(request, choice, before.held); !hindrance.text.empty())
    return waitForQuota(waiter, hindrance, now);
  if (!choice.server.empty()) {
    create(waiter, std::move(choice), now);
    refresh(before, now);
    return true;
  }
  const Fits fits = [&](const ServerUse& server) {
    const Choice there = place(waiter.wish, std::span(&server, 1));
    return !there.server.empty() && quotaHinders(request, there, before.held).text.empty();
  };
  const bool preempting = preempt(waiter, before, request.turns.priority, fits, now);
  if (tooLate(waiter, now, preempting)) {
    failLate(waiter, before, now);
    return true;
  }
  if (!choice.never) stay(waiter, before, now);
  return false;
}

// What is missing, without regard to who is before it; or that it is they.
void Pool::failLate(const Waiter& waiter, const Queue& before, uint64_t now) {
  const auto servers = inventory(waiter.who, now);
  Choice choice = place(waiter.wish, servers);
  if (choice.missing.empty()) choice.missing = "the devices that are free are for those who waited longer";
  if (couldEver(waiter.wish, servers)) choice.missing += behind(before);
  fail(waiter, {choice.never ? neverKind(waiter.wish, servers) : Failure::Kind::noDevice, choice.missing});
}

Explanation Pool::explain(const Principal& who, const LeaseRequest& asked, uint64_t now) {
  latestMs_ = now;
  const LeaseRequest request = checked(who, asked);
  // What it has itself already is in nobody's way: its server is about to confirm it.
  if (const auto own = leases_.find(request.id); own != leases_.end() && own->second.runs())
    return {Outlook::now, "it has its devices already", 0, {}};
  Waiter waiter{request, who, now, false, requests_ + 1, wishOf(request, times_.preempt.what)};
  Wish& wish = waiter.wish;
  wish.endsMs = request.limitMs == 0 ? kNever : now + request.limitMs;
  const auto servers = inventory(who, now);
  if (!servers.empty() && now >= settledMs_ && !couldEver(wish, servers))
    return {Outlook::never, pool::explain(wish, servers), 0, judge(wish, servers)};
  if (const std::string why = neverByQuota(request, wish, servers); !why.empty())
    return {Outlook::never, why, 0, judge(wish, servers)};
  auto waiters = waiters_;
  waiters.push_back(waiter);
  Queue before = beginRound(now);
  for (const Waiter& one : inOrder(std::move(waiters), now)) {
    if (one.number == waiter.number) break;
    if (one.resumes || couldEver(one.wish, before.servers)) stay(one, before, now);
  }
  auto left = inventory(who, now, {.without = nullptr, .resumed = &before.resuming});
  for (size_t i = 0; i < left.size(); ++i)
    for (size_t j = 0; j < left[i].devices.size(); ++j)
      left[i].devices[j].claimedMs = before.servers[i].devices[j].claimedMs;
  endRound(before.claims != 0, now);
  Explanation answer{Outlook::devices, "", static_cast<uint32_t>(before.length), judge(wish, left)};
  const Choice choice = place(wish, left);
  if (const auto hindrance = quotaHinders(request, choice, before.held); !hindrance.text.empty()) {
    answer.outlook = Outlook::quota;
    answer.text = hindrance.text;
    return answer;
  }
  if (!choice.server.empty()) {
    Placement there;
    there.server.name = choice.server;
    there.devices = choice.devices;
    answer.outlook = Outlook::now;
    answer.text = describe(there) + describeLinks(choice, left);
    return answer;
  }
  const Choice alone = place(wish, servers);
  // Where none of those that are there could ever serve it (it is not settled yet), no operator can help.
  const bool cordoned = couldEver(wish, servers) && onlyCordoned(wish, servers);
  answer.outlook = alone.missing.empty()      ? Outlook::queue
                   : couldHere(wish, servers) ? Outlook::devices
                   : cordoned                 ? Outlook::anOperator
                                              : Outlook::server;
  answer.text = alone.missing.empty()
                    ? "the devices that are free are for those who are before it in the queue"
                    : alone.missing;
  return answer;
}

// preempting: devices are being taken for it.
bool Pool::tooLate(const Waiter& waiter, uint64_t now, bool preempting) const {
  if (preempting && now < waiter.untilMs + kPreemptingMs) return false;
  return now >= waiter.untilMs && (!ending(now) || now >= waiter.untilMs + kEndingMs);
}

// Devices are about to be free: a program started right behind another one's end gets them, as it would
// natively, instead of hearing that its predecessor holds them.
bool Pool::ending(uint64_t now) const {
  return std::any_of(revoking_.begin(), revoking_.end(), [&](const Id& id) {
    const LeaseRecord& record = leases_.all().at(id);
    return (!record.ordered.empty() || anyGone(record)) && record.ending == LeaseState::released &&
           now < record.revokingMs + kEndingMs;
  });
}

// Its devices are reserved from now on; its server hears of it when the store has accepted it.
void Pool::create(const Waiter& waiter, Choice choice, uint64_t now) {
  const LeaseRequest& request = waiter.request;
  Placement placement{servers_.at(choice.server).facts, std::move(choice.devices), ++epoch_,
                      std::string(32, '\0')};
  randomBytes(std::as_writable_bytes(std::span(placement.key)));
  LeaseRecord& record = leases_[request.id];
  record.id = request.id;
  record.placements = {std::move(placement)};
  record.ttlMs = request.ttlMs;
  record.tenant = request.tenant;
  record.holder = request.holder;
  record.process = request.process;
  record.terms = request.turns;
  record.gpu = request.gpu;
  record.policy = request.policy;
  record.purpose = request.reason;
  record.job = request.job;
  record.limitMs = request.limitMs;
  record.client = request.client;
  record.fingerprint = request.fingerprint;
  if (request.limitMs != 0) {
    record.endsMs = now + request.limitMs;
    record.endsAtMs = events_.calendarMs() + request.limitMs;
    record.endsAtBootMs = record.endsMs + stoodStillMs_;
  }
  record.deadlineMs = now + request.ttlMs;
  record.grantedMs = record.ranSinceMs = record.chargedMs = record.agedAtMs = now;
  record.grantedAtMs = events_.calendarMs();
  record.unborn = true;
  setState(record, LeaseState::granting);
  if (wantsStandby(record)) nameStandby(record, now);
  write(
      {{kLeasePrefix + request.id.text(), encodeLease(record, bootId_)}, {kEpochKey, std::to_string(epoch_)}},
      {entryOf(AuditEvent::granted, record, waiter.who.text(), record.purpose)},
      [this, id = request.id](const std::string& why) { born(id, why); });
}

void Pool::born(const Id& id, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end()) return;
  LeaseRecord& record = at->second;
  record.unborn = false;
  if (record.state != LeaseState::granting) return;  // released meanwhile
  if (why.empty()) return sendGrant(record);
  record.stillborn = true;
  events_.failed(id, {Failure::Kind::noDevice, "the manager cannot write its store: " + why});
  beginEnd(record, LeaseState::revoked, "the manager could not write its store", latestMs_);
  end(id, LeaseState::revoked, record.reason, latestMs_);
}

std::optional<uint32_t> Pool::renew(const Principal& who, const Id& id, uint64_t now, std::string* why,
                                    const Adopter& adopter) {
  latestMs_ = now;
  demandOwner(who, id);
  auto& leases = leases_.quietly();
  const auto at = leases.find(id);
  if (at == leases.end() || at->second.state == LeaseState::revoking || isEnd(at->second.state)) {
    const auto dead = tombstones_.find(id);
    *why = at != leases.end()          ? at->second.reason
           : dead != tombstones_.end() ? dead->second.reason
                                       : "the manager does not know it";
    unheard_.erase(id);
    return std::nullopt;
  }
  if (adopter.id != Id{} && !at->second.job.empty()) return hold(at->second, adopter, now);
  at->second.deadlineMs = std::max(leftBy(at->second), now + at->second.ttlMs);
  if (!adopter.clients.empty()) {
    at->second.clients = adopter.clients;
    storeClients(at->second);
  }
  return at->second.ttlMs;
}

bool Pool::release(const Principal& who, const Id& id, uint64_t now) {
  return releaseFor(who, id, "released", now);
}

bool Pool::releaseFor(const Principal& who, const Id& id, const std::string& reason, uint64_t now) {
  latestMs_ = now;
  demandOwner(who, id);
  const auto waiter = std::find_if(waiters_.begin(), waiters_.end(),
                                   [&](const Waiter& one) { return one.request.id == id && !one.resumes; });
  if (waiter != waiters_.end()) {
    const Waiter gone = std::move(*waiter);
    waiters_.erase(waiter);
    fail(gone, {Failure::Kind::refused, "released while it waited"});
    serveWaiters(now);
    return false;
  }
  const auto at = leases_.find(id);
  if (at == leases_.end()) {
    // Perhaps it overtook its own request, on another connection: that one must not be granted any more.
    if (!tombstones_.contains(id)) unknownReleased_.push_back(id);
    if (unknownReleased_.size() > kMostUnknownReleased) unknownReleased_.pop_front();
    return false;
  }
  LeaseRecord& record = at->second;
  if (isEnd(record.state)) return false;
  if (record.state == LeaseState::granting) events_.failed(id, {Failure::Kind::refused, "released"});
  if (record.state != LeaseState::revoking)
    startRevoke(record, LeaseState::released, reason, now, who.text());
  return lentTo(record, now).empty();
}

bool Pool::drop(const Principal& who, const Id& id, uint64_t now) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::lost) {
    const std::optional<Unheard> unheard = at == leases_.end() ? std::nullopt : unheardOf(at->second, now);
    const bool ends = releaseFor(who, id, kByHand, now);
    if (ends && unheard) noteUnheard(id, *unheard, now);
    return ends;
  }
  latestMs_ = now;
  LeaseRecord& record = at->second;
  if (const std::string why = refusalOf(who, Operation::dropLost); !why.empty())
    throw std::invalid_argument(why);
  for (const Placement& placement : record.placements) {
    const auto server = servers_.find(placement.server.name);
    if (server != servers_.end() && server->second.connected)
      throw std::invalid_argument("server " + placement.server.name +
                                  " is connected: it says itself when nothing of the lease runs any more");
  }
  GPUPOOL_WARNING("lease %s, lost with server %s, is dropped by an operator", id.text().c_str(),
                  record.server().name.c_str());
  record.droppedBy = who.text();
  end(id, LeaseState::lost, record.reason, now);
  return true;
}

}  // namespace gpupool::pool
