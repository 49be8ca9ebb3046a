// The world from outside: what is built, what goes wrong, the manager and its wires.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tests/manager/simulated_world.h"

namespace gpupool::history {

World::World(uint64_t seed, Bug bug)
    : random_(seed),
      moves_(~seed),
      turns_(seed * 2 + 1),
      marks_(~seed * 2 + 1),
      holds_(seed * 7 + 13),
      targets_(seed * 3 + 7),
      wishes_(~seed * 3 + 7),
      claims_(seed * 5 + 11),
      returns_(~seed * 5 + 11),
      bug_(bug),
      preempts_(bug == Bug::none && seed % 3 == 0) {
  loseStores_ = chance(25);
  // Other bugs are rare enough without it.
  const bool aboutMoves = bug == Bug::hidesSessions || bug == Bug::keepsDevices;
  administrated_ = bug == Bug::losesCordons || aboutMoves || (bug == Bug::none && pickMark(100) < 40);
  schedules_ = bug == Bug::none && pickClaim(100) < 40;
  choosy_ = bug == Bug::setsCalendar || (bug == Bug::none && pickWish(100) < 50);
  roomy_ = aboutMoves || (administrated_ && pickTarget(2) == 0);
  build();
  startManager();
}

Result World::run() {
  for (; fault_.empty() && now_ < start_ + kChaosMs; step()) chaos();
  heal();
  for (const uint64_t end = now_ + kHealMs; fault_.empty() && now_ < end;) step();
  if (fault_.empty()) checkQuiet();
  result_.fault = fault_.empty() ? "" : fault_ + " (at " + std::to_string(now_ - start_) + " ms)";
  pool_.reset();
  return result_;
}

void World::fault(const std::string& text) {
  if (fault_.empty()) fault_ = text;
}

void World::build() {
  const int servers = 1 + static_cast<int>(pick(3));
  for (int i = 0; i < servers; ++i) {
    SimulatedServer& server = servers_.emplace_back();
    server.host = i;
    server.facts.name = std::string(1, static_cast<char>('a' + i));
    server.facts.localPath = "/s";
    server.facts.port = 4790;
    server.facts.bootId = "boot 0 of " + std::to_string(i);
    if (pickTurn(100) < 40 && !roomy_) {
      overcommits_ = true;
      server.overcommitPercent = 100 + static_cast<uint32_t>(1 + pickTurn(8)) * 50;
      server.real = pickTurn(2) == 0;
    }
    server.facts.overcommitPercent = server.overcommitPercent + (bug_ == Bug::overstates ? 100 : 0);
    uint32_t devices = 0;
    for (; devices < 1 + pick(2); ++devices) addDevice(server, gpuName(i, devices));
    for (const uint32_t all = devices + (roomy_ ? 2 : 0); devices < all; ++devices)
      addDevice(server, gpuName(i, devices));
  }
  // Without a common manager's store only the host's own lock keeps two servers apart.
  if (!loseStores_ && chance(40)) {
    ++result_.twins;
    SimulatedServer twin;
    twin.host = 0;
    twin.facts.name = "twin";
    twin.facts.localPath = "/t";
    twin.facts.bootId = servers_[0].facts.bootId;
    twin.facts.overcommitPercent = servers_[0].facts.overcommitPercent;
    twin.overcommitPercent = servers_[0].overcommitPercent;
    twin.real = servers_[0].real;
    addDevice(twin, "0/0");
    if (chance(50)) addDevice(twin, "own");
    servers_.push_back(std::move(twin));
  }
  for (SimulatedServer& server : servers_) server.facts.incarnation = newId();
  holders_.resize(kHolders);
  for (Holder& holder : holders_) holder.nextAt = now_ + pick(2000);
}

std::string World::gpuName(int host, uint32_t index) {
  return std::to_string(host) + "/" + std::to_string(index);
}

void World::addDevice(SimulatedServer& server, const std::string& gpu) {
  Device device;
  device.uuid = ("gpu " + gpu + std::string(16, '.')).substr(0, 16);
  device.name = choosy_ && pickWish(3) == 0 ? "GPU y" : "GPU x";
  device.memoryBytes = kMemory;
  device.ordinal = static_cast<uint32_t>(server.facts.devices.size());
  device.software = !server.real || bug_ == Bug::hidesContexts;
  server.facts.devices.push_back(device);
}

void World::step() {
  now_ += kStep;
  for (SimulatedServer& server : servers_) serverStep(server);
  if (managerRuns()) managerRan_ += kStep, managerStep();
  for (Holder& holder : holders_) holderStep(holder);
  operatorStep();
  cordonStep();
  wires();
  check();
}

void World::chaos() {
  if (now_ >= managerStalledUntil_ && onceIn(9000))
    ++result_.stalls, managerStalledUntil_ = now_ + pick(8000);
  if (pool_ && onceIn(9000)) killManager();
  if (onceIn(6000)) disk_.full = !disk_.full, result_.fullDisks += disk_.full;
  disk_.unsure = chance(2);
  for (SimulatedServer& server : servers_) {
    if (server.runs(now_) && onceIn(12'000)) ++result_.stalls, server.stalledUntil = now_ + pick(6000);
    if (server.alive && onceIn(10'000)) killServer(server);
    if (onceIn(25'000)) rebootHost(server.host);
    if (server.connection >= 0 && onceIn(10'000)) cut(connections_[server.connection]);
  }
  for (Holder& holder : holders_)
    if (onceIn(10'000)) holder.stalledUntil = now_ + pick(5000);
}

void World::heal() {
  healed_ = true;
  disk_.full = disk_.unsure = false;
  managerStalledUntil_ = 0;
  if (!pool_) managerStartAt_ = now_;
  for (SimulatedServer& server : servers_) {
    server.stalledUntil = 0;
    server.startAt = std::min(server.startAt, now_ + 1000);
  }
  for (auto& one : connections_) one->cutUntil = one->breakManagerAt = one->breakServerAt = 0;
  for (Holder& holder : holders_) holder.dead = true;
}

void World::cut(std::unique_ptr<Connection>& connection) {
  ++result_.partitions;
  connection->cutUntil = now_ + pick(6000);
  connection->breakManagerAt = now_ + 1000 + pick(2000);
  connection->breakServerAt = now_ + 1000 + pick(2000);
}

void World::killServer(SimulatedServer& server) {
  ++result_.kills;
  server.alive = false;
  server.startAt = now_ + pick(4000);
  for (auto& [id, one] : server.leases) {
    if (one.held != Id{} && one.moving.is == Moving::Is::suspended) continue;  // no worker is here
    server.orphans.push_back({one.lease, one.moving, now_ + pick(4000)});
    // Where leases take turns, where it moves and where it ends, nothing goes on.
    const bool rests =
        one.moving.is == Moving::Is::running && !one.target && one.orders.empty() && !one.closing;
    if (rests && server.overcommitPercent == 100 && pickReturn(100) < 60) {
      Orphan& orphan = server.orphans.back();
      orphan.comesBack = true;
      orphan.sessions = one.sessions;
      orphan.goneAt = now_ + pickReturn(30'000);
    }
    if (one.target) server.orphans.push_back({*one.target, one.moving, now_ + pickTarget(4000)});
  }
  server.leases.clear();
  server.readopted.clear();
  if (server.connection >= 0) closeAtServer(*connections_[server.connection]);
  server.connection = -1;
}

void World::rebootHost(int host) {
  const std::string boot = "boot " + std::to_string(++boots_) + " of " + std::to_string(host);
  for (SimulatedServer& server : servers_) {
    if (server.host != host) continue;
    if (server.alive) killServer(server);
    server.orphans.clear();
    server.startAt = now_ + 500 + pick(3000);
    server.facts.bootId = boot;
  }
}

void World::startManager() {
  clock_.emplace([this] { return now_; }, bug_ == Bug::countsGaps ? 3'600'000 : 250);
  disk_.forgets = bug_ == Bug::forgetsStore;
  disk_.losesCordons = bug_ == Bug::losesCordons;
  disk_.losesHolds = bug_ == Bug::forgetsHolds;
  store_ = makeStore(std::make_unique<OnDisk>(disk_), WritesOn::deliver);
  // Only where its machine was started anew does a manager look at the calendar.
  const std::string bootId = bug_ == Bug::setsCalendar ? newId().text() : "manager";
  try {
    pool_.emplace(*store_, static_cast<PoolEvents&>(*this), times(preempts_),
                  PoolStart{bootId, clock_->now(), 1'700'000'000 + now_ / 1000, newId().text()});
    // What was never stored may come to be again.
    std::erase_if(created_, [&](const auto& one) { return !pool_->leases().contains(one.first.second); });
  } catch (const std::runtime_error&) {  // the disk is full
    pool_.reset();
    managerStartAt_ = now_ + 500;
  }
}

void World::killManager() {
  ++result_.restarts;
  if (chance(30)) {  // it dies while it writes: nobody hears what it wrote
    disk_.unsure = true;
    store_->deliver();
    disk_.unsure = false;
  }
  pool_.reset();
  store_.reset();
  calls_.clear();
  revoking_.clear();
  toManager_.messages.clear();
  waiting_.clear();
  managerStartAt_ = now_ + pick(3000);
  for (auto& one : connections_) {
    one->openAtManager = false;
    one->toManager.messages.clear();
    one->toServer.send(now_ + pick(100), [this, at = one.get()] { lostAtServer(*at); });
  }
  if (loseStores_ && chance(40)) {
    ++result_.lostStores;
    ++stores_;
    disk_.medium = makeMemoryMedium();
    cordoned_.clear();
  }
}

// As after a stop: the timers are due first, then what waits in the sockets.
void World::managerStep() {
  const uint64_t now = clock_->now();
  pool_->tick(now);
  noteCreated();
  for (auto at = calls_.begin(); at != calls_.end();) {
    const Call call = *at;
    if (now < call.untilMs) {
      ++at;
      continue;
    }
    at = calls_.erase(at);
    failCall(call, "timed out");
    noteCreated();
  }
  if (chance(70)) store_->deliver();
  noteCreated();
  checkExpiries();
  checkLimits();
  checkHolds();
  checkReadopted();
  if (const std::string wrong = pool_->inventoryFault(now); !wrong.empty())
    fault("the kept inventory: " + wrong);
}

void World::failCall(const Call& call, const std::string& why) {
  switch (call.asks) {
    case Asks::grant:
      return pool_->grantFailed(call.id, why, false, clock_->now());
    case Asks::suspend:
      return pool_->suspendFailed(call.id, call.order, why, clock_->now());
    case Asks::resume:
      return pool_->resumeFailed(call.id, call.order, why, false, clock_->now());
    case Asks::migrate:
      return pool_->migrateFailed(call.id, call.order, why, false, clock_->now());
    case Asks::checkpoint:
      return pool_->checkpointFailed(call.id, call.order, why, clock_->now());
    case Asks::prepare:
      return pool_->prepareFailed(call.id, call.order, why, false, clock_->now());
    case Asks::giveBack:
      return pool_->returnFailed(call.id, call.order, why, clock_->now());
    case Asks::settle:
      return pool_->settleFailed(call.id, call.order, clock_->now());
    case Asks::revoke:
      revoking_.erase({call.server, call.id});
      return pool_->revokeFailed(call.server, call.id, clock_->now());
  }
}

// The answer to a call that is still waited for.
bool World::take(uint64_t number) {
  return std::erase_if(calls_, [&](const Call& call) { return call.number == number; }) != 0;
}

Connection* World::connectionOf(const std::string& server) {
  const auto at = controls_.find(server);
  return at != controls_.end() && at->second->openAtManager ? at->second : nullptr;
}

uint64_t World::calendarMs() {
  const uint64_t set = bug_ == Bug::setsCalendar ? result_.restarts * 3'600'000 : 0;
  return 1'700'000'000'000 + now_ + set;
}

void World::wires() {
  if (managerRuns())
    for (; !toManager_.messages.empty() && toManager_.messages.front().at <= now_;) deliverFirst(toManager_);
  for (size_t i = 0; i < connections_.size(); ++i) {
    Connection& connection = *connections_[i];
    if (connection.breakManagerAt != 0 && now_ >= connection.breakManagerAt && now_ < connection.cutUntil) {
      connection.breakManagerAt = 0;
      if (managerRuns()) lostAtManager(connection);
      connection.toServer.send(connection.cutUntil, [this, &connection] { lostAtServer(connection); });
    }
    if (connection.breakServerAt != 0 && now_ >= connection.breakServerAt && now_ < connection.cutUntil) {
      connection.breakServerAt = 0;
      lostAtServer(connection);
      connection.toServer.messages.clear();
      connection.toManager.send(connection.cutUntil, [this, &connection] { lostAtManager(connection); });
    }
    if (now_ < connection.cutUntil) continue;
    while (managerRuns() && due(connection.toManager)) {
      if (connection.openAtManager)
        deliverFirst(connection.toManager);
      else
        connection.toManager.messages.pop_front();
    }
    while (servers_[connection.server].runs(now_) && due(connection.toServer)) {
      if (connection.openAtServer)
        deliverFirst(connection.toServer);
      else
        connection.toServer.messages.pop_front();
    }
  }
}

void World::deliverFirst(Pipe& pipe) {
  const auto deliver = std::move(pipe.messages.front().deliver);
  pipe.messages.pop_front();
  deliver();
  noteCreated();
}

Result runHistory(uint64_t seed, Bug bug) { return World(seed, bug).run(); }

}  // namespace gpupool::history
