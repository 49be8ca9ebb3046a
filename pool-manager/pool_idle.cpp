// Leases that are not used for as long as they name (TurnTerms::idleMs): one without a session ends; one with
// sessions is suspended, and comes back when its programs call again, as a request for its devices in the
// queue. Their servers say how long it has been, with each beat.
//
// Whether something runs on a device is not looked at before: a suspension that has to wait for a kernel
// fails, and the lease counts as used.
#include <algorithm>

#include "base/log.h"
#include "pool-manager/pool.h"
#include "pool-manager/refusal.h"

namespace gpupool::pool {
namespace {

constexpr uint32_t kDrainMs = 200;
constexpr uint64_t kPauseMs = 10'000;  // after its server has refused to bring it back

}  // namespace

uint32_t Pool::idleTime(uint32_t asked) const {
  const uint32_t wanted = asked == 0 ? times_.idleMs : asked;
  if (times_.mostIdleMs == 0) return wanted;
  return wanted == 0 ? times_.mostIdleMs : std::min(wanted, times_.mostIdleMs);
}

void Pool::noteUses(const std::string& server, const Id& incarnation, const std::vector<LeaseUse>& uses,
                    uint64_t now) {
  for (const LeaseUse& use : uses) {
    const auto at = leases_.find(use.id);
    if (at == leases_.end()) continue;
    LeaseRecord& record = at->second;
    if (!record.isPlaced() || record.server().life() != ServerLife{server, incarnation}) continue;
    record.idleMs = use.wanted ? 0 : use.idleMs;
    record.idleAtMs = now;
    if (record.change != Change::none) continue;
    if (record.state == LeaseState::active)
      endIdle(record, use, now);
    else if (record.comesBack() && use.wanted)
      bringBack(record, now);
  }
}

void Pool::setCounts(const std::string& name, const std::vector<LeaseCounts>& counts, uint64_t now) {
  for (const LeaseCounts& one : counts) {
    const auto at = leases_.quietly().find(one.id);  // each beat: what placement sees stays as it is
    if (at == leases_.quietly().end()) continue;
    LeaseRecord& record = at->second;
    record.totals.keepServers([&](const std::string& server) { return record.on(server) != nullptr; });
    if (record.on(name) != nullptr) record.totals.note(name, one, now);
  }
}

void Pool::endIdle(LeaseRecord& record, const LeaseUse& use, uint64_t now) {
  const uint32_t limit = record.terms.idleMs;
  if (limit == 0 || use.wanted || use.idleMs < limit || now < record.idleNotBeforeMs) return;
  const std::string why = "it was idle for " + age(limit);
  if (use.sessions == 0 && !record.adoptions.empty())
    return;  // a program uses the claim, and has it yet to call
  if (use.sessions == 0) return startRevoke(record, LeaseState::released, why, now);
  record.idleNotBeforeMs = now + limit;  // should it fail
  record.changedBy.clear();
  orderSuspend(record, kDrainMs, "", why);
}

// It waits for its devices for as long as it takes.
void Pool::bringBack(LeaseRecord& record, uint64_t now) {
  const bool waits = std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter& one) {
    return one.resumes && one.request.id == record.id;
  });
  if (waits || (record.broughtBackMs != 0 && now < record.broughtBackMs + kPauseMs)) return;
  LeaseRequest place;
  place.id = record.id;
  Waiter waiter{place, {Principal::Role::user, record.tenant}, kNever, true};
  waiter.number = ++requests_;
  waiter.sinceMs = now;
  waiters_.push_back(std::move(waiter));
}

bool Pool::resumeWanted(const Id& id) const {
  const auto at = leases_.find(id);
  return (at != leases_.end() && at->second.comesBack()) || events_.resumeWanted(id);
}

}  // namespace gpupool::pool
