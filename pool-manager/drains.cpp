#include "pool-manager/drains.h"

#include <algorithm>

#include "base/log.h"
#include "pool-manager/rpc.h"
#include "pool-manager/stored.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostRemembered = 1024;  // of a server; so many are remembered

// A suspended one is asked for the reason why it stays.
bool mayMove(const LeaseRecord& lease, const std::string& server) {
  const bool runs = lease.state == LeaseState::active || lease.state == LeaseState::moving ||
                    lease.state == LeaseState::suspended;
  return runs && lease.isPlacedOn(server);
}

// "lease 3f2a91c4 is suspended": whoever is told knows which lease it is about.
std::string withoutLease(const std::string& text, const Id& lease) {
  for (const size_t digits : {size_t{32}, size_t{8}}) {
    const std::string name = "lease " + lease.text().substr(0, digits) + " ";
    if (text.starts_with(name)) return "it " + text.substr(name.size());
  }
  return text;
}

}  // namespace

std::vector<Id> Drains::movable(const std::string& server) const {
  std::vector<Id> leases;
  for (const auto& [id, lease] : pool_.leases())
    if (mayMove(lease, server)) leases.push_back(id);
  return leases;
}

void Drains::load(const std::vector<Entry>& stored) {
  const uint64_t now = calendarMs_();
  for (const Entry& entry : stored) {
    const std::string server = entry.key.substr(kDrainPrefix.size());
    const auto drain = decodeDrain(entry.value);
    if (!drain) {
      GPUPOOL_WARNING("store: what it says of the drain of server %s cannot be read", server.c_str());
      continue;
    }
    GPUPOOL_WARNING("server %s is being drained still, as before this manager was started", server.c_str());
    drains_[server].stored = true;
    const uint64_t left = drain->untilMs - std::min(drain->untilMs, now);
    start(drain->who, server, std::min(left, kMostTryMs) * kj::MILLISECONDS);
  }
}

// The store comes first. It has one that is joined already, unless that is to go on for longer now.
kj::Promise<void> Drains::begin(const Principal& who, const std::string& server, kj::Duration tryFor) {
  Drain& drain = drains_[server];
  const kj::TimePoint now = timer_.now();
  const kj::Duration left = drain.goesOn && drain.until > now ? drain.until - now : 0 * kj::SECONDS;
  if (drain.stored && drain.goesOn && tryFor <= left) {
    start(who, server, tryFor);
    return kj::READY_NOW;
  }
  Stored stored;
  ++drain.storing;
  drain.stored = true;  // also when that fails: it may be there
  const auto forMs = static_cast<uint64_t>(kj::max(tryFor, left) / kj::MILLISECONDS);
  pool_.write({{kDrainPrefix + server, encodeDrain({who, calendarMs_() + forMs})}}, {},
              [this, who, server, tryFor, stops = drain.stops, done = stored.done()](const std::string& why) {
                Drain& its = drains_.at(server);
                --its.storing;
                if (why.empty() && its.stops == stops)
                  start(who, server, tryFor);
                else
                  forgetEnded(server);
                done(why);
              });
  return kj::mv(stored.promise);
}

void Drains::start(const Principal& who, const std::string& server, kj::Duration tryFor) {
  Drain& drain = drains_[server];
  drain.who = who;
  const kj::TimePoint until = timer_.now() + tryFor;
  drain.until = drain.goesOn ? kj::max(drain.until, until) : until;
  drain.goesOn = true;
  if (drain.moving) return;
  drain.said.clear();
  drain.task = round(server).eagerlyEvaluate(nullptr);  // instead of the one that waits for its time
}

kj::Promise<void> Drains::stop(const std::string& server) {
  const auto at = drains_.find(server);
  if (at == drains_.end()) return kj::READY_NOW;
  Drain& drain = at->second;
  ++drain.stops;
  drain.goesOn = false;
  if (!drain.moving) drain.task = nullptr;
  if (!drain.stored) return kj::READY_NOW;
  Stored stored;
  forget(server, stored.done());
  return kj::mv(stored.promise);
}

void Drains::forget(const std::string& server, Journal::Done done) {
  pool_.write({{kDrainPrefix + server, std::nullopt}}, {},
              [this, server, done = std::move(done)](const std::string& why) {
                Drain& drain = drains_.at(server);
                if (why.empty() && !drain.goesOn && drain.storing == 0) drain.stored = false;
                done(why);
              });
}

// Nobody waits for that. A drain that the store keeps is begun once more by the next manager.
void Drains::forgetEnded(const std::string& server) {
  const Drain& drain = drains_.at(server);
  if (!drain.goesOn && drain.stored && drain.storing == 0) forget(server, [](const std::string&) {});
}

// A manager that was started again knows for a while neither which leases run nor where there is room.
kj::Promise<void> Drains::whenServersAreBack() {
  const uint64_t left = pool_.settlesInMs();
  if (left == 0) return kj::READY_NOW;
  return timer_.afterDelay(left * kj::MILLISECONDS).then([this] { return whenServersAreBack(); });
}

kj::Promise<void> Drains::round(const std::string& server) {
  drains_.at(server).moving = pool_.settlesInMs() != 0 || !movable(server).empty();
  return whenServersAreBack()
      .then([this, server] {
        const std::vector<Id> leases = movable(server);
        return moveNext(server, {leases.begin(), leases.end()});
      })
      .then([this, server]() -> kj::Promise<void> {
        Drain& drain = drains_.at(server);
        drain.moving = false;
        drain.goesOn = drain.goesOn && isCordoned(server) && timer_.now() < drain.until;
        if (!drain.goesOn) return forgetEnded(server), kj::READY_NOW;
        return timer_.afterDelay(kBetween).then([this, server]() -> kj::Promise<void> {
          Drain& again = drains_.at(server);
          again.goesOn = isCordoned(server) && timer_.now() <= again.until;
          if (again.goesOn) return round(server);
          return forgetEnded(server), kj::READY_NOW;
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

void Drains::say(Drain& drain, const Id& lease, bool moved, const std::string& said) {
  const std::string text = moved ? said : withoutLease(said, lease);
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
