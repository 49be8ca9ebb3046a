// The queue is served in rounds, in its order, on the kept inventory: who is not served leaves claims there,
// which are taken back when the round is over.
#include <algorithm>
#include <utility>

#include "pool-manager/pool.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostUnserved = 64;           // wishes that are remembered in a round
constexpr uint64_t kUnclaimed = ~uint64_t{0};  // Unserved::claims of one that has claimed nothing yet

auto findWish(std::vector<Unserved>& all, const Wish& wish) {
  return std::find_if(all.begin(), all.end(), [&](const Unserved& one) { return one.wish == wish; });
}

}  // namespace

// By class; then by what the tenant has used, least first; then as they came.
std::vector<Waiter> Pool::inOrder(std::vector<Waiter> waiters, uint64_t now) const {
  struct Rank {
    Priority priority;
    double share;
    uint64_t number;
    size_t index;
  };
  std::map<std::string, double> shares;
  std::vector<Rank> ranks;
  for (size_t i = 0; i < waiters.size(); ++i) {
    const Waiter& waiter = waiters[i];
    const auto lease = waiter.resumes ? leases_.find(waiter.request.id) : leases_.end();
    const bool known = lease != leases_.end();
    const auto& terms = known ? lease->second.terms : waiter.request.turns;
    const std::string& tenant = known ? lease->second.tenant : waiter.request.tenant;
    const auto [at, isNew] = shares.try_emplace(tenant, 0);
    if (isNew) at->second = usage_.share(tenant, now);
    ranks.push_back({terms.priority, at->second, waiter.number, i});
  }
  std::sort(ranks.begin(), ranks.end(), [](const Rank& a, const Rank& b) {
    if (a.priority != b.priority) return a.priority > b.priority;
    return a.share != b.share ? a.share < b.share : a.number < b.number;
  });
  std::vector<Waiter> ordered;
  ordered.reserve(waiters.size());
  for (const Rank& rank : ranks) ordered.push_back(std::move(waiters[rank.index]));
  return ordered;
}

// What is free has changed; the claims have not.
void Pool::refresh(Queue& queue, uint64_t now) {
  refreshInventory(now);
  for (Unserved& one : queue.unserved) one.claims = kUnclaimed;  // its devices may be free at another time
  queue.held.clear();
}

Queue Pool::beginRound(uint64_t now) {
  if (std::exchange(inRound_, true)) endRound(true, now);  // the last one has ended with an exception
  inRound_ = true;
  Queue queue{inventory_.servers(), resuming_};
  refresh(queue, now);
  return queue;
}

// Nothing is claimed any more, and who is to be resumed is suspended still.
void Pool::endRound(bool claimed, uint64_t now) {
  for (const Id& id : std::exchange(resuming_, {})) (void)leases_.find(id);  // marks it
  if (claimed) inventory_.forgetClaims();
  refreshInventory(now);
  inRound_ = false;
}

// Who waits holds back those behind from the devices that it may get one day, unless they end before it could
// begin there; and who waits to be resumed those that do not fit beside it. Who waits for what no server has,
// or only cordoned ones have, holds back nobody.
void Pool::serveWaiters(uint64_t now) {
  if (waiters_.empty()) return;
  countStandstill();  // who gets a lease now begins behind it
  Queue before = beginRound(now);
  for (Waiter& waiter : inOrder(std::exchange(waiters_, {}), now)) {
    if (waiter.resumes ? serveResume(waiter, before, now) : serve(waiter, before, now)) continue;
    noteQueued(waiter);
    waiters_.push_back(std::move(waiter));
  }
  endRound(before.claims != 0, now);
}

// What an earlier one in this round has not found, an equal one does not find.
Choice Pool::placeFor(const Waiter& waiter, Queue& before) const {
  const auto at = findWish(before.unserved, waiter.wish);
  if (at != before.unserved.end()) return {{}, {}, {}, at->never};
  Choice choice = place(waiter.wish, before.servers, inventory_.index());
  if (choice.server.empty() && before.unserved.size() < kMostUnserved)
    before.unserved.push_back({waiter.wish, choice.never, kUnclaimed});
  return choice;
}

void Pool::stay(const Waiter& waiter, Queue& before, uint64_t now) {
  if (waiter.resumes && waiter.folder.empty()) {
    before.resuming.insert(waiter.request.id);
    (void)leases_.find(waiter.request.id);  // marks it
    refresh(before, now);
  } else {
    if (onlyCordoned(waiter.wish, before.servers)) return;
    claimFor(waiter, before, now);
  }
  ++before.length;
}

// To claim again what an equal wish has claimed changes nothing, unless others have claimed since.
void Pool::claimFor(const Waiter& waiter, Queue& before, uint64_t now) {
  const auto at = findWish(before.unserved, waiter.wish);
  if (at != before.unserved.end() && at->claims == before.claims) return;
  if (claim(waiter.wish, now, before.servers)) ++before.claims;
  if (at != before.unserved.end()) at->claims = before.claims;
}

}  // namespace gpupool::pool
