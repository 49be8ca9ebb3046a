#include "tests/manager/world.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

#include "pool-manager/awake_clock.h"
#include "pool-manager/claims.h"
#include "pool-manager/pool.h"
#include "pool-manager/store/medium.h"
#include "tests/manager/simulated_server.h"

namespace gpupool::history {
namespace {

using namespace gpupool::pool;

constexpr uint64_t kStep = 100, kChaosMs = 25'000, kHealMs = 30'000, kCallMs = 700, kTtlMs = 2000,
                   kRenewMs = 600;
constexpr uint64_t kOrderMs = 1800;  // the manager waits so long for a suspension
constexpr uint64_t kMemory = uint64_t{8} << 30;
constexpr int kHolders = 5;

PoolTimes times(bool preempts = false) {
  PoolTimes times;
  if (preempts) times.preempt = {Preemption::revoke, 500, 1500, 200};
  times.beatMs = 400, times.silentMs = 1500, times.minTtlMs = 1000;
  times.driftMs = 200, times.killMs = 500, times.tombstoneMs = 600'000;
  return times;
}

// The disk outlives the manager's process.
struct Disk {
  std::unique_ptr<Medium> medium = makeMemoryMedium();
  bool full = false, unsure = false, forgets = false, losesCordons = false, losesHolds = false;
};

class OnDisk final : public Medium {
 public:
  explicit OnDisk(Disk& disk) : disk_(disk) {}
  std::vector<Entry> range(const std::string& prefix) override { return disk_.medium->range(prefix); }
  std::vector<Outcome> apply(std::span<const Transaction> group) override {
    if (disk_.full) throw std::runtime_error("store: the disk is full");
    if (disk_.forgets && !group.empty() && ++writes_ > 3) {
      std::vector<Outcome> lies;
      lies.reserve(group.size());
      for (size_t i = 0; i < group.size(); ++i) lies.push_back({Outcome::Kind::committed, ++revision_, {}});
      return lies;
    }
    if (disk_.losesCordons)
      return applyWithout(group, [](const Write& write) { return write.key.starts_with("cordon/"); });
    if (disk_.losesHolds)
      return applyWithout(group, [](const Write& write) {
        return write.key.starts_with("lease/") && write.value &&
               decodeLease(*write.value, "manager").state == LeaseState::held;
      });
    auto outcomes = disk_.medium->apply(group);
    if (disk_.unsure) throw std::runtime_error("store: I/O error");
    return outcomes;
  }

 private:
  template <class Loses>
  std::vector<Outcome> applyWithout(std::span<const Transaction> group, Loses loses) {
    std::vector<Transaction> kept(group.begin(), group.end());
    for (Transaction& one : kept) std::erase_if(one.writes, loses);
    return disk_.medium->apply(kept);
  }

  Disk& disk_;
  int writes_ = 0;
  uint64_t revision_ = 1'000'000;
};

// One direction of a connection: first in, first out.
struct Pipe {
  struct Message {
    uint64_t at;
    std::function<void()> deliver;
  };
  std::deque<Message> messages;
  void send(uint64_t at, std::function<void()> deliver) {
    if (!messages.empty()) at = std::max(at, messages.back().at);
    messages.push_back({at, std::move(deliver)});
  }
};

struct Connection {
  size_t server;
  bool openAtManager = true, openAtServer = true;
  uint64_t cutUntil = 0, breakManagerAt = 0, breakServerAt = 0;  // a partition
  Pipe toManager, toServer;
};

// One that uses a claim for a while, and perhaps again.
struct Program {
  enum class Is { away, asking, using_ } is = Is::away;
  Id adopter;
  uint64_t nextAt = 0, askAt = 0, renewAt = 0, untilAt = 0;
  uint64_t heardAt = 0;  // when the manager was told the last time
  bool dies = false;
};

struct Holder {
  enum class Is { idle, asking, holding, done } is = Is::idle;
  Id id;
  uint64_t nextAt = 0, askAt = 0, renewAt = 0, untilAt = 0, stalledUntil = 0, healthySince = 0,
           managerRan = 0;
  bool dies = false, dead = false;
  uint64_t memory = 0;
  uint32_t devices = 1, waitMs = 0;
  TurnTerms terms = {};
  std::string key;
  std::string gpu = {}, tenant = {};
  Policy policy = Policy::pack;
  uint64_t limitMs = 0;
  std::string job = {};  // it is a scheduler, and the lease a claim, which these use
  std::array<Program, 2> programs = {};
};

class World final : private PoolEvents {
 public:
  World(uint64_t seed, Bug bug)
      : random_(seed),
        moves_(~seed),
        turns_(seed * 2 + 1),
        marks_(~seed * 2 + 1),
        holds_(seed * 7 + 13),
        targets_(seed * 3 + 7),
        wishes_(~seed * 3 + 7),
        claims_(seed * 5 + 11),
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

  Result run() {
    for (; fault_.empty() && now_ < start_ + kChaosMs; step()) chaos();
    heal();
    for (const uint64_t end = now_ + kHealMs; fault_.empty() && now_ < end;) step();
    if (fault_.empty()) checkQuiet();
    result_.fault = fault_.empty() ? "" : fault_ + " (at " + std::to_string(now_ - start_) + " ms)";
    pool_.reset();
    return result_;
  }

