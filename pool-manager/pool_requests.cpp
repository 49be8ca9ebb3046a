// Requests: the queue, placement, renewal and release.
#include <algorithm>
#include <set>
#include <span>
#include <stdexcept>

#include "base/hmac.h"
#include "base/log.h"
#include "pool-manager/pool.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMaxWaiters = 4096;
constexpr size_t kMostUnknownReleased = 256;
constexpr uint64_t kEndingMs = 1000;  // a released lease's devices are free within this, almost always
constexpr char kReleased[] = "released";

Wish wishOf(const LeaseRequest& request) {
  return {request.deviceCount, request.memoryBytes, request.server, request.turns.sharePercent};
}

}  // namespace

void Pool::request(const Principal& who, const LeaseRequest& asked, uint64_t now) {
  latestMs_ = now;
  demandOwner(who, asked.id);
  LeaseRequest request = asked;
  request.holder = printable(request.holder, 160);
  request.tenant = who.role == Principal::Role::user ? who.tenant : printable(request.tenant, 64);
  request.ttlMs = std::clamp(request.ttlMs, times_.minTtlMs, times_.maxTtlMs);
  const auto refuse = [&](const std::string& why) {
    events_.failed(request.id, {Failure::Kind::refused, why});
  };
  if (request.deviceCount == 0 || request.deviceCount > kMaxDevices)
    return refuse("a lease has 1 to " + std::to_string(kMaxDevices) + " devices");
  if (request.turns.sharePercent > 100) return refuse("a lease's share of a device's time is at most 100%");
  if (request.turns.priority > Priority::high)
    return refuse("there is no such priority: the manager runs another version of gpupool");
  if (const auto dead = tombstones_.find(request.id); dead != tombstones_.end())
    return refuse("this lease has ended: " + dead->second.reason);
  if (const auto at = leases_.find(request.id); at != leases_.end()) {
    const LeaseState state = at->second.state;
    if (at->second.runs() && state != LeaseState::granting) events_.granted(wireLease(at->second));
    if (state == LeaseState::revoking) refuse("this lease is ending: " + at->second.reason);
    return;  // granting: the answer follows
  }
  if (std::find(unknownReleased_.begin(), unknownReleased_.end(), request.id) != unknownReleased_.end())
    return refuse("this lease has ended: released");
  for (const Waiter& waiter : waiters_)
    if (waiter.request.id == request.id && !waiter.resumes) return;
  if (waiters_.size() >= kMaxWaiters) return refuse("too many requests wait for devices; try again later");
  waiters_.push_back({request, who, now + request.waitMs, false});
  serveWaiters(now);
}

// Why the request cannot be served whatever becomes free; "" if it may be. A pool without servers, or one
// whose servers may still be on their way back, cannot tell.
std::string Pool::impossible(const Waiter& waiter, const std::vector<ServerUse>& servers,
                             uint64_t now) const {
  const Wish wish = wishOf(waiter.request);
  if (servers.empty() || now < settledMs_ || couldEver(wish, servers)) return "";
  return explain(wish, servers);
}

// First come, first served: who waits for any server holds back everybody behind, who waits for one server
// those that could take it, and who waits to be resumed those that do not fit beside it. Who waits for what
// no server has, or only cordoned ones have, holds back nobody.
void Pool::serveWaiters(uint64_t now) {
  std::deque<Waiter> waiting;
  waiting.swap(waiters_);
  Queue before;
  for (Waiter& waiter : waiting)
    if (!(waiter.resumes ? serveResume(waiter, before, now) : serve(waiter, before, now)))
      waiters_.push_back(std::move(waiter));
}

// True: it has been answered.
bool Pool::serve(const Waiter& waiter, Queue& before, uint64_t now) {
  const LeaseRequest& request = waiter.request;
  if (!events_.wanted(request.id)) return true;
  const auto servers = inventory(waiter.who, now);
  if (const std::string why = impossible(waiter, servers, now); !why.empty()) {
    events_.failed(request.id, {Failure::Kind::nothingFits, why});
    return true;
  }
  Choice missing;
  const bool mayTry = !before.closed && !before.taken.contains(request.server) &&
                      (before.taken.empty() || !request.server.empty());
  const auto left = before.resuming.empty()
                        ? servers
                        : inventory(waiter.who, now, {.without = nullptr, .resumed = &before.resuming});
  if (mayTry && tryPlace(waiter, left, now, &missing)) return true;
  if (tooLate(waiter, now)) {
    if (!mayTry || !before.resuming.empty()) {
      missing = place(wishOf(request), servers);
      if (missing.missing.empty())
        missing.missing = "the devices that are free are for those who waited longer";
      missing.missing += "; " + std::to_string(before.length) + " earlier request(s) are waiting";
    }
    events_.failed(request.id,
                   {missing.never ? Failure::Kind::nothingFits : Failure::Kind::noDevice, missing.missing});
    return true;
  }
  if (missing.never || onlyCordoned(wishOf(request), servers)) return false;
  ++before.length;
  before.closed = before.closed || request.server.empty();
  before.taken.insert(request.server);
  return false;
}

