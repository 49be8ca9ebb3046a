#pragma once
// A pool with a clock, a store and servers made by hand, for its tests.

#include <memory>
#include <optional>
#include <set>

#include "pool-manager/pool.h"
#include "pool-manager/store/medium.h"

#include "catch.h"
#include "support.h"

namespace gpupool::test {

using namespace gpupool::pool;

inline constexpr uint64_t kGiB = uint64_t{1} << 30;
inline const Principal kAdmin;
inline const Principal kAlice{Principal::Role::user, "alice"}, kBob{Principal::Role::user, "bob"};
inline const ServerLife kA{"a", {1, 0}}, kB{"b", {1, 0}};  // server("a", 1)

struct Recorder final : PoolEvents {
  void grant(const Lease& lease) override { grants.push_back(lease); }
  void revoke(const ServerLife& server, const Id& id, const std::string& reason) override {
    revokes.push_back({server.name, id, reason, server.incarnation});
  }
  void suspend(const std::string&, const Id& id, uint32_t drainMs, const std::string& folder,
               uint64_t order) override {
    suspends.push_back({id, order, drainMs, {}, {}, false, folder});
  }
  // `here`: as of a lease that runs.
  void resume(const std::string&, const Id& id, const std::string& folder, bool running,
              uint64_t order) override {
    resumes.push_back({id, order, 0, {}, {}, running, folder});
  }
  void migrate(const std::string& server, const Id& id, uint32_t drainMs, const Lease* target,
               uint64_t order) override {
    migrates.push_back({id, order, drainMs, server, target != nullptr ? *target : Lease()});
  }
  void checkpoint(const std::string& server, const Id& id, uint32_t drainMs, const std::string& folder,
                  uint64_t order) override {
    checkpoints.push_back({id, order, drainMs, server, {}, false, folder});
  }
  void prepare(const Lease& target, bool here, uint64_t order) override {
    prepares.push_back({target.id, order, 0, target.server.name, target, here});
  }
  void giveBack(const Lease& target, bool here, uint64_t order) override {
    returns.push_back({target.id, order, 0, target.server.name, target, here});
  }
  void settle(const std::string& server, const Id& id, uint64_t order) override {
    settles.push_back({id, order, 0, server});
  }
  void keep(const ServerLife& standby, const Lease& lease) override { keeps.emplace_back(standby, lease); }
  void dropKept(const ServerLife& standby, const Id& id) override { drops.emplace_back(standby, id); }
  void suspended(const Id& id, const SuspendResult& result) override { results[id] = result; }
  void notSuspended(const Id& id, const Failure& failure) override { suspendFailures[id] = failure.text; }
  void resumed(const Id& id) override { running.insert(id); }
  void notResumed(const Id& id, const Failure& failure) override { resumeFailures[id] = failure.text; }
  void migrated(const Id& id, const MigrateResult& result) override { moved[id] = result; }
  void notMigrated(const Id& id, const Failure& failure) override { moveFailures[id] = failure.text; }
  void checkpointed(const Id& id, const CheckpointResult& result) override { written[id] = result; }
  void notCheckpointed(const Id& id, const Failure& failure) override { writeFailures[id] = failure.text; }
  bool resumeWanted(const Id& id) override { return !gone.contains(id); }
  void granted(const Lease& lease) override { leases[lease.id] = lease; }
  void adopted(const Id& adopter, const Lease& lease) override { adoptions[adopter] = lease; }
  void failed(const Id& id, const Failure& failure) override { failures[id] = failure; }
  void ended(const Id& id) override { over.insert(id); }
  bool wanted(const Id& id) override { return !gone.contains(id); }
  void superseded() override { isSuperseded = true; }
  bool hasEnded(const LocalProcess& holder) override { return dead.contains(holder.pid); }
  uint64_t calendarMs() override { return calendar(); }
  uint64_t stoodStillMs() override { return stoodStill; }

