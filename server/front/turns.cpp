#include "server/front/turns.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <tuple>

namespace gpupool::server {
namespace {

constexpr int kTransfersPerTurn = 10;  // moving costs a tenth of the time, at most
constexpr int kTurnsAbove = 2;         // the lowest of the others, nobody waits who stands higher

bool meet(const std::vector<Turns::Part>& one, const std::vector<Turns::Part>& other) {
  return std::any_of(one.begin(), one.end(), [&](const Turns::Part& part) {
    return std::any_of(other.begin(), other.end(),
                       [&](const Turns::Part& that) { return that.device == part.device; });
  });
}

bool anyOf(const std::vector<bool>& devices, const std::vector<Turns::Part>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const Turns::Part& part) { return devices[part.device]; });
}

void mark(std::vector<bool>& devices, const std::vector<Turns::Part>& parts) {
  for (const Turns::Part& part : parts) devices[part.device] = true;
}

}  // namespace

Turns::Turns(Settings settings) : settings_(std::move(settings)), contests_(settings_.memory.size()) {}

// ---- what has been ----

void Turns::see(const std::map<Id, Facts>& leases, Time now) {
  advance(now);
  std::erase_if(leases_, [&](const auto& entry) { return !leases.contains(entry.first); });
  std::vector<Lease*> entering;
  for (const auto& [id, facts] : leases) {
    const auto [at, fresh] = leases_.try_emplace(id);
    Lease& lease = at->second;
    if (facts.wants && !lease.facts.wants) entering.push_back(&lease);
    lease.id = id;
    update(lease, facts, now);
    if (fresh) lease.told.turns = 0;
  }
  weigh();
  for (Lease* lease : entering)
    if (const auto lowest = lowestRival(*lease)) lease->virtualTime = std::max(lease->virtualTime, *lowest);
  for (auto& [id, lease] : leases_)
    if (const auto lowest = waits(lease) ? lowestRival(lease) : std::nullopt)
      lease.virtualTime = std::min(lease.virtualTime, *lowest + kTurnsAbove * lease.virtualTurn);
}

void Turns::advance(Time now) {
  const Time passed = now - now_;
  now_ = now;
  for (auto& [id, lease] : leases_) {
    if (lease.settled != Place::resident) continue;
    lease.told.served += passed;
    const bool contended =
        std::any_of(lease.facts.parts.begin(), lease.facts.parts.end(),
                    [this](const Part& part) { return contests_[part.device].waiters != 0; });
    if (!lease.begun || !contended) continue;
    lease.virtualTime += static_cast<double>(passed.count()) / lease.weight;
  }
}

void Turns::update(Lease& lease, const Facts& facts, Time now) {
  if (facts.wants != lease.facts.wants) lease.since = now;
  lease.facts = facts;
  if (facts.place != Place::moving && facts.place != lease.settled) {
    lease.settled = facts.place;
    arrive(lease, now);
  }
  if (lease.settled == Place::resident && facts.wants && !lease.begun) lease.begun = now;
  if (lease.settled != Place::aside || !facts.wants) lease.called = false;
}

void Turns::arrive(Lease& lease, Time now) {
  lease.since = now;
  lease.begun.reset();
  lease.works = false;
  if (lease.settled == Place::resident) ++lease.told.turns;
  if (lease.settled != Place::aside) return;
  lease.kept.clear();
  for (const Part& part : lease.facts.parts) lease.kept.push_back(part.left);
  lease.keptAt = now;
}

// The lowest virtual time of those that want the same devices and have the same priority.
std::optional<double> Turns::lowestRival(const Lease& lease) const {
  std::optional<double> lowest;
  for (const auto& [id, other] : leases_) {
    const bool rival = other.facts.wants && other.facts.priority == lease.facts.priority;
    if (&other != &lease && rival && meet(other.facts.parts, lease.facts.parts))
      lowest = std::min(lowest.value_or(other.virtualTime), other.virtualTime);
  }
  return lowest;
}