bool Pool::tooLate(const Waiter& waiter, uint64_t now) const {
  return now >= waiter.untilMs && (!ending(now) || now >= waiter.untilMs + kEndingMs);
}

// Devices are about to be free: a program started right behind another one's end gets them, as it would
// natively, instead of hearing that its predecessor holds them.
bool Pool::ending(uint64_t now) const {
  return std::any_of(leases_.begin(), leases_.end(), [&](const auto& one) {
    const LeaseRecord& record = one.second;
    return record.state == LeaseState::revoking && (!record.ordered.empty() || anyGone(record)) &&
           record.ending == LeaseState::released && now < record.revokingMs + kEndingMs;
  });
}

bool Pool::tryPlace(const Waiter& waiter, const std::vector<ServerUse>& servers, uint64_t now,
                    Choice* missing) {
  Choice choice = place(wishOf(waiter.request), servers);
  if (choice.server.empty()) {
    *missing = std::move(choice);
    return false;
  }
  create(waiter.request, std::move(choice), now);
  return true;
}

// Its devices are reserved from now on; its server hears of it when the store has accepted it.
void Pool::create(const LeaseRequest& request, Choice choice, uint64_t now) {
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
  record.deadlineMs = now + request.ttlMs;
  record.grantedMs = now;
  record.unborn = true;
  setState(record, LeaseState::granting);
  journal_.write(
      {{kLeasePrefix + request.id.text(), encodeLease(record, bootId_)}, {kEpochKey, std::to_string(epoch_)}},
      [this, id = request.id](const std::string& why) { born(id, why); });
}

void Pool::born(const Id& id, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end()) return;
  LeaseRecord& record = at->second;
  record.unborn = false;
  if (record.state != LeaseState::granting) return;  // released meanwhile
  if (why.empty()) return sendGrant(record);
  events_.failed(id, {Failure::Kind::refused, "the manager cannot write its store: " + why});
  beginEnd(record, LeaseState::revoked, "the manager could not write its store", latestMs_);
  end(id, LeaseState::revoked, record.reason, latestMs_);
}

std::optional<uint32_t> Pool::renew(const Principal& who, const Id& id, uint64_t now, std::string* why) {
  latestMs_ = now;
  demandOwner(who, id);
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state == LeaseState::revoking || isEnd(at->second.state)) {
    const auto dead = tombstones_.find(id);
    *why = at != leases_.end()         ? at->second.reason
           : dead != tombstones_.end() ? dead->second.reason
                                       : "the manager does not know it";
    return std::nullopt;
  }
  at->second.deadlineMs = now + at->second.ttlMs;
  return at->second.ttlMs;
}

bool Pool::release(const Principal& who, const Id& id, uint64_t now) {
  latestMs_ = now;
  demandOwner(who, id);
  const auto waiter = std::find_if(waiters_.begin(), waiters_.end(),
                                   [&](const Waiter& one) { return one.request.id == id && !one.resumes; });
  if (waiter != waiters_.end()) {
    waiters_.erase(waiter);
    events_.failed(id, {Failure::Kind::refused, "released while it waited"});
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
  if (record.state != LeaseState::revoking) startRevoke(record, LeaseState::released, kReleased, now);
  return true;
}

bool Pool::drop(const Principal& who, const Id& id, uint64_t now) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::lost) return release(who, id, now);
  latestMs_ = now;
  LeaseRecord& record = at->second;
  if (who.role != Principal::Role::admin)
    throw std::invalid_argument("a lost lease is dropped by the pool's operator only");
  for (const Placement& placement : record.placements) {
    const auto server = servers_.find(placement.server.name);
    if (server != servers_.end() && server->second.connected)
      throw std::invalid_argument("server " + placement.server.name +
                                  " is connected: it says itself when nothing of the lease runs any more");
  }
  GPUPOOL_WARNING("lease %s, lost with server %s, is dropped by an operator", id.text().c_str(),
                  record.server().name.c_str());
  end(id, LeaseState::lost, record.reason, now);
  return true;
}

}  // namespace gpupool::pool