  struct Revoke {
    std::string server;
    Id id;
    std::string reason;
    Id incarnation;
  };
  struct Order {
    Id id;
    uint64_t number;
    uint32_t drainMs;
    std::string server = {};
    Lease target = {};
    bool here = false;
    std::string folder = {};
  };
  std::vector<Order> suspends, resumes, migrates, checkpoints, prepares, returns, settles;
  std::map<Id, SuspendResult> results;
  std::map<Id, MigrateResult> moved;
  std::map<Id, CheckpointResult> written;
  std::map<Id, std::string> suspendFailures, resumeFailures, moveFailures, writeFailures;
  std::set<Id> running;
  std::vector<Lease> grants;
  std::vector<std::pair<ServerLife, Lease>> keeps;
  std::vector<std::pair<ServerLife, Id>> drops;
  std::vector<Revoke> revokes;
  std::map<Id, Lease> leases, adoptions;  // these: by adopter
  std::map<Id, Failure> failures;
  std::set<Id> over, gone;
  std::set<int> dead;
  bool isSuperseded = false;
  std::function<uint64_t()> calendar = pool::calendarMs;
  uint64_t stoodStill = 0;
};

inline Server server(const std::string& name, uint64_t incarnation, uint32_t devices = 1) {
  Server facts;
  facts.name = name;
  facts.incarnation = {incarnation, 0};
  facts.localPath = "/nowhere";
  facts.port = 4790;
  for (uint32_t i = 0; i < devices; ++i) {
    Device device;
    device.ordinal = i;
    device.name = "GPU";
    device.uuid = (name + std::string(16, '.')).substr(0, 15) + static_cast<char>('a' + i);
    device.memoryBytes = 80 * kGiB;
    facts.devices.push_back(device);
  }
  return facts;
}

inline LeaseRequest request(uint64_t id, uint32_t waitMs = 0, uint64_t memory = 0, uint32_t count = 1) {
  LeaseRequest wish;
  wish.id = {id, id};
  wish.waitMs = waitMs;
  wish.memoryBytes = memory;
  wish.deviceCount = count;
  wish.ttlMs = 10'000;
  wish.holder = "holder" + std::to_string(id);
  return wish;
}

// A pool with one server of one device, at time 1,000,000.
struct Fixture {
  Fixture() : store(makeMemoryStore()) {
    events.calendar = [this] { return calendarS * 1000 + now - 1'000'000; };
    restart();
  }
  void restart() { pool.pool.reset(), start(); }
  void start() {
    pool.store = store.get();
    pool.pool.emplace(*store, events, times, PoolStart{boot, now, calendarS, std::to_string(++starts)});
  }
  void joinAndBeat(const Server& facts, const std::vector<Id>& leases = {},
                   const std::vector<DeviceReport>& reports = {}) {
    pool->join(kAdmin, facts, reports, now);
    REQUIRE(pool->beat(facts.name, facts.incarnation, leases, {}, 1, now));
  }
  void beat(uint64_t incarnation, const std::vector<Id>& leases,
            const std::vector<SuspendedLease>& suspended = {}) {
    REQUIRE(pool->beat("a", {incarnation, 0}, leases, {}, 1, now, suspended));
  }
  Lease leaseNow(uint64_t id) {
    pool->request(kAdmin, request(id), now);
    REQUIRE(!events.grants.empty());
    pool->granted({id, id}, now);
    REQUIRE(events.leases.contains({id, id}));
    return events.leases.at({id, id});
  }
  bool has(uint64_t id) const { return events.leases.contains({id, id}); }
  std::string failure(uint64_t id) const {
    const auto at = events.failures.find({id, id});
    return at == events.failures.end() ? "" : at->second.text;
  }

  uint64_t now = 1'000'000, calendarS = 1'700'000'000;
  std::string boot = "boot";
  PoolTimes times;
  std::unique_ptr<Store> store;
  Recorder events;
  int starts = 0;
  struct Delivering {
    // After every call the store has written, and told.
    struct Call {
      Pool* operator->() const { return pool; }
      ~Call() noexcept(false) {
        while (store->deliver()) {
        }
      }
      Pool* pool;
      Store* store;
    };
    Call operator->() { return {&*pool, store}; }
    std::optional<Pool> pool;
    Store* store = nullptr;
  } pool;
};

// A disk that is full when it is told to be; and one that fails when it has written.
class Disk final : public Medium {
 public:
  std::vector<Entry> range(const std::string& prefix) override { return medium_->range(prefix); }
  std::vector<Outcome> apply(std::span<const Transaction> group) override {
    if (full) throw std::runtime_error("store: database or disk is full");
    auto outcomes = medium_->apply(group);
    if (unsure) throw std::runtime_error("store: disk I/O error");
    return outcomes;
  }
  bool full = false, unsure = false;

 private:
  std::unique_ptr<Medium> medium_ = makeMemoryMedium();
};

struct DiskFixture : Fixture {
  DiskFixture() {
    auto medium = std::make_unique<Disk>();
    disk = medium.get();
    pool.pool.reset();
    store = makeStore(std::move(medium), WritesOn::deliver);
    start();
  }
  Disk* disk;
};

}  // namespace gpupool::test
