// Who asks for leases and uses them: holders, job schedulers and their programs; and somebody who suspends
// and moves leases and cordons servers as he likes.
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "pool-manager/claims.h"
#include "tests/manager/simulated_world.h"

namespace gpupool::history {

void World::granted(const Lease& lease) {
  for (Holder& holder : holders_) {
    if (holder.id != lease.id || holder.is != Holder::Is::asking || holder.dead) continue;
    holder.is = Holder::Is::holding;
    holder.key = lease.key;
    holder.renewAt = now_ + kRenewMs;
    holder.healthySince = now_;
    holder.managerRan = managerRan_;
    holder.untilAt = now_ + 500 + pick(6000);
    holder.dies = chance(30);
  }
}

void World::adopted(const Id& adopter, const Lease& lease) {
  for (Holder& holder : holders_)
    for (Program& program : holder.programs) {
      if (program.adopter != adopter || program.is != Program::Is::asking || holder.dead) continue;
      if (lease.id != holder.id || lease.key != holder.key) fault("another lease than was claimed");
      if (!pool_->leases().contains(lease.id)) fault("a claim is adopted that is over");
      ++result_.adoptions;
      program.is = Program::Is::using_;
      program.renewAt = now_ + kRenewMs;
      program.heardAt = now_;
      program.untilAt = now_ + 500 + pickClaim(4000);
      program.dies = pickClaim(3) == 0;
    }
}

void World::failed(const Id& id, const Failure&) {
  waiting_.erase(id);
  for (Holder& holder : holders_)
    for (Program& program : holder.programs)
      if (program.adopter == id && program.is == Program::Is::asking)
        program.is = Program::Is::away, program.nextAt = now_ + 500;
  for (Holder& holder : holders_)
    if (holder.id == id && holder.is == Holder::Is::asking) holder.is = Holder::Is::done;
}

bool World::wanted(const Id& id) {
  for (const Holder& holder : holders_)
    if (!holder.dead && ((holder.id == id && holder.is == Holder::Is::asking) || adopts(holder, id)))
      return true;
  return probing_;
}

bool World::adopts(const Holder& holder, const Id& adopter) {
  return std::any_of(holder.programs.begin(), holder.programs.end(), [&](const Program& one) {
    return one.adopter == adopter && one.is == Program::Is::asking;
  });
}

void World::holderStep(Holder& holder) {
  using Is = Holder::Is;
  if (now_ < holder.stalledUntil) {
    holder.healthySince = now_ + kStep;
    holder.managerRan = managerRan_;
    return;
  }
  if (holder.dead) return;
  if (holder.is == Is::done) holder = {.nextAt = now_ + pick(1500)};
  if (holder.is == Is::idle && now_ >= holder.nextAt) {
    holder.is = Is::asking;
    holder.id = newId();
    holder.memory = chance(50) ? 0 : kMemory / 2;
    holder.devices = chance(15) ? 2 : 1;
    if (overcommits_) wantTurns(holder);
    if (choosy_) choose(holder);
    if (schedules_) schedule(holder);
    holder.waitMs = static_cast<uint32_t>(pick(3000));
    holder.askAt = now_;
  }
  if (holder.is == Is::asking && now_ >= holder.askAt) {
    holder.askAt = now_ + 1000;  // again, as after a lost connection: the id is the same
    sendFromHolder([this, request = wish(holder)] {
      if (!pool_->leases().contains(request.id)) waiting_.try_emplace(request.id, request, ++arrivals_);
      pool_->request({}, request, clock_->now());
    });
  }
  if (holder.is != Is::holding) return;
  for (Program& program : holder.programs)
    if (!holder.job.empty()) programStep(holder, program);
  if (holder.job.empty() && now_ >= holder.renewAt) {
    holder.renewAt = now_ + kRenewMs;
    sendFromHolder([this, &holder, id = holder.id] {
      std::string why;
      if (!pool_->renew({}, id, clock_->now(), &why) && holder.id == id) holder.is = Is::done;
    });
  }
  if (now_ < holder.untilAt) return;
  holder.is = Is::done;
  if (!holder.dies) sendFromHolder([this, id = holder.id] { pool_->release({}, id, clock_->now()); });
}

// A job; or the last one again, as a scheduler does that has lost what it had done.
void World::schedule(Holder& holder) {
  if (pickClaim(2) == 0) return;
  const bool again = lastJob_ && pickClaim(3) == 0;
  for (const Holder& other : holders_)
    if (again && &other != &holder && other.id == lastJob_->id) return;
  if (again) holder = *lastJob_;
  if (!again) holder.job = "sim:" + std::to_string(++jobs_) + ":0";
  holder.id = claimId(holder.tenant, holder.job);
  for (Program& program : holder.programs) program = {.nextAt = now_ + pickClaim(3000)};
  lastJob_ = holder;
}

void World::programStep(Holder& holder, Program& program) {
  using Is = Program::Is;
  if (program.is == Is::away && now_ >= program.nextAt) {
    program.is = Is::asking;
    program.adopter = {claims_(), claims_()};
    program.askAt = now_;
  }
  if (program.is == Is::asking && now_ >= program.askAt) {
    program.askAt = now_ + 1000;
    LeaseRequest request;
    request.id = program.adopter;
    request.ttlMs = kTtlMs;
    request.holder = "program";
    request.tenant = holder.tenant;
    request.adopts = pickClaim(2) == 0 ? holder.job : holder.id.text();
    sendFromHolder([this, request] { pool_->request({}, request, clock_->now()); });
  }
  if (program.is != Is::using_) return;
  if (now_ >= program.renewAt) {
    program.renewAt = now_ + kRenewMs;
    sendFromHolder([this, &holder, &program, id = holder.id, adopter = program.adopter] {
      std::string why;
      const bool runs = pool_->renew({}, id, clock_->now(), &why, {adopter, "program", kTtlMs}).has_value();
      if (runs && program.adopter == adopter) program.heardAt = now_;
      if (!runs && holder.id == id) holder.is = Holder::Is::done;
    });
  }
  if (now_ < program.untilAt) return;
  program.is = Is::away;
  program.nextAt = now_ + pickClaim(4000);
  if (program.dies) return;
  sendFromHolder(
      [this, id = holder.id, adopter = program.adopter] { pool_->leave({}, id, adopter, clock_->now()); });
}

// Other sizes, too, and terms.
void World::wantTurns(Holder& holder) {
  constexpr uint64_t kSizes[] = {0, kMemory / 8, kMemory / 4, kMemory / 2, kMemory / 8 * 7};
  holder.memory = kSizes[pickTurn(std::size(kSizes))];
  holder.terms.sharePercent = pickTurn(2) == 0 ? 0 : static_cast<uint32_t>(1 + pickTurn(80));
  holder.terms.priority = static_cast<Priority>(pickTurn(3));
}

// Models, classes, tenants, time limits.
void World::choose(Holder& holder) {
  constexpr const char* kModels[] = {"", "", "gpu x", "GPU Y", "memory>=1GiB,gpu"};
  holder.gpu = kModels[pickWish(std::size(kModels))];
  holder.terms.priority = static_cast<Priority>(pickWish(3));
  holder.tenant = pickWish(2) == 0 ? "alice" : "bob";
  holder.policy = pickWish(2) == 0 ? Policy::pack : Policy::spread;
  holder.limitMs = pickWish(2) == 0 ? 0 : 500 + pickWish(6000);
}

// Somebody who suspends and resumes leases as he likes, not only when that makes sense.
void World::operatorStep() {
  if (!pool_ || pool_->leases().empty() || pickMove(250) >= kStep) return;
  auto at = pool_->leases().begin();
  std::advance(at, static_cast<std::ptrdiff_t>(pickMove(pool_->leases().size())));
  const bool isHeld = at->second.state == LeaseState::held;
  const bool suspends = pickMove(5) < (isHeld || at->second.state == LeaseState::suspended ? 1 : 4);
  const uint32_t waitMs = pickMove(2) == 0 ? 0 : static_cast<uint32_t>(pickMove(8000));
  // Into files, or from there: the server knows.
  // The other bug is rare enough without files.
  const bool plain = pickTarget(2) == 0 && (!isHeld || pickHold(4) == 0);
  const std::string folder = plain || bug_ == Bug::hidesResuming ? "" : "monday";
  MoveTarget to;
  if (pickHold(2) == 0) to.server = servers_[pickHold(servers_.size())].facts.name;
  toManager_.send(now_ + pickMove(80), [this, id = at->first, waitMs, suspends, folder, to] {
    try {
      if (suspends)
        pool_->suspend({}, id, 1000, clock_->now(), folder);
      else
        pool_->resume({}, id, waitMs, clock_->now(), folder, to);
    } catch (const std::invalid_argument&) {
      return;  // not in the state for it
    }
  });
}

// In some worlds, somebody who takes servers out of service, and back; and moves sessions. A server that
// he was told to be cordoned has no leases but those that there were when he asked for it.
void World::cordonStep() {
  if (!pool_ || !administrated_) return;
  if (!pool_->leases().empty() && pickMark(roomy_ ? 300 : 1500) < kStep) {
    auto at = pool_->leases().begin();
    std::advance(at, static_cast<std::ptrdiff_t>(pickMark(pool_->leases().size())));
    const bool copies = pickMark(5) == 0;
    toManager_.send(now_ + pickMark(80), [this, id = at->first, to = whereTo(), copies] {
      try {
        copies ? pool_->checkpoint({}, id, 1000, "monday", clock_->now())
               : pool_->migrate({}, id, 1000, to, clock_->now());
      } catch (const std::invalid_argument&) {
        return;  // not in the state for it
      }
    });
  }
  if (pickMark(1500) >= kStep) return;
  const size_t at = pickMark(servers_.size());
  const bool cordons = pickMark(3) == 0;
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (!healed_ && i != at) continue;
    toManager_.send(now_ + pickMark(80), [this, server = servers_[i].facts.name,
                                          cordons = cordons && !healed_] { setCordon(server, cordons); });
  }
}