// Weights, and how long turns are with them.
void Turns::weigh() {
  contests_.assign(contests_.size(), {});
  for (const auto& [id, lease] : leases_) {
    if (!lease.facts.wants || lease.settled == Place::apart) continue;
    for (const Part& part : lease.facts.parts) {
      Contest& contest = contests_[part.device];
      const uint32_t share = lease.facts.sharePercent;
      contest.named += share;
      if (share == 0) ++contest.unnamed;
      if (share != 0) contest.smallest = std::min(contest.smallest, static_cast<double>(share));
      contest.turn = std::max({contest.turn, settings_.turn, transfer(lease) * kTransfersPerTurn});
      if (waits(lease)) ++contest.waiters;
    }
  }
  for (auto& [id, lease] : leases_) {
    lease.turn = settings_.turn;
    lease.weight = 100;
    lease.virtualTurn = std::numeric_limits<double>::max();
    for (const Part& part : lease.facts.parts) {
      const Contest& contest = contests_[part.device];
      const double equal = equalPart(contest);
      const double weight = lease.facts.sharePercent != 0 ? lease.facts.sharePercent : equal;
      const double smallest = contest.unnamed == 0 ? contest.smallest : std::min(contest.smallest, equal);
      const double turn = static_cast<double>(contest.turn.count()) / smallest;
      lease.turn = std::max(lease.turn, Time(static_cast<int64_t>(turn * weight)));
      lease.weight = std::min(lease.weight, weight);
      lease.virtualTurn = std::min(lease.virtualTurn, turn);
    }
  }
}

// The weight of a lease that names no share.
double Turns::equalPart(const Contest& contest) {
  const double rest = contest.named < 100 ? 100 - contest.named : 0;
  return std::max(1.0, rest / std::max<uint32_t>(contest.unnamed, 1));
}

void Turns::moved(const Id& id, bool back, Time took) {
  const auto found = leases_.find(id);
  if (found == leases_.end()) return;
  Lease& lease = found->second;
  lease.ordered = false;
  lease.failures = 0;
  lease.notBefore = Time(0);
  lease.told.note.clear();
  (back ? lease.in : lease.out) = took;
}

void Turns::failed(const Id& id, std::string why, Time now) {
  const auto found = leases_.find(id);
  if (found == leases_.end()) return;
  Lease& lease = found->second;
  lease.ordered = false;
  Time pause = settings_.firstPause;
  for (uint32_t i = 0; i < lease.failures && pause < settings_.pause; ++i) pause *= 2;
  ++lease.failures;
  lease.notBefore = now + std::min(pause, settings_.pause);
  lease.told.note = std::move(why);
  if (lease.settled != Place::resident) return;
  lease.works = true;
  if (!lease.begun) lease.begun = now;
}

bool Turns::waiting() const {
  return std::any_of(leases_.begin(), leases_.end(),
                     [this](const auto& entry) { return waits(entry.second); });
}

std::optional<Turns::Report> Turns::report(const Id& id) const {
  const auto found = leases_.find(id);
  if (found == leases_.end()) return std::nullopt;
  Report report = found->second.told;
  report.place = found->second.settled;
  report.wants = found->second.facts.wants;
  return report;
}

// ---- what is to be ----

std::vector<Turns::Move> Turns::decide(Time now) {
  std::vector<Move> moves;
  Board board = this->board();
  for (Lease* waiter : queue(now)) {
    const auto& parts = waiter->facts.parts;
    if (anyOf(board.claimed, parts)) continue;
    if (anyOf(board.moving, parts)) {
      mark(board.claimed, parts);
      continue;
    }
    if (fits(*waiter, board, {}, now)) {
      moves.push_back({waiter->id, true, Time(0)});
      waiter->ordered = true;
      mark(board.moving, parts);
      mark(board.claimed, parts);
      continue;
    }
    const auto leaving = victims(*waiter, board, now);
    for (Lease* victim : leaving) {
      const bool over = victim->facts.priority <= waiter->facts.priority && turnIsOver(*victim, *waiter, now);
      moves.push_back({victim->id, false, over ? settings_.drain : settings_.quietDrain});
      victim->ordered = true;
      mark(board.moving, victim->facts.parts);
    }
    waiter->called = waiter->called || !leaving.empty();
    if (!leaving.empty() || hopeful(*waiter, board, now)) mark(board.claimed, parts);
  }
  return moves;
}

Turns::Board Turns::board() const {
  const size_t devices = settings_.memory.size();
  Board board{std::vector<uint64_t>(devices), std::vector<bool>(devices), std::vector<bool>(devices)};
  for (const auto& [id, lease] : leases_) {
    const bool aside = lease.facts.place == Place::aside && !lease.ordered;
    for (const Part& part : lease.facts.parts) board.used[part.device] += aside ? part.left : part.whole;
    if (moving(lease)) mark(board.moving, lease.facts.parts);
  }
  return board;
}

