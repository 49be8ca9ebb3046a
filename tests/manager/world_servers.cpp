// The simulated servers: what they admit, move, suspend and hold, and what they tell the manager.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tests/manager/simulated_world.h"

namespace gpupool::history {

void World::endOrders(Running& running) {
  for (const MoveOrder& order : std::exchange(running.orders, {})) order.answer(false);
}

// The next one, with some luck; between workers of the same devices it changes nothing.
void World::moveSession(Running& running) {
  MoveOrder& order = running.orders.front();
  order.nextAt = now_ + pickTarget(600);
  const bool stays = order.target.devices.empty() || running.sessions == 0;
  const bool moved = stays || (pickTarget(100) < 80 && arrive(running, order.target));
  if (moved && !stays) {
    ++result_.arrivals;
    if (--running.sessions != 0) return;
  }
  const auto answer = std::move(order.answer);
  running.orders.pop_front();
  if (!running.orders.empty()) running.orders.front().nextAt = now_ + pickTarget(600);
  answer(moved);
}

bool World::arrive(Running& running, const Lease& target) {
  if (running.lease.server.name == target.server.name) {
    if (!running.target || running.target->epoch != target.epoch) return false;
    ++running.onTarget;
    return true;
  }
  for (SimulatedServer& server : servers_) {
    const auto there = server.leases.find(target.id);
    if (server.facts.name != target.server.name || !server.runs(now_) || there == server.leases.end())
      continue;
    if (there->second.closing || there->second.lease.epoch != target.epoch) return false;
    ++there->second.sessions;
    return true;
  }
  return false;
}

bool World::reserve(SimulatedServer& server, const Lease& target) {
  const auto at = server.leases.find(target.id);
  if (at == server.leases.end() || at->second.closing) return false;
  if (at->second.target) return at->second.target->epoch == target.epoch;
  for (const auto& device : target.devices)
    if (target.epoch <= server.epochs[device.info.uuid]) return false;
  for (const auto& device : target.devices) server.epochs[device.info.uuid] = target.epoch;
  at->second.target = target;
  return true;
}

// As its server tells it.
HeldLease World::filesOf(const SimulatedServer& server, const Running& running) const {
  if (running.held != Id{}) return {running.held, "monday", server.facts.name};
  if (bug_ == Bug::earlyHolds && running.moving.intoFiles) return {{1, 1}, "monday", server.facts.name};
  return {};
}

void World::beginMove(Running& running, bool suspends, bool files, const std::function<void(bool)>& answer) {
  using Is = Moving::Is;
  Moving& moving = running.moving;
  if (moving.is == (suspends ? Is::suspended : Is::running))
    return answer(!suspends || files == (running.held != Id{}));
  if (moving.is == (suspends ? Is::resuming : Is::suspending)) return answer(false);
  if (moving.is == Is::resuming && files) return moving.answers.push_back(answer);  // behind the first one
  if (moving.is == (suspends ? Is::running : Is::suspended)) {
    moving.is = suspends ? Is::suspending : Is::resuming;
    moving.doneAt = now_ + pickMove(2000);
    moving.intoFiles = suspends && files;
    if (suspends) moving.kept.assign(running.lease.devices.size(), pickMove(2) == 0 ? 0 : kMemory / 16);
    if (files) moving.kept.assign(running.lease.devices.size(), 0);
  }
  if (bug_ == Bug::earlySuspends && suspends && !files) return answer(true);
  if (bug_ == Bug::earlyHolds && suspends && files) return answer(true);
  moving.answers.push_back(answer);
}

// With some luck.
void World::endMove(Running& running) {
  using Is = Moving::Is;
  Moving& moving = running.moving;
  const bool suspends = moving.is == Is::suspending, done = pickMove(100) < 85;
  if (done) ++(suspends ? result_.suspends : result_.resumes);
  moving.is = suspends == done ? Is::suspended : Is::running;
  if (done && suspends && moving.intoFiles) goIntoFiles(running);
  if (done && !suspends && running.held != Id{}) comeFromFiles(running);
  moving.intoFiles = false;
  for (const auto& answer : std::exchange(moving.answers, {})) answer(done);
}

void World::goIntoFiles(Running& running) {
  ++result_.holds;
  running.held = {holds_(), holds_()};
  files_[running.lease.id] = {running.held, std::exchange(running.sessions, 0)};
}

// It is here and nowhere else, and as it has left.
void World::comeFromFiles(Running& running) {
  ++result_.restores;
  const Files& files = files_[running.lease.id];
  if (files.checkpoint != running.held) fault("a lease is restored from files that it is not held in");
  running.held = {};
  running.sessions = files.sessions;
  wasHeld_.erase({stores_, running.lease.id});
  if (running.sessions == 0 || stores_ != 0) return;
  for (SimulatedServer& server : servers_)
    for (auto& [id, other] : server.leases)
      if (id == running.lease.id && &other != &running && other.sessions != 0)
        fault("a lease is restored that runs elsewhere");
}

std::string World::admit(SimulatedServer& server, const Lease& lease, int store, bool isTarget) {
  if (const auto at = server.leases.find(lease.id); at != server.leases.end())
    return at->second.closing ? "it is being revoked" : "";
  for (const auto& device : lease.devices)
    if (lease.epoch <= server.epochs[device.info.uuid]) return "its epoch is too low";
  if (lease.held) wentOn_.insert({store, lease.id});
  const auto [before, first] = granted_.try_emplace({store, lease.id}, lease.epoch);
  if (!first && before->second != lease.epoch && !isTarget && !wentOn_.contains({store, lease.id}))
    fault("a request was granted twice");
  for (const Holder& holder : holders_)
    if (holder.id == lease.id && (holder.terms.sharePercent != lease.terms.sharePercent ||
                                  holder.terms.priority != lease.terms.priority))
      fault("a lease was granted on other terms than were asked for");
  for (const auto& device : lease.devices) server.epochs[device.info.uuid] = lease.epoch;
  Running& running = server.leases[lease.id];
  running.lease = lease;
  running.sessions = isTarget ? 0 : static_cast<uint32_t>(pickTarget(3));
  if (lease.held) {
    running.sessions = 0;
    running.held = lease.held.checkpoint;
    running.moving.is = Moving::Is::suspended;
    running.moving.kept.assign(lease.devices.size(), 0);
  }
  result_.leases += !isTarget && !lease.held;
  result_.crowded += std::any_of(lease.devices.begin(), lease.devices.end(), [&](const auto& device) {
    uint64_t sum = 0;
    for (const auto& [id, use] : server.on(device.info.uuid)) sum += use.now;
    return sum > kMemory;
  });
  return "";
}

void World::serverStep(SimulatedServer& server) {
  std::erase_if(server.orphans, [&](const Orphan& one) { return now_ >= one.goneAt; });
  if (!server.alive && now_ >= server.startAt) {
    server.alive = true;
    server.stalledUntil = 0;
    server.facts.incarnation = newId();
    goOn(server);
    server.connectAt = now_ + pick(300);
  }
  if (!server.runs(now_)) return;
  for (auto& [id, one] : server.leases) {
    if (!one.closing && !one.orders.empty() && now_ >= one.orders.front().nextAt) moveSession(one);
    const bool moves = one.moving.is == Moving::Is::suspending || one.moving.is == Moving::Is::resuming;
    if (moves && !one.closing && now_ >= one.moving.doneAt) endMove(one);
  }
  for (auto at = server.leases.begin(); at != server.leases.end();) {
    if (!at->second.closing || now_ < at->second.goneAt) {
      ++at;
      continue;
    }
    const auto confirm = std::move(at->second.confirm);
    at = server.leases.erase(at);
    for (const auto& one : confirm) one();
  }
  // A beat without an answer: the manager has given the connection up.
  if (server.connection >= 0 && !connections_[server.connection]->openAtManager && onceIn(1000)) {
    closeAtServer(*connections_[server.connection]);
    server.connection = -1;
  }
  if (server.connection < 0 && now_ >= server.connectAt && pool_) connect(server);
  if (server.connection >= 0 && server.joined && now_ >= server.beatAt) sendBeat(server);
}

// With what has not ended while it was away.
void World::goOn(SimulatedServer& server) {
  std::erase_if(server.orphans, [&](const Orphan& one) {
    if (!one.comesBack) return false;
    Running& running = server.leases[one.lease.id];
    running.lease = one.lease;
    running.sessions = one.sessions;
    server.readopted[one.lease.id] = one.lease.epoch;
    ++result_.readopted;
    return true;
  });
}

namespace {

// Every other connection of a server tells that NVLink joins all of its GPUs.
fabric::Fabric fabricOf(int connection, size_t gpus) {
  fabric::Fabric fabric;
  for (size_t i = 0; i < gpus && connection % 2 == 0; ++i)
    fabric.nvlinks.push_back(((uint64_t{1} << gpus) - 1) & ~(uint64_t{1} << i));
  return fabric;
}

}  // namespace

void World::connect(SimulatedServer& server) {
  connections_.push_back(std::make_unique<Connection>());
  Connection& connection = *connections_.back();
  connection.server = static_cast<size_t>(&server - servers_.data());
  server.connection = static_cast<int>(connections_.size()) - 1;
  std::vector<DeviceReport> reports;
  for (const Device& device : server.facts.devices) {
    DeviceReport& report = reports.emplace_back();
    report.highestEpoch = server.epochs[device.uuid];
    if (bug_ == Bug::hidesWorkers) continue;
    for (const auto& [id, use] : server.on(device.uuid))
      if (bug_ != Bug::hidesReturns || !server.readopted.contains(id)) report.running.push_back(id);
  }
  auto readopted = server.readopted;
  std::erase_if(readopted, [&](const auto& one) { return !server.leases.contains(one.first); });
  if (bug_ == Bug::hidesReturns) readopted.clear();
  connection.toManager.send(
      soon(), [this, &connection, facts = server.facts, reports, readopted, number = server.connection] {
        try {
          pool_->join({}, facts, reports, clock_->now(), readopted);
          pool_->setFabric(facts.name, fabricOf(number, facts.devices.size()));
          controls_[facts.name] = &connection;
          connection.toServer.send(soon(), [this, &connection] {  // its beats follow the answer
            if (SimulatedServer& at = servers_[connection.server];
                at.connection >= 0 && connections_[at.connection].get() == &connection)
              at.joined = true;
          });
        } catch (const std::invalid_argument&) {
          connection.openAtManager = false;
          connection.toServer.send(soon(), [this, &connection] { lostAtServer(connection); });
        }
      });
  server.joined = false;
  server.beatAt = now_;
}

void World::sendBeat(SimulatedServer& server) {
  server.beatAt = now_ + times().beatMs;
  Connection& connection = *connections_[server.connection];
  std::vector<Id> active;
  std::vector<SuspendedLease> suspended;
  std::vector<LeaseTurn> turns;
  for (const auto& [id, one] : server.leases) {
    if (one.closing) continue;
    if (bug_ == Bug::hidesReturns && server.readopted.contains(id)) continue;
    active.push_back(id);
    if (one.moving.is == Moving::Is::suspended ||
        (bug_ == Bug::hidesResuming && one.moving.is == Moving::Is::resuming))
      suspended.push_back({id, one.moving.kept, filesOf(server, one)});
    else if (server.overcommitPercent > 100)
      turns.push_back(turnOf(one.lease));
  }
  std::vector<std::string> problems;
  for (const Device& device : server.facts.devices) {
    std::string problem;
    for (const Orphan& orphan : server.orphans)
      for (const auto& used : orphan.lease.devices)
        if (used.info.uuid == device.uuid && bug_ != Bug::hidesWorkers) problem = "an old worker runs";
    problems.push_back(problem);
  }
  connection.toManager.send(
      soon(), [this, &connection, facts = server.facts, active, problems, suspended, turns] {
        const auto control = controls_.find(facts.name);
        if (control != controls_.end() && control->second == &connection &&
            pool_->beat(facts.name, facts.incarnation, active, problems, 0, clock_->now(), suspended, turns))
          return;
        connection.openAtManager = false;  // it is to join again
        connection.toServer.send(soon(), [this, &connection] { lostAtServer(connection); });
      });
}

// Wherever it is: the manager is told, and does nothing about it, but for what it keeps.
LeaseTurn World::turnOf(const Lease& lease) {
  LeaseTurn turn{pickTurn(20) == 0 ? newTurnId() : lease.id,
                 static_cast<TurnPlace>(pickTurn(3)),
                 pickTurn(10'000),
                 static_cast<uint32_t>(pickTurn(10)),
                 "",
                 {}};
  if (pickTurn(3) == 0) turn.kept.assign(lease.devices.size(), pickTurn(kMemory / 16));
  return turn;
}

void World::closeAtServer(Connection& connection) {
  connection.openAtServer = false;
  connection.toServer.messages.clear();
  connection.toManager.send(soon(), [this, &connection] { lostAtManager(connection); });
}

void World::lostAtServer(Connection& connection) {
  connection.openAtServer = false;
  SimulatedServer& server = servers_[connection.server];
  if (server.connection < 0 || connections_[server.connection].get() != &connection) return;
  server.connection = -1;
  server.connectAt = now_ + pick(1000);
}

void World::lostAtManager(Connection& connection) {
  if (!connection.openAtManager || !pool_) return;
  connection.openAtManager = false;
  std::vector<Call> broken;
  for (const Call& call : calls_)
    if (call.connection == &connection) broken.push_back(call);
  std::erase_if(calls_, [&](const Call& call) { return call.connection == &connection; });
  for (const auto& [name, at] : controls_)
    if (at == &connection) pool_->left(name, lastJoined(name), false, clock_->now());
  std::erase_if(controls_, [&](const auto& one) { return one.second == &connection; });
  for (const Call& call : broken) failCall(call, "disconnected");
}

Id World::lastJoined(const std::string& name) const {
  const auto at = pool_->servers().find(name);
  return at == pool_->servers().end() ? Id{} : at->second.facts.incarnation;
}

}  // namespace gpupool::history
