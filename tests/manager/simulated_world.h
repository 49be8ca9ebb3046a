#pragma once
// The simulated world of one history (world.h): a manager's Pool, with what is around it. Its parts are in
// several files, which the sections of the class name.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pool-manager/awake_clock.h"
#include "pool-manager/pool.h"
#include "tests/manager/simulated_disk.h"
#include "tests/manager/simulated_holder.h"
#include "tests/manager/simulated_server.h"
#include "tests/manager/simulated_wire.h"
#include "tests/manager/world.h"

namespace gpupool::history {

inline constexpr uint64_t kStep = 100, kChaosMs = 25'000, kHealMs = 30'000, kCallMs = 700, kTtlMs = 2000,
                          kRenewMs = 600;
inline constexpr uint64_t kOrderMs = 1800;  // the manager waits so long for a suspension
inline constexpr uint64_t kMemory = uint64_t{8} << 30;
inline constexpr int kHolders = 5;

inline PoolTimes times(bool preempts = false) {
  PoolTimes times;
  if (preempts) times.preempt = {Preemption::revoke, 500, 1500, 200};
  times.beatMs = 400, times.silentMs = 1500, times.minTtlMs = 1000;
  times.driftMs = 200, times.killMs = 500, times.tombstoneMs = 600'000;
  return times;
}

class World final : private PoolEvents {
 public:
  World(uint64_t seed, Bug bug);
  Result run();

 private:
  uint64_t pick(uint64_t below) { return random_() % below; }
  bool chance(uint64_t percent) { return pick(100) < percent; }
  // Of their own numbers: what else happens in the history of a seed does not depend on them.
  uint64_t pickMove(uint64_t below) { return moves_() % below; }
  uint64_t pickReturn(uint64_t below) { return returns_() % below; }
  uint64_t pickTurn(uint64_t below) { return turns_() % below; }
  uint64_t pickMark(uint64_t below) { return marks_() % below; }
  uint64_t pickTarget(uint64_t below) { return targets_() % below; }
  uint64_t pickWish(uint64_t below) { return wishes_() % below; }
  uint64_t pickClaim(uint64_t below) { return claims_() % below; }
  uint64_t pickHold(uint64_t below) { return holds_() % below; }
  // Once in about `ms` of the world's time.
  bool onceIn(uint64_t ms) { return pick(ms) < kStep; }
  Id newId() { return {random_(), random_()}; }
  uint64_t soon() { return now_ + pick(80); }
  Id newTurnId() { return {turns_(), turns_()}; }

  // What happens, and what goes wrong: world.cpp
  void fault(const std::string& text);
  void build();
  static std::string gpuName(int host, uint32_t index);
  void addDevice(SimulatedServer& server, const std::string& gpu);
  void step();
  void chaos();
  void heal();
  void cut(std::unique_ptr<Connection>& connection);
  void killServer(SimulatedServer& server);
  void rebootHost(int host);
  bool managerRuns() const { return pool_ && now_ >= managerStalledUntil_; }
  void startManager();
  void killManager();
  void managerStep();
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
  void failCall(const Call& call, const std::string& why);
  bool take(uint64_t number);
  Connection* connectionOf(const std::string& server);
  uint64_t calendarMs() override;
  uint64_t stoodStillMs() override { return clock_->stoodStillMs(); }
  void wires();
  bool due(const Pipe& pipe) const { return !pipe.messages.empty() && pipe.messages.front().at <= now_; }
  void deliverFirst(Pipe& pipe);