std::vector<Turns::Lease*> Turns::queue(Time now) {
  std::vector<Lease*> list;
  for (auto& [id, lease] : leases_)
    if (waits(lease) && !moving(lease) && now >= lease.notBefore) list.push_back(&lease);
  std::sort(list.begin(), list.end(), [](const Lease* one, const Lease* other) {
    return std::tuple(-one->facts.priority, !one->called, one->virtualTime, one->since, one->id) <
           std::tuple(-other->facts.priority, !other->called, other->virtualTime, other->since, other->id);
  });
  return list;
}

std::vector<Turns::Lease*> Turns::victims(const Lease& waiter, const Board& board, Time now) {
  std::vector<Lease*> list;
  for (auto& [id, lease] : leases_) {
    if (lease.settled != Place::resident || moving(lease) || now < lease.notBefore) continue;
    if (!meet(lease.facts.parts, waiter.facts.parts) || anyOf(board.moving, lease.facts.parts)) continue;
    if (quiet(lease, now) || turnIsOver(lease, waiter, now)) list.push_back(&lease);
  }
  const auto rank = [&](const Lease* lease) {
    const bool busy = !quiet(*lease, now);
    return std::tuple(busy, lease->facts.priority, busy ? *lease->begun : lease->since, lease->id);
  };
  std::sort(list.begin(), list.end(),
            [&](const Lease* one, const Lease* other) { return rank(one) < rank(other); });
  if (!fits(waiter, board, list, now)) return {};
  // None that is not needed: those that should rather stay are looked at first.
  for (size_t at = list.size(); at-- > 0;) {
    std::vector<Lease*> fewer = list;
    fewer.erase(fewer.begin() + static_cast<ptrdiff_t>(at));
    if (fits(waiter, board, fewer, now)) list = std::move(fewer);
  }
  // Those first that could not be put aside lately: the others would go in vain if they cannot again.
  const auto failed = [](const Lease* lease) { return lease->failures != 0; };
  if (std::any_of(list.begin(), list.end(), failed)) std::erase_if(list, std::not_fn(failed));
  return list;
}

bool Turns::hopeful(const Lease& waiter, const Board& board, Time now) const {
  std::vector<Lease*> list;
  for (const auto& [id, lease] : leases_)
    if (lease.settled == Place::resident && now >= lease.notBefore &&
        (!lease.facts.wants || lease.facts.priority <= waiter.facts.priority))
      list.push_back(const_cast<Lease*>(&lease));
  return fits(waiter, board, list, now);
}

bool Turns::fits(const Lease& waiter, const Board& board, const std::vector<Lease*>& without,
                 Time now) const {
  return std::all_of(waiter.facts.parts.begin(), waiter.facts.parts.end(), [&](const Part& part) {
    uint64_t used = board.used[part.device] - part.left;
    for (const Lease* lease : without) used -= freed(*lease, part.device, now);
    const uint64_t memory = settings_.memory[part.device];
    return used <= memory && part.whole <= memory - used;
  });
}

bool Turns::idle(const Lease& lease, Time now) const {
  return !lease.facts.wants && now - lease.since >= std::max(settings_.quiet, transfer(lease));
}

bool Turns::turnIsOver(const Lease& lease, const Lease& waiter, Time now) const {
  if (!lease.begun) return false;
  const Time had = now - *lease.begun;
  // What only seemed quiet may be so by now.
  if (lease.facts.priority > waiter.facts.priority)
    return lease.works && idle(lease, now) && had >= lease.turn;
  if (lease.facts.priority < waiter.facts.priority)
    return had >= std::max(settings_.minimum, transfer(lease));
  return had >= lease.turn && lease.virtualTime >= waiter.virtualTime;
}

// What it would give there.
uint64_t Turns::freed(const Lease& lease, size_t device, Time now) const {
  for (size_t i = 0; i < lease.facts.parts.size(); ++i) {
    const Part& part = lease.facts.parts[i];
    if (part.device != device) continue;
    uint64_t left = part.left;
    if (i < lease.kept.size() && now - lease.keptAt < settings_.keptFor) left = std::max(left, lease.kept[i]);
    return part.whole - std::min(left, part.whole);
  }
  return 0;
}

}  // namespace gpupool::server
