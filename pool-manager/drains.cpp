#include "pool-manager/drains.h"

#include <algorithm>

#include "pool-manager/rpc.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostRemembered = 1024;  // of a server; so many are remembered

// A suspended one is asked for the reason why it stays.
bool mayMove(const LeaseRecord& lease, const std::string& server) {
  const bool runs = lease.state == LeaseState::active || lease.state == LeaseState::moving ||
                    lease.state == LeaseState::suspended;
  return runs && lease.isPlacedOn(server);
}

}  // namespace

std::vector<Id> Drains::movable(const std::string& server) const {
  std::vector<Id> leases;
  for (const auto& [id, lease] : pool_.leases())
    if (mayMove(lease, server)) leases.push_back(id);
  return leases;
}

void Drains::begin(const Principal& who, const std::string& server, kj::Duration tryFor) {
  Drain& drain = drains_[server];
  drain.who = who;
  const kj::TimePoint until = timer_.now() + tryFor;
  drain.until = drain.goesOn ? kj::max(drain.until, until) : until;
  drain.goesOn = true;
  if (drain.moving) return;
  drain.said.clear();
  drain.task = round(server).eagerlyEvaluate(nullptr);  // instead of the one that waits for its time
}

void Drains::stop(const std::string& server) {
  const auto drain = drains_.find(server);
  if (drain == drains_.end()) return;
  drain->second.goesOn = false;
  if (!drain->second.moving) drain->second.task = nullptr;
}

kj::Promise<void> Drains::round(const std::string& server) {
  const std::vector<Id> leases = movable(server);
  drains_.at(server).moving = !leases.empty();
  return moveNext(server, {leases.begin(), leases.end()}).then([this, server]() -> kj::Promise<void> {
    Drain& drain = drains_.at(server);
    drain.moving = false;
    drain.goesOn = drain.goesOn && isCordoned(server) && timer_.now() < drain.until;
    if (!drain.goesOn) return kj::READY_NOW;
    return timer_.afterDelay(kBetween).then([this, server]() -> kj::Promise<void> {
      Drain& again = drains_.at(server);
      again.goesOn = isCordoned(server) && timer_.now() <= again.until;
      return again.goesOn ? round(server) : kj::Promise<void>(kj::READY_NOW);
    });
  });
}

// Those that have ended or gone meanwhile are left out.
kj::Promise<void> Drains::moveNext(const std::string& server, std::deque<Id> leases) {
  const auto& all = pool_.leases();
  while (!leases.empty()) {
    const auto at = all.find(leases.front());
    if (at != all.end() && mayMove(at->second, server)) break;
    leases.pop_front();
  }
  Drain& drain = drains_.at(server);
  if (leases.empty() || !drain.goesOn || !isCordoned(server)) return kj::READY_NOW;
  const Id id = leases.front();
  leases.pop_front();
  return kj::evalLater([this, who = drain.who, id] { return move_(who, id); })
      .then(
          [this, server, id](MigrateResult&& result) { say(drains_.at(server), id, true, result.server); },
          [this, server, id](kj::Exception&& error) { say(drains_.at(server), id, false, errorText(error)); })
      .then([this, server, leases = std::move(leases)]() mutable {
        return moveNext(server, std::move(leases));
      });
}

void Drains::say(Drain& drain, const Id& lease, bool moved, const std::string& text) {
  if (moved)
    drain.said.erase(lease);
  else if (std::exchange(drain.said[lease], text) == text)
    return;
  drain.words.push_back({++words_, lease, moved, text});
  if (drain.words.size() > kMostRemembered) drain.words.pop_front();
}

DrainState Drains::state(const std::string& server, uint64_t after) const {
  DrainState state;
  state.cordoned = isCordoned(server);
  state.latest = words_;
  const auto at = drains_.find(server);
  const Drain* drain = at == drains_.end() ? nullptr : &at->second;
  if (drain != nullptr) {
    state.moving = drain->moving;
    state.goesOn = drain->moving || (drain->goesOn && state.cordoned);
    for (const DrainWord& word : drain->words)
      if (word.number > after) state.words.push_back(word);
  }
  for (const auto& [id, lease] : pool_.leases()) {
    const Placement* placement = lease.on(server);
    if (placement == nullptr || placement->gone) continue;
    DrainedLease one{id, std::string(name(lease.state)), placement->role == PlacementRole::left, ""};
    if (drain != nullptr)
      if (const auto said = drain->said.find(id); said != drain->said.end()) one.note = said->second;
    state.leases.push_back(std::move(one));
  }
  return state;
}

}  // namespace gpupool::pool