  // PoolEvents: what the manager orders of its servers, and what is told of it: world_orders.cpp
  void grant(const Lease& lease) override;
  void revoke(const ServerLife& server, const Id& id, const std::string&) override;
  void suspend(const std::string& server, const Id& id, uint32_t, const std::string& folder,
               uint64_t order) override;
  void resume(const std::string& server, const Id& id, const std::string& folder, bool running,
              uint64_t order) override;
  void sendOrder(const std::string& server, const Id& id, uint64_t order, bool suspends,
                 const std::string& folder, bool running = false);
  // An order to move, or to reserve devices for that: the server does `carry`, which gives the answer once,
  // and that is told the pool.
  using Answer = std::function<void(bool done)>;
  void sendMoveOrder(const std::string& server, const Call& order, const Answer& tell,
                     const std::function<void(SimulatedServer&, const Answer&)>& carry);
  static Call orderOf(Asks asks, const Id& id, uint64_t order);
  void migrate(const std::string& server, const Id& id, uint32_t, const Lease* target,
               uint64_t order) override;
  void checkpoint(const std::string& server, const Id& id, uint32_t, const std::string&,
                  uint64_t order) override;
  void prepare(const Lease& target, bool here, uint64_t order) override;
  void giveBack(const Lease& target, bool here, uint64_t order) override;
  void settle(const std::string& server, const Id& id, uint64_t order) override;
  void suspended(const Id&, const SuspendResult&) override {}
  void notSuspended(const Id&, const Failure&) override {}
  void resumed(const Id&) override {}
  void notResumed(const Id&, const Failure&) override {}
  void migrated(const Id&, const MigrateResult&) override { ++result_.migrations; }
  void notMigrated(const Id&, const Failure&) override {}
  void checkpointed(const Id&, const CheckpointResult&) override { ++result_.checkpoints; }
  void notCheckpointed(const Id&, const Failure&) override {}
  bool resumeWanted(const Id&) override { return pickMove(100) != 0; }
  void ended(const Id&) override {}

  // Servers: world_servers.cpp
  void endOrders(Running& running);
  void moveSession(Running& running);
  bool arrive(Running& running, const Lease& target);
  bool reserve(SimulatedServer& server, const Lease& target);
  HeldLease filesOf(const SimulatedServer& server, const Running& running) const;
  void beginMove(Running& running, bool suspends, bool files, const std::function<void(bool)>& answer);
  void endMove(Running& running);
  void goIntoFiles(Running& running);
  void comeFromFiles(Running& running);
  std::string admit(SimulatedServer& server, const Lease& lease, int store, bool isTarget = false);
  void serverStep(SimulatedServer& server);
  void connect(SimulatedServer& server);
  void sendBeat(SimulatedServer& server);
  LeaseTurn turnOf(const Lease& lease);
  void closeAtServer(Connection& connection);
  void lostAtServer(Connection& connection);
  void lostAtManager(Connection& connection);
  Id lastJoined(const std::string& name) const;

  // Holders, programs, and somebody who changes things: world_holders.cpp
  void granted(const Lease& lease) override;
  void adopted(const Id& adopter, const Lease& lease) override;
  void failed(const Id& id, const Failure&) override;
  bool wanted(const Id& id) override;
  static bool adopts(const Holder& holder, const Id& adopter);
  void holderStep(Holder& holder);
  void schedule(Holder& holder);
  void programStep(Holder& holder, Program& program);
  void wantTurns(Holder& holder);
  void choose(Holder& holder);
  void operatorStep();
  void cordonStep();
  MoveTarget whereTo();
  void setCordon(const std::string& server, bool cordons);
  LeaseRequest wish(const Holder& holder) const;
  void sendFromHolder(std::function<void()> deliver);

  // The checker: world_checks.cpp
  void checkCordon(const Lease& lease);
  void checkRevoke(const SimulatedServer& server, const ServerLife& life, const Id& id);
  void check();
  struct Gpu {
    std::map<Id, Use> uses;
    uint32_t percent = ~0U;
  };
  void checkGpu(const std::string& uuid, const Gpu& gpu);
  void checkHolds();
  void checkReadopted();
  void goOn(SimulatedServer& server);
  void checkExpiries();
  void checkUnused(const Holder& holder);
  const Holder* holderOf(const Id& id) const;
  static bool isModel(const std::string& gpu, const Device& device);
  void checkModel(const Lease& lease);
  void noteCreated();
  struct Waiting {
    Waiting(LeaseRequest request, uint64_t arrival) : request(std::move(request)), arrival(arrival) {}
    LeaseRequest request;
    uint64_t arrival;
  };
  void checkOrder(const Waiting& served, const Waiting& waits, const LeaseRecord& lease);
  void checkLimits();
  std::string state(const LeaseRecord& record) const;
  void checkQuiet();

  std::mt19937_64 random_, moves_, turns_, marks_, holds_, targets_, wishes_, claims_, returns_;
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
    uint64_t atMs;
  };
  std::map<std::pair<int, Id>, Created> created_;  // leases, by store
  std::set<Id> refused_;                           // by a store, that may have them all the same
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

}  // namespace gpupool::history