MoveTarget World::whereTo() {
  switch (pickTarget(5)) {
    case 0:
      return {};
    case 1:
      return {servers_[pickTarget(servers_.size())].facts.name};
    case 2:
      return {"", {static_cast<uint32_t>(pickTarget(2))}};
    default:
      return {"", {}, true};
  }
}

void World::setCordon(const std::string& server, bool cordons) {
  const uint64_t order = ++cordonOrders_[server];
  if (!cordons) cordoned_.erase(server);  // whatever comes of it
  try {
    if (!cordons) return pool_->uncordon({}, server, [](const std::string&) {});
    std::set<Id> there;
    for (const auto& [id, record] : pool_->leases()) there.insert(id);
    pool_->cordon({}, server, {"why", "who", 1}, [this, server, order, there](const std::string& why) {
      if (!why.empty() || cordonOrders_[server] != order) return;
      ++result_.cordons;
      cordoned_[server] = there;
    });
  } catch (const std::invalid_argument&) {
    return;  // it is not there
  }
}

LeaseRequest World::wish(const Holder& holder) const {
  LeaseRequest request;
  request.id = holder.id;
  request.deviceCount = holder.devices;
  request.memoryBytes = holder.memory;
  request.turns = holder.terms;
  request.ttlMs = kTtlMs;
  request.waitMs = holder.waitMs;
  request.holder = "holder";
  request.gpu = holder.gpu;
  request.policy = holder.policy;
  request.tenant = holder.tenant;
  request.limitMs = holder.limitMs;
  request.job = holder.job;
  return request;
}

void World::sendFromHolder(std::function<void()> deliver) {
  if (pool_) toManager_.send(soon(), std::move(deliver));
}

}  // namespace gpupool::history