 private:
  // --- the world
  uint64_t pick(uint64_t below) { return random_() % below; }
  bool chance(uint64_t percent) { return pick(100) < percent; }
  // Of their own numbers: what else happens in the history of a seed does not depend on them.
  uint64_t pickMove(uint64_t below) { return moves_() % below; }
  uint64_t pickTurn(uint64_t below) { return turns_() % below; }
  uint64_t pickMark(uint64_t below) { return marks_() % below; }
  uint64_t pickTarget(uint64_t below) { return targets_() % below; }
  uint64_t pickWish(uint64_t below) { return wishes_() % below; }
  uint64_t pickClaim(uint64_t below) { return claims_() % below; }
  uint64_t pickHold(uint64_t below) { return holds_() % below; }
  // Once in about `ms` of the world's time.
  bool onceIn(uint64_t ms) { return pick(ms) < kStep; }
  void fault(const std::string& text) {
    if (fault_.empty()) fault_ = text;
  }

  void build() {
    const int servers = 1 + static_cast<int>(pick(3));
    for (int i = 0; i < servers; ++i) {
      SimulatedServer& server = servers_.emplace_back();
      server.host = i;
      server.facts.name = std::string(1, static_cast<char>('a' + i));
      server.facts.localPath = "/s";
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

  static std::string gpuName(int host, uint32_t index) {
    return std::to_string(host) + "/" + std::to_string(index);
  }
  void addDevice(SimulatedServer& server, const std::string& gpu) {
    Device device;
    device.uuid = ("gpu " + gpu + std::string(16, '.')).substr(0, 16);
    device.name = choosy_ && pickWish(3) == 0 ? "GPU y" : "GPU x";
    device.memoryBytes = kMemory;
    device.ordinal = static_cast<uint32_t>(server.facts.devices.size());
    device.software = !server.real || bug_ == Bug::hidesContexts;
    server.facts.devices.push_back(device);
  }

  Id newId() { return {random_(), random_()}; }

  void step() {
    now_ += kStep;
    for (SimulatedServer& server : servers_) serverStep(server);
    if (managerRuns()) managerRan_ += kStep, managerStep();
    for (Holder& holder : holders_) holderStep(holder);
    operatorStep();
    cordonStep();
    wires();
    check();
  }

  // --- what goes wrong
  void chaos() {
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

  void heal() {
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

  void cut(std::unique_ptr<Connection>& connection) {
    ++result_.partitions;
    connection->cutUntil = now_ + pick(6000);
    connection->breakManagerAt = now_ + 1000 + pick(2000);
    connection->breakServerAt = now_ + 1000 + pick(2000);
  }

  void killServer(SimulatedServer& server) {
    ++result_.kills;
    server.alive = false;
    server.startAt = now_ + pick(4000);
    for (auto& [id, one] : server.leases) {
      if (one.held != Id{} && one.moving.is == Moving::Is::suspended) continue;  // no worker is here
      server.orphans.push_back({one.lease, one.moving, now_ + pick(4000)});
      if (one.target) server.orphans.push_back({*one.target, one.moving, now_ + pickTarget(4000)});
    }
    server.leases.clear();
    if (server.connection >= 0) closeAtServer(*connections_[server.connection]);
    server.connection = -1;
  }

  void rebootHost(int host) {
    const std::string boot = "boot " + std::to_string(++boots_) + " of " + std::to_string(host);
    for (SimulatedServer& server : servers_) {
      if (server.host != host) continue;
      if (server.alive) killServer(server);
      server.orphans.clear();
      server.startAt = now_ + 500 + pick(3000);
      server.facts.bootId = boot;
    }
  }

  // --- the manager
  bool managerRuns() const { return pool_ && now_ >= managerStalledUntil_; }

  void startManager() {
    clock_.emplace([this] { return now_; }, bug_ == Bug::countsGaps ? 3'600'000 : 250);
    disk_.forgets = bug_ == Bug::forgetsStore;
    disk_.losesCordons = bug_ == Bug::losesCordons;
    disk_.losesHolds = bug_ == Bug::forgetsHolds;
    store_ = makeStore(std::make_unique<OnDisk>(disk_), WritesOn::deliver);
    try {
      pool_.emplace(*store_, static_cast<PoolEvents&>(*this), times(preempts_),
                    PoolStart{"manager", clock_->now(), 1'700'000'000 + now_ / 1000, newId().text()});
      // What was never stored may come to be again.
      std::erase_if(created_, [&](const auto& one) { return !pool_->leases().contains(one.first.second); });
    } catch (const std::runtime_error&) {  // the disk is full
      pool_.reset();
      managerStartAt_ = now_ + 500;
    }
  }

  void killManager() {
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
  void managerStep() {
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
    if (const std::string wrong = pool_->inventoryFault(now); !wrong.empty())
      fault("the kept inventory: " + wrong);
  }

  enum class Asks { grant, revoke, suspend, resume, migrate, checkpoint, prepare, giveBack, settle };
  struct Call {
    uint64_t number;
    Asks asks;
    Id id;
    const Connection* connection;
    uint64_t untilMs;
    uint64_t order = 0;
    ServerLife server = {};
  };
  void failCall(const Call& call, const std::string& why) {
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
  bool take(uint64_t number) {
    return std::erase_if(calls_, [&](const Call& call) { return call.number == number; }) != 0;
  }

  Connection* connectionOf(const std::string& server) {
    const auto at = controls_.find(server);
    return at != controls_.end() && at->second->openAtManager ? at->second : nullptr;
  }

  void grant(const Lease& lease) override {
    Connection* connection = connectionOf(lease.server.name);
    if (connection == nullptr) return;
    if (lastJoined(lease.server.name) != lease.server.incarnation)
      return fault("a grant for another life of its server");
    checkCordon(lease);
    checkModel(lease);
    const uint64_t number = ++callNumber_;
    calls_.push_back({number, Asks::grant, lease.id, connection, clock_->now() + kCallMs});
    connection->toServer.send(soon(), [this, connection, lease, number, store = stores_] {
      const std::string refusal = admit(servers_[connection->server], lease, store);
      connection->toManager.send(soon(), [this, number, id = lease.id, refusal] {
        if (!take(number)) return;
        if (refusal.empty())
          pool_->granted(id, clock_->now());
        else
          pool_->grantFailed(id, refusal, true, clock_->now());
      });
    });
  }

  void checkCordon(const Lease& lease) {
    if (const auto cordoned = cordoned_.find(lease.server.name);
        cordoned != cordoned_.end() && !cordoned->second.contains(lease.id))
      fault("a lease came to be on a cordoned server");
  }

  // A manager that has lost its store may take another lease for this one.
  void checkRevoke(const SimulatedServer& server, const ServerLife& life, const Id& id) {
    const auto record = pool_->leases().find(id);
    const auto there = server.leases.find(id);
    if (record != pool_->leases().end() && record->second.ending == LeaseState::revoked &&
        record->second.reason.starts_with("preempted"))
      ++result_.noticed;
    if (stores_ != 0 || record == pool_->leases().end() || !record->second.runs() ||
        there == server.leases.end() || server.facts.life() != life)
      return;
    if (there->second.sessions + there->second.onTarget != 0)
      fault("sessions are ended although their lease goes on");
  }

  void revoke(const ServerLife& server, const Id& id, const std::string&) override {
    Connection* connection = connectionOf(server.name);
    if (connection == nullptr || !revoking_.insert({server, id}).second) return;
    checkRevoke(servers_[connection->server], server, id);
    const uint64_t number = ++callNumber_;
    calls_.push_back({number, Asks::revoke, id, connection, clock_->now() + kCallMs, 0, server});
    const auto confirm = [this, connection, server, id, number] {
      connection->toManager.send(soon(), [this, server, id, number] {
        if (!take(number)) return;
        revoking_.erase({server, id});
        pool_->revoked(server, id, clock_->now());
      });
    };
    connection->toServer.send(soon(), [this, connection, id, confirm] {
      SimulatedServer& at = servers_[connection->server];
      const auto lease = at.leases.find(id);
      if (lease == at.leases.end()) return confirm();
      if (!lease->second.closing) lease->second.goneAt = now_ + pick(1500);
      lease->second.closing = true;
      endOrders(lease->second);
      if (bug_ == Bug::believesRevoke) return confirm();
      lease->second.confirm.push_back(confirm);
    });
  }

  void suspend(const std::string& server, const Id& id, uint32_t, const std::string& folder,
               uint64_t order) override {
    result_.preempted += pool_->leases().at(id).idleReason.starts_with("preempted");
    sendOrder(server, id, order, true, folder);
  }
  void resume(const std::string& server, const Id& id, const std::string& folder, uint64_t order) override {
    sendOrder(server, id, order, false, folder);
  }
  void sendOrder(const std::string& server, const Id& id, uint64_t order, bool suspends,
                 const std::string& folder) {
    Connection* connection = connectionOf(server);
    if (connection == nullptr) return fault("an order for a server that is not connected");
    const uint64_t number = ++callNumber_;
    calls_.push_back(
        {number, suspends ? Asks::suspend : Asks::resume, id, connection, clock_->now() + kOrderMs, order});
    const auto answer = [this, connection, id, number, order, suspends](bool done) {
      if (!connection->openAtServer) return;
      SimulatedServer& at = servers_[connection->server];
      const auto lease = at.leases.find(id);
      const auto kept = lease == at.leases.end() ? std::vector<uint64_t>() : lease->second.moving.kept;
      const HeldLease held = lease == at.leases.end() ? HeldLease() : filesOf(at, lease->second);
      connection->toManager.send(now_ + pickMove(80), [this, id, number, order, suspends, done, kept, held] {
        if (!take(number)) return;
        const uint64_t now = clock_->now();
        if (suspends && done) pool_->suspendDone(id, order, {kept, 0, 0, 0, held}, now);
        if (suspends && !done) pool_->suspendFailed(id, order, "it cannot", now);
        if (!suspends && done) pool_->resumeDone(id, order, now);
        if (!suspends && !done) pool_->resumeFailed(id, order, "it cannot", true, now);
      });
    };
    connection->toServer.send(now_ + pickMove(80), [this, connection, id, suspends, folder, answer] {
      SimulatedServer& at = servers_[connection->server];
      const auto lease = at.leases.find(id);
      if (lease == at.leases.end() || lease->second.closing || !lease->second.orders.empty())
        return answer(false);
      if (folder.empty() != (lease->second.held == Id{}) && !(suspends && !folder.empty()))
        return answer(!suspends && lease->second.moving.is == Moving::Is::running);
      if (suspends && !folder.empty() && (lease->second.target || at.overcommitPercent > 100))
        return answer(false);
      beginMove(lease->second, suspends, !folder.empty(), answer);
    });
  }

  // An order to move, or to reserve devices for that: the server does `carry`, which gives the answer once,
  // and that is told the pool.
  using Answer = std::function<void(bool done)>;
  void sendMoveOrder(const std::string& server, const Call& order, const Answer& tell,
                     const std::function<void(SimulatedServer&, const Answer&)>& carry) {
    Connection* connection = connectionOf(server);
    if (connection == nullptr) return fault("an order for a server that is not connected");
    const uint64_t number = ++callNumber_;
    Call& call = calls_.emplace_back(order);
    call.number = number, call.connection = connection, call.untilMs = clock_->now() + kOrderMs;
    const Answer answer = [this, connection, number, tell](bool done) {
      if (!connection->openAtServer) return;
      connection->toManager.send(now_ + pickTarget(300), [this, number, tell, done] {
        if (take(number)) tell(done);
      });
    };
    connection->toServer.send(now_ + pickTarget(80), [this, connection, carry, answer] {
      carry(servers_[connection->server], answer);
    });
  }
  static Call orderOf(Asks asks, const Id& id, uint64_t order) {
    return {0, asks, id, nullptr, 0, order, {}};
  }

  void migrate(const std::string& server, const Id& id, uint32_t, const Lease* target,
               uint64_t order) override {
    const auto tell = [this, id, order](bool done) {
      if (done) return pool_->migrateDone(id, order, {}, clock_->now());
      pool_->migrateFailed(id, order, "it cannot", true, clock_->now());
    };
    const Lease to = target != nullptr ? *target : Lease();
    sendMoveOrder(server, orderOf(Asks::migrate, id, order), tell,
                  [this, id, to](SimulatedServer& at, const Answer& answer) {
                    const auto lease = at.leases.find(id);
                    if (lease == at.leases.end() || lease->second.closing ||
                        lease->second.moving.is != Moving::Is::running)
                      return answer(false);
                    lease->second.orders.push_back({to, now_ + pickTarget(600), answer});
                  });
  }

  void checkpoint(const std::string& server, const Id& id, uint32_t, const std::string&,
                  uint64_t order) override {
    const auto tell = [this, id, order](bool done) {
      if (done) return pool_->checkpointDone(id, order, {}, clock_->now());
      pool_->checkpointFailed(id, order, "it cannot", clock_->now());
    };
    sendMoveOrder(server, orderOf(Asks::checkpoint, id, order), tell,
                  [id](SimulatedServer& at, const Answer& answer) {
                    const auto lease = at.leases.find(id);
                    answer(lease != at.leases.end() && !lease->second.closing &&
                           lease->second.moving.is == Moving::Is::running);
                  });
  }

  void endOrders(Running& running) {
    for (const MoveOrder& order : std::exchange(running.orders, {})) order.answer(false);
  }

  // The next one, with some luck; between workers of the same devices it changes nothing.
  void moveSession(Running& running) {
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

  bool arrive(Running& running, const Lease& target) {
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

  void prepare(const Lease& target, bool here, uint64_t order) override {
    checkCordon(target);
    checkModel(target);
    wentOn_.insert({stores_, target.id});
    const auto tell = [this, id = target.id, order](bool done) {
      if (done) return pool_->prepareDone(id, order, clock_->now());
      pool_->prepareFailed(id, order, "no", true, clock_->now());
    };
    sendMoveOrder(target.server.name, orderOf(Asks::prepare, target.id, order), tell,
                  [this, target, here, store = stores_](SimulatedServer& at, const Answer& answer) {
                    if (!here) return answer(admit(at, target, store, true).empty());
                    answer(reserve(at, target));
                  });
  }

  bool reserve(SimulatedServer& server, const Lease& target) {
    const auto at = server.leases.find(target.id);
    if (at == server.leases.end() || at->second.closing) return false;
    if (at->second.target) return at->second.target->epoch == target.epoch;
    for (const auto& device : target.devices)
      if (target.epoch <= server.epochs[device.info.uuid]) return false;
    for (const auto& device : target.devices) server.epochs[device.info.uuid] = target.epoch;
    at->second.target = target;
    return true;
  }

  void giveBack(const Lease& target, bool here, uint64_t order) override {
    const auto tell = [this, id = target.id, order](bool unused) {
      pool_->returned(id, order, unused, clock_->now());
    };
    sendMoveOrder(target.server.name, orderOf(Asks::giveBack, target.id, order), tell,
                  [this, id = target.id, here](SimulatedServer& server, const Answer& answer) {
                    const auto at = server.leases.find(id);
                    if (at == server.leases.end() || bug_ == Bug::hidesSessions) return answer(true);
                    if (!here) return answer(at->second.sessions == 0);
                    if (at->second.onTarget == 0) at->second.target.reset();
                    answer(at->second.onTarget == 0);
                  });
  }

  void settle(const std::string& server, const Id& id, uint64_t order) override {
    const auto tell = [this, id, order](bool done) {
      if (done) return pool_->settled(id, order, clock_->now());
      pool_->settleFailed(id, order, clock_->now());
    };
    sendMoveOrder(server, orderOf(Asks::settle, id, order), tell,
                  [this, id](SimulatedServer& at, const Answer& answer) {
                    const auto lease = at.leases.find(id);
                    if (lease == at.leases.end() || !lease->second.target || bug_ == Bug::keepsDevices)
                      return answer(true);
                    Running& running = lease->second;
                    if (running.sessions != 0) return answer(false);
                    running.lease = *std::exchange(running.target, std::nullopt);
                    running.sessions = std::exchange(running.onTarget, 0);
                    answer(true);
                  });
  }

  // As its server tells it.
  HeldLease filesOf(const SimulatedServer& server, const Running& running) const {
    if (running.held != Id{}) return {running.held, "monday", server.facts.name};
    if (bug_ == Bug::earlyHolds && running.moving.intoFiles) return {{1, 1}, "monday", server.facts.name};
    return {};
  }

  void beginMove(Running& running, bool suspends, bool files, const std::function<void(bool)>& answer) {
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
  void endMove(Running& running) {
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

  void goIntoFiles(Running& running) {
    ++result_.holds;
    running.held = {holds_(), holds_()};
    files_[running.lease.id] = {running.held, std::exchange(running.sessions, 0)};
  }

  // It is here and nowhere else, and as it has left.
  void comeFromFiles(Running& running) {
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

  void suspended(const Id&, const SuspendResult&) override {}
  void notSuspended(const Id&, const Failure&) override {}
  void resumed(const Id&) override {}
  void notResumed(const Id&, const Failure&) override {}
  void migrated(const Id&, const MigrateResult&) override { ++result_.migrations; }
  void notMigrated(const Id&, const Failure&) override {}
  uint64_t calendarMs() override {
    const uint64_t set = bug_ == Bug::setsCalendar ? result_.restarts * 3'600'000 : 0;
    return 1'700'000'000'000 + now_ + set;
  }
  void checkpointed(const Id&, const CheckpointResult&) override { ++result_.checkpoints; }
  void notCheckpointed(const Id&, const Failure&) override {}
  bool resumeWanted(const Id&) override { return pickMove(100) != 0; }

  void granted(const Lease& lease) override {
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
  void adopted(const Id& adopter, const Lease& lease) override {
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
  void failed(const Id& id, const Failure&) override {
    waiting_.erase(id);
    for (Holder& holder : holders_)
      for (Program& program : holder.programs)
        if (program.adopter == id && program.is == Program::Is::asking)
          program.is = Program::Is::away, program.nextAt = now_ + 500;
    for (Holder& holder : holders_)
      if (holder.id == id && holder.is == Holder::Is::asking) holder.is = Holder::Is::done;
  }
  void ended(const Id&) override {}
  bool wanted(const Id& id) override {
    for (const Holder& holder : holders_)
      if (!holder.dead && ((holder.id == id && holder.is == Holder::Is::asking) || adopts(holder, id)))
        return true;
    return probing_;
  }

  static bool adopts(const Holder& holder, const Id& adopter) {
    return std::any_of(holder.programs.begin(), holder.programs.end(), [&](const Program& one) {
      return one.adopter == adopter && one.is == Program::Is::asking;
    });
  }

  // --- servers
  uint64_t soon() { return now_ + pick(80); }

  std::string admit(SimulatedServer& server, const Lease& lease, int store, bool isTarget = false) {
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

  void serverStep(SimulatedServer& server) {
    std::erase_if(server.orphans, [&](const Orphan& one) { return now_ >= one.goneAt; });
    if (!server.alive && now_ >= server.startAt) {
      server.alive = true;
      server.stalledUntil = 0;
      server.facts.incarnation = newId();
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

  void connect(SimulatedServer& server) {
    connections_.push_back(std::make_unique<Connection>());
    Connection& connection = *connections_.back();
    connection.server = static_cast<size_t>(&server - servers_.data());
    server.connection = static_cast<int>(connections_.size()) - 1;
    std::vector<DeviceReport> reports;
    for (const Device& device : server.facts.devices) {
      DeviceReport& report = reports.emplace_back();
      report.highestEpoch = server.epochs[device.uuid];
      if (bug_ == Bug::hidesWorkers) continue;
      for (const auto& [id, use] : server.on(device.uuid)) report.running.push_back(id);
    }
    connection.toManager.send(soon(), [this, &connection, facts = server.facts, reports] {
      try {
        pool_->join({}, facts, reports, clock_->now());
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

  void sendBeat(SimulatedServer& server) {
    server.beatAt = now_ + times().beatMs;
    Connection& connection = *connections_[server.connection];
    std::vector<Id> active;
    std::vector<SuspendedLease> suspended;
    std::vector<LeaseTurn> turns;
    for (const auto& [id, one] : server.leases) {
      if (one.closing) continue;
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
    connection.toManager.send(soon(), [this, &connection, facts = server.facts, active, problems, suspended,
                                       turns] {
      const auto control = controls_.find(facts.name);
      if (control != controls_.end() && control->second == &connection &&
          pool_->beat(facts.name, facts.incarnation, active, problems, 0, clock_->now(), suspended, turns))
        return;
      connection.openAtManager = false;  // it is to join again
      connection.toServer.send(soon(), [this, &connection] { lostAtServer(connection); });
    });
  }

  // Wherever it is: the manager is told, and does nothing about it, but for what it keeps.
  LeaseTurn turnOf(const Lease& lease) {
    LeaseTurn turn{pickTurn(20) == 0 ? newTurnId() : lease.id,
                   static_cast<TurnPlace>(pickTurn(3)),
                   pickTurn(10'000),
                   static_cast<uint32_t>(pickTurn(10)),
                   "",
                   {}};
    if (pickTurn(3) == 0) turn.kept.assign(lease.devices.size(), pickTurn(kMemory / 16));
    return turn;
  }
  Id newTurnId() { return {turns_(), turns_()}; }

  void closeAtServer(Connection& connection) {
    connection.openAtServer = false;
    connection.toServer.messages.clear();
    connection.toManager.send(soon(), [this, &connection] { lostAtManager(connection); });
  }
  void lostAtServer(Connection& connection) {
    connection.openAtServer = false;
    SimulatedServer& server = servers_[connection.server];
    if (server.connection < 0 || connections_[server.connection].get() != &connection) return;
    server.connection = -1;
    server.connectAt = now_ + pick(1000);
  }
  void lostAtManager(Connection& connection) {
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
  Id lastJoined(const std::string& name) const {
    const auto at = pool_->servers().find(name);
    return at == pool_->servers().end() ? Id{} : at->second.facts.incarnation;
  }

  // --- holders: a wire each, to whichever manager lives
  void holderStep(Holder& holder) {
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
  void schedule(Holder& holder) {
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

  void programStep(Holder& holder, Program& program) {
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
  void wantTurns(Holder& holder) {
    constexpr uint64_t kSizes[] = {0, kMemory / 8, kMemory / 4, kMemory / 2, kMemory / 8 * 7};
    holder.memory = kSizes[pickTurn(std::size(kSizes))];
    holder.terms.sharePercent = pickTurn(2) == 0 ? 0 : static_cast<uint32_t>(1 + pickTurn(80));
    holder.terms.priority = static_cast<Priority>(pickTurn(3));
  }

  // Models, classes, tenants, time limits.
  void choose(Holder& holder) {
    constexpr const char* kModels[] = {"", "", "gpu x", "GPU Y", "memory>=1GiB,gpu"};
    holder.gpu = kModels[pickWish(std::size(kModels))];
    holder.terms.priority = static_cast<Priority>(pickWish(3));
    holder.tenant = pickWish(2) == 0 ? "alice" : "bob";
    holder.policy = pickWish(2) == 0 ? Policy::pack : Policy::spread;
    holder.limitMs = pickWish(2) == 0 ? 0 : 500 + pickWish(6000);
  }

  // Somebody who suspends and resumes leases as he likes, not only when that makes sense.
  void operatorStep() {
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
  void cordonStep() {
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
  MoveTarget whereTo() {
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

  void setCordon(const std::string& server, bool cordons) {
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

  LeaseRequest wish(const Holder& holder) const {
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

  void sendFromHolder(std::function<void()> deliver) {
    if (pool_) toManager_.send(soon(), std::move(deliver));
  }

  // --- wires
  void wires() {
    if (managerRuns())
      for (; !toManager_.messages.empty() && toManager_.messages.front().at <= now_;)
        deliverFirst(toManager_);
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
  bool due(const Pipe& pipe) const { return !pipe.messages.empty() && pipe.messages.front().at <= now_; }
  void deliverFirst(Pipe& pipe) {
    const auto deliver = std::move(pipe.messages.front().deliver);
    pipe.messages.pop_front();
    deliver();
    noteCreated();
  }

  // --- the checker
  void check() {
    if (!pool_ && managerStartAt_ <= now_) startManager();
    std::map<std::string, Gpu> gpus;
    for (const SimulatedServer& server : servers_)
      for (const Device& device : server.facts.devices)
        for (const auto& [id, use] : server.on(device.uuid)) {
          Gpu& gpu = gpus[device.uuid];
          gpu.uses[id] = use;
          gpu.percent = std::min(gpu.percent, server.overcommitPercent);
        }
    for (const auto& [uuid, gpu] : gpus) checkGpu(uuid, gpu);
  }

  struct Gpu {
    std::map<Id, Use> uses;
    uint32_t percent = ~0U;
  };
  void checkGpu(const std::string& uuid, const Gpu& gpu) {
    uint64_t sum = 0, aside = 0, most = 0, shares = 0;
    for (const auto& [id, use] : gpu.uses) {
      sum += use.now, aside += use.aside, shares += use.share;
      if (use.resident != 0) most = std::max(most, use.resident - use.aside);
    }
    if (sum > kMemory / 100 * gpu.percent + kMemory % 100 * gpu.percent / 100)
      fault(gpu.percent == 100 ? "a GPU was granted twice: " + uuid
                               : "more of a GPU was granted than its server overcommits: " + uuid);
    if (gpu.percent == 100) return;
    if (aside + most > kMemory) fault("a lease cannot have its turn beside what the others keep: " + uuid);
    if (shares > 100) fault("more of a GPU's time was promised than there is: " + uuid);
  }

  // What is in files does not end with a server or a manager.
  void checkHolds() {
    for (const auto& [id, record] : pool_->leases()) {
      if (record.hold && !record.runs() && record.ending == LeaseState::lost)
        fault("a lease was lost although it is in files: " + record.reason);
      if (record.state == LeaseState::held) wasHeld_.insert({stores_, id});
      if (record.runs() && !record.hold && wasHeld_.contains({stores_, id}))
        fault("a lease that is in files is not known to be there any more");
    }
  }

  // Who was well for a whole TTL has renewed, and the manager had only to read it. Judged when the lease
  // expires: a holder that was stopped may be well again before the manager, stopped too, has told it. And
  // the manager, too, must have run for so long meanwhile: one that is stopped shortly before a deadline, and
  // goes on behind it, looks at its clock before it reads what the holder wrote when it was well again.
  void checkExpiries() {
    for (const Holder& holder : holders_) {
      if (holder.is != Holder::Is::holding) continue;
      const auto lease = pool_->leases().find(holder.id);
      if (lease == pool_->leases().end() || lease->second.state != LeaseState::revoking ||
          lease->second.ending != LeaseState::expired || !expired_.insert(holder.id).second)
        continue;
      const auto created = created_.find({stores_, holder.id});
      if (holder.limitMs != 0 && created != created_.end() &&
          now_ + kStep >= created->second.atMs + holder.limitMs)
        continue;  // its time is over
      if (!holder.job.empty()) {
        checkUnused(holder);
        continue;
      }
      if (!holder.dead && now_ >= holder.stalledUntil && holder.healthySince + kTtlMs + kStep < now_ &&
          holder.managerRan + kTtlMs + kStep < managerRan_)
        fault("a lease expired although its holder renewed it");
    }
  }

  // A claim has ended since nobody has used it for its TTL.
  void checkUnused(const Holder& holder) {
    ++result_.unused;
    for (const Program& one : holder.programs)
      if (one.is == Program::Is::using_ && now_ < one.heardAt + kTtlMs)
        fault("a claim ended although a program used it");
  }

  // A lease of which more is known than its id: its request.
  const Holder* holderOf(const Id& id) const {
    for (const Holder& holder : holders_)
      if (holder.id == id) return &holder;
    return nullptr;
  }
  static bool isModel(const std::string& gpu, const Device& device) {
    return gpu.empty() || gpu.starts_with("memory") || (gpu == "gpu x") == (device.name == "GPU x");
  }
  void checkModel(const Lease& lease) {
    const Holder* holder = holderOf(lease.id);
    for (const LeasedDevice& one : lease.devices)
      if (holder != nullptr && !isModel(holder->gpu, one.info))
        fault("a lease has another model than it named");
  }

  // After whatever the pool has done: the leases that are new.
  void noteCreated() {
    if (!pool_ || !choosy_ || probing_) return;
    for (const auto& [id, record] : pool_->leases()) {
      if (!created_.try_emplace({stores_, id}, Created{now_, managerRan_}).second) continue;
      const auto request = waiting_.find(id);
      if (request == waiting_.end()) continue;
      for (const auto& [other, before] : waiting_)
        if (!pool_->leases().contains(other)) checkOrder(request->second, before, record);
    }
    std::erase_if(waiting_, [&](const auto& one) { return pool_->leases().contains(one.first); });
  }

  struct Waiting {
    Waiting(LeaseRequest request, uint64_t arrival) : request(std::move(request)), arrival(arrival) {}
    LeaseRequest request;
    uint64_t arrival;
  };
  // One of a higher class, or of the same tenant and earlier, waits: so the lease has only what that one
  // could never have, or ends some day.
  void checkOrder(const Waiting& served, const Waiting& waits, const LeaseRecord& lease) {
    const LeaseRequest &now = served.request, &before = waits.request;
    const Holder* holder = holderOf(before.id);
    if (holder == nullptr || holder->is != Holder::Is::asking || holder->dead || now.limitMs != 0) return;
    const bool precedes = before.turns.priority != now.turns.priority
                              ? before.turns.priority > now.turns.priority
                              : before.tenant == now.tenant && waits.arrival < served.arrival;
    if (!precedes) return;
    if (!lease.isPlaced()) return;
    const ServerRecord& server = pool_->servers().at(lease.server().name);
    std::set<std::string> could;
    for (size_t i = 0; i < server.facts.devices.size(); ++i)
      if (server.duplicates.at(i).empty() && isModel(before.gpu, server.facts.devices[i]))
        could.insert(server.facts.devices[i].uuid);
    if (could.size() < before.deviceCount) return;
    ++result_.ordered;
    for (const LeasedDevice& one : lease.primary().devices)
      if (could.contains(one.info.uuid)) fault("a request was served before another one that precedes it");
  }

  // By how long the manager has run since: its clock stands still only when it is stopped.
  void checkLimits() {
    for (const auto& [id, record] : pool_->leases()) {
      const auto created = created_.find({stores_, id});
      const Holder* holder = holderOf(id);
      if (created == created_.end() || holder == nullptr || holder->limitMs == 0) continue;
      if (record.runs() && managerRan_ > created->second.managerRan + holder->limitMs + 2 * kStep)
        fault("a lease outlives its time limit");
      if (record.runs() || record.reason.find("time limit") == std::string::npos) continue;
      if (limited_.insert(id).second) ++result_.limited;
      if (now_ + kStep < created->second.atMs + holder->limitMs) fault("a lease ended before its time limit");
    }
  }

  // For whoever looks for the fault.
  std::string state(const LeaseRecord& record) const {
    if (!record.isPlaced()) return ", nowhere";
    const auto server = pool_->servers().find(record.server().name);
    if (server == pool_->servers().end()) return ", which is not there";
    std::string text = server->second.connected ? ", connected" : ", away";
    if (server->second.facts.incarnation != record.server().incarnation) text += ", of an earlier life";
    if (!record.ordered.empty()) text += ", told";
    if (anyGone(record)) text += ", gone";
    if (record.closing) text += ", closing";
    for (const LeasedDevice& device : record.primary().devices)
      for (const Device& one : server->second.facts.devices)
        if (one.uuid == device.info.uuid && !one.problem.empty()) text += ", " + one.problem;
    return text;
  }

  // All faults are over, and all holders are gone: so are the leases, and every GPU can be had.
  void checkQuiet() {
    if (!pool_) return fault("the manager did not start again");
    for (const auto& [id, record] : pool_->leases())
      return fault("a lease did not end: it is " + std::string(name(record.state)) + ", on server " +
                   (record.isPlaced() ? record.server().name : "-") + state(record));
    // How many leases may have the whole of it: by turns, if they keep nothing there.
    std::map<std::string, size_t> gpus;
    for (const SimulatedServer& server : servers_) {
      if (!server.leases.empty()) return fault("a server still holds a lease");
      for (const Device& device : server.facts.devices)
        gpus[device.uuid] = device.software ? server.facts.overcommitPercent / 100 : 1;
    }
    size_t whole = 0;
    for (const auto& [uuid, count] : gpus) whole += count;
    probing_ = true;
    for (size_t i = 0; i < whole + 1; ++i) {
      LeaseRequest request;
      request.id = newId();
      pool_->request({}, request, clock_->now());
    }
    if (pool_->leases().size() != whole)
      fault("of " + std::to_string(gpus.size()) + " GPUs that " + std::to_string(whole) +
            " leases could have, " + std::to_string(pool_->leases().size()) + " can when all is over");
  }

  std::mt19937_64 random_, moves_, turns_, marks_, holds_, targets_, wishes_, claims_;
  const Bug bug_;
  const bool preempts_;  // requests of higher classes take devices from lower ones
  bool loseStores_ = false, probing_ = false, overcommits_ = false, healed_ = false, administrated_ = false;
  bool roomy_ = false;      // there are GPUs for leases that move
  bool schedules_ = false;  // some leases are claims
  bool choosy_ = false;     // GPUs are of two models, and requests name models, classes and time limits
  const uint64_t start_ = 1'000'000;
  uint64_t now_ = start_, managerStalledUntil_ = 0, managerStartAt_ = 0, managerRan_ = 0;
  int boots_ = 0, stores_ = 0;
  Disk disk_;
  std::unique_ptr<Store> store_;
  std::optional<AwakeClock> clock_;
  std::vector<SimulatedServer> servers_;
  std::vector<Holder> holders_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<std::string, Connection*> controls_;
  std::vector<Call> calls_;
  std::set<std::pair<ServerLife, Id>> revoking_;
  std::set<Id> expired_;
  std::map<std::string, std::set<Id>> cordoned_;  // by server: the leases that there were then
  std::map<std::string, uint64_t> cordonOrders_;  // by server: how many orders to cordon it or not there were
  uint64_t callNumber_ = 0, arrivals_ = 0, jobs_ = 0;
  std::map<Id, Waiting> waiting_;  // requests that this life of the manager has read, and not answered
  struct Created {
    uint64_t atMs, managerRan;
  };
  std::map<std::pair<int, Id>, Created> created_;  // leases, by store
  std::set<Id> limited_;
  std::optional<Holder> lastJob_;  // as it was asked for
  Pipe toManager_;
  struct Files {
    Id checkpoint;
    uint32_t sessions = 0;
  };
  std::map<Id, Files> files_;                       // by lease: the latest
  std::set<std::pair<int, Id>> wasHeld_;            // and has not been restored since, by store
  std::map<std::pair<int, Id>, uint64_t> granted_;  // epoch by store and request
  std::set<std::pair<int, Id>> wentOn_;  // those that were given a target, and are granted there again
  std::string fault_;
  Result result_;
  std::optional<Pool> pool_;  // last: it goes before what it tells
};

}  // namespace

Result runHistory(uint64_t seed, Bug bug) { return World(seed, bug).run(); }

}  // namespace gpupool::history
