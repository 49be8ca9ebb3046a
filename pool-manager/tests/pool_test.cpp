// Leases against a clock and a server made by hand.
#include "pool-manager/pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <set>

#include "catch.h"
#include "pool-manager/store/medium.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
const Principal kAdmin;

struct Recorder final : PoolEvents {
  void grant(const Lease& lease) override { grants.push_back(lease); }
  void revoke(const std::string& server, const Id& id, const std::string& reason) override {
    revokes.push_back({server, id, reason});
  }
  void granted(const Lease& lease) override { leases[lease.id] = lease; }
  void failed(const Id& id, const Failure& failure) override { failures[id] = failure; }
  void ended(const Id& id) override { over.insert(id); }
  bool wanted(const Id& id) override { return !gone.contains(id); }
  void superseded() override { isSuperseded = true; }
  bool hasEnded(const LocalProcess& holder) override { return dead.contains(holder.pid); }

  struct Revoke {
    std::string server;
    Id id;
    std::string reason;
  };
  std::vector<Lease> grants;
  std::vector<Revoke> revokes;
  std::map<Id, Lease> leases;
  std::map<Id, Failure> failures;
  std::set<Id> over, gone;
  std::set<int> dead;
  bool isSuperseded = false;
};

Server server(const std::string& name, uint64_t incarnation, uint32_t devices = 1) {
  Server facts;
  facts.name = name;
  facts.incarnation = {incarnation, 0};
  facts.localPath = "/nowhere";
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

LeaseRequest request(uint64_t id, uint32_t waitMs = 0, uint64_t memory = 0, uint32_t count = 1) {
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
  Fixture() : store(makeMemoryStore()) { restart(); }
  void restart() { pool.pool.reset(), start(); }
  void start() {
    pool.store = store.get();
    pool.pool.emplace(*store, events, times, PoolStart{"boot", now, calendarS, std::to_string(++starts)});
  }
  void joinAndBeat(const Server& facts, std::vector<Id> leases = {}, std::vector<DeviceReport> reports = {}) {
    pool->join(kAdmin, facts, reports, now);
    REQUIRE(pool->beat(facts.name, facts.incarnation, leases, {}, 1, now));
  }
  void beat(uint64_t incarnation, std::vector<Id> leases) {
    REQUIRE(pool->beat("a", {incarnation, 0}, leases, {}, 1, now));
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

}  // namespace

TEST_CASE_METHOD(Fixture, "a lease is given after the server took it, with a key and an epoch of its own") {
  joinAndBeat(server("a", 1, 2));
  pool->request(kAdmin, request(1), now);
  REQUIRE(events.grants.size() == 1);
  CHECK_FALSE(has(1));
  pool->granted({1, 1}, now);
  const Lease first = leaseNow(2);
  CHECK(events.leases.at({1, 1}).key.size() == 32);
  CHECK(first.key != events.leases.at({1, 1}).key);
  CHECK(first.epoch > events.leases.at({1, 1}).epoch);
  CHECK(first.devices.at(0).info.ordinal != events.leases.at({1, 1}).devices.at(0).info.ordinal);
}

TEST_CASE_METHOD(Fixture, "the same id gives the same lease, and after its end no other") {
  joinAndBeat(server("a", 1));
  const Lease lease = leaseNow(1);
  events.leases.clear();
  pool->request(kAdmin, request(1), now);
  REQUIRE(has(1));
  CHECK(events.leases.at({1, 1}).key == lease.key);
  CHECK(events.grants.size() == 1);
  CHECK(pool->release(kAdmin, {1, 1}, now));
  pool->revoked({1, 1}, now);
  CHECK(events.over.contains({1, 1}));
  pool->request(kAdmin, request(1), now);
  CHECK(failure(1).find("has ended: released") != std::string::npos);
  CHECK_FALSE(pool->release(kAdmin, {1, 1}, now));
  restart();  // tombstones are durable
  joinAndBeat(server("a", 1));
  events.failures.clear();
  pool->request(kAdmin, request(1), now);
  CHECK(failure(1).find("has ended: released") != std::string::npos);
}

TEST_CASE_METHOD(Fixture, "a release that overtakes its request wins") {
  joinAndBeat(server("a", 1));
  CHECK_FALSE(pool->release(kAdmin, {1, 1}, now));
  pool->request(kAdmin, request(1), now);
  CHECK(events.grants.empty());
  CHECK(failure(1).find("released") != std::string::npos);
}

TEST_CASE_METHOD(Fixture,
                 "a lease that nobody renews ends, and its device is free once the server confirms") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  now += 10'000 + times.driftMs;
  pool->tick(now);
  CHECK(events.revokes.empty());
  ++now;
  pool->tick(now);
  REQUIRE(events.revokes.size() == 1);
  CHECK(events.revokes[0].reason.find("has not renewed it for 10 s") != std::string::npos);
  std::string why;
  CHECK_FALSE(pool->renew(kAdmin, {1, 1}, now, &why));
  CHECK(why.find("has not renewed") != std::string::npos);
  beat(1, {{1, 1}});
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("held by holder1 (10 s, ending)") != std::string::npos);
  pool->revoked({1, 1}, now);
  CHECK(events.over.contains({1, 1}));
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture, "renewal moves the deadline") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  std::string why;
  for (int i = 0; i < 100; ++i) {
    now += 5000;
    REQUIRE(pool->renew(kAdmin, {1, 1}, now, &why) == 10'000u);
    pool->tick(now);
  }
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);
  CHECK_FALSE(pool->renew(kAdmin, {7, 7}, now, &why));
}

TEST_CASE_METHOD(
    Fixture,
    "without the server's word a lease is over after deadline, drift and kill time, its device not") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->left("a", {1, 0}, false, now);
  CHECK(pool->release(kAdmin, {1, 1}, now));
  CHECK(events.revokes.empty());  // nobody to tell
  now += 10'000 + times.driftMs + times.killMs;
  pool->tick(now);
  CHECK_FALSE(events.over.contains({1, 1}));
  ++now;
  pool->tick(now);
  CHECK(events.over.contains({1, 1}));
  CHECK(pool->leases().at({1, 1}).state == LeaseState::lost);
  SECTION("the server comes back") {}
  SECTION("the server comes back to a manager that was started again") { restart(); }
  joinAndBeat(server("a", 1), {{1, 1}});
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("has not said that nothing of it runs") != std::string::npos);
  CHECK(events.revokes.back().id == Id{1, 1});
  pool->revoked({1, 1}, now);
  CHECK(pool->leases().empty());
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture, "an operator drops a lost lease, unless its server is there to say what runs") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->left("a", {1, 0}, false, now);
  pool->release(kAdmin, {1, 1}, now);
  pool->tick(now += 10'000 + times.driftMs + times.killMs + 1);
  REQUIRE(pool->leases().at({1, 1}).state == LeaseState::lost);
  CHECK(pool->list(kAdmin, now).at(0).state == "lost");
  CHECK_FALSE(pool->release(kAdmin, {1, 1}, now));  // a holder's: it says nothing of what runs
  CHECK(contains(thrown([&] { pool->drop({Principal::Role::user, ""}, {1, 1}, now); }), "operator"));
  REQUIRE(pool->leases().size() == 1);
  SECTION("the server is there") {
    joinAndBeat(server("a", 1), {{1, 1}});
    CHECK(contains(thrown([&] { pool->drop(kAdmin, {1, 1}, now); }), "server a is connected"));
    CHECK(pool->leases().size() == 1);
    return;
  }
  SECTION("this manager lost it") {}
  SECTION("a manager reads it") { restart(); }
  CHECK(pool->drop(kAdmin, {1, 1}, now));
  CHECK(events.over.contains({1, 1}));
  CHECK(pool->leases().empty());
  CHECK(store->range("lease/").empty());
  CHECK_FALSE(pool->drop(kAdmin, {1, 1}, now));  // once is enough
  // The operator was wrong: nothing is leased where it still runs.
  joinAndBeat(server("a", 1), {{1, 1}});
  pool->request(kAdmin, request(2), now);
  CHECK(contains(failure(2), "still runs there"));
  pool->revoked({1, 1}, now);
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture, "a lease that is not lost is released in its holder's place") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  CHECK(pool->drop(kAdmin, {1, 1}, now));
  REQUIRE(events.revokes.size() == 1);
  pool->revoked({1, 1}, now);
  CHECK(pool->leases().empty());
}

TEST_CASE_METHOD(Fixture,
                 "a server that comes back is told what ended meanwhile, and what it should not hold") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->left("a", {1, 0}, false, now);
  pool->release(kAdmin, {1, 1}, now);
  pool->join(kAdmin, server("a", 1), {}, now);
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("not yet said which leases it holds") != std::string::npos);
  beat(1, {{1, 1}, {9, 9}});
  REQUIRE(events.revokes.size() == 2);
  std::set<Id> told = {events.revokes[0].id, events.revokes[1].id};
  CHECK(told == std::set<Id>{{1, 1}, {9, 9}});
  CHECK(pool->leases().contains({1, 1}));
  pool->revoked({1, 1}, now);
  CHECK(pool->leases().empty());
}

TEST_CASE_METHOD(Fixture, "leases outlive the manager; devices are unknown until the server reports") {
  joinAndBeat(server("a", 1));
  const Lease lease = leaseNow(1);
  now += 60'000;  // away for longer than the TTL
  events = {};
  restart();
  REQUIRE(pool->leases().contains({1, 1}));
  CHECK(pool->leases().at({1, 1}).primary().key == lease.key);
  pool->tick(now);
  CHECK(pool->leases().at({1, 1}).state != LeaseState::revoking);
  std::string why;
  CHECK(pool->renew(kAdmin, {1, 1}, now + 9000, &why));
  pool->join(kAdmin, server("a", 1), {}, now);
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("not yet said which leases") != std::string::npos);
  beat(1, {{1, 1}});
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);
  CHECK(events.grants.empty());
  pool->request(kAdmin, request(3), now);
  CHECK(failure(3).find("held by holder1") != std::string::npos);
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked({1, 1}, now);
  CHECK(leaseNow(4).epoch > lease.epoch);
}

TEST_CASE_METHOD(Fixture, "a manager that died between store and grant tells the server after its restart") {
  joinAndBeat(server("a", 1));
  pool->request(kAdmin, request(1), now);
  REQUIRE(events.grants.size() == 1);
  const Lease sent = events.grants[0];
  events = {};
  restart();
  joinAndBeat(server("a", 1));
  REQUIRE(events.grants.size() == 1);
  CHECK(events.grants[0].key == sent.key);
  CHECK(events.grants[0].epoch == sent.epoch);
  pool->granted({1, 1}, now);
  pool->request(kAdmin, request(1), now);  // the holder asks again
  CHECK(has(1));
}

TEST_CASE_METHOD(Fixture, "a lease that nobody comes back for after a restart ends by itself") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  restart();
  joinAndBeat(server("a", 1), {{1, 1}});
  now += 10'000 + times.driftMs + 1;
  pool->tick(now);
  REQUIRE(events.revokes.size() == 1);
  pool->revoked({1, 1}, now);
  CHECK(pool->leases().empty());
}

TEST_CASE_METHOD(Fixture, "a server that was restarted has no sessions: its leases are over") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->left("a", {1, 0}, false, now);
  joinAndBeat(server("a", 2));
  CHECK(events.over.contains({1, 1}));
  std::string why;
  CHECK_FALSE(pool->renew(kAdmin, {1, 1}, now, &why));
  CHECK(why.find("server a was restarted") != std::string::npos);
  CHECK(leaseNow(2).server.incarnation == Id{2, 0});
}

TEST_CASE_METHOD(Fixture, "a machine that crashed comes back although its old connection was never closed") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  CHECK_THROWS_AS(pool->join(kAdmin, server("a", 2), {}, now), std::invalid_argument);
  now += times.silentMs;
  joinAndBeat(server("a", 2));
  CHECK(events.over.contains({1, 1}));
  pool->left("a", {1, 0}, false, now);  // the old connection, at last
  CHECK(pool->servers().at("a").connected);
}

TEST_CASE_METHOD(Fixture, "a server that says goodbye has ended its sessions") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->left("a", {1, 0}, true, now);
  CHECK(events.over.contains({1, 1}));
  CHECK(pool->servers().empty());
}

TEST_CASE_METHOD(Fixture, "a lease that its server dropped is over") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  beat(1, {});  // sent before the grant arrived there
  CHECK_FALSE(events.over.contains({1, 1}));
  now += 3 * times.beatMs;
  beat(1, {});
  REQUIRE(events.revokes.size() == 1);  // its workers may still be ending
  CHECK_FALSE(events.over.contains({1, 1}));
  pool->revoked({1, 1}, now);
  CHECK(events.over.contains({1, 1}));
}

TEST_CASE_METHOD(Fixture, "nothing is placed on a silent server") {
  joinAndBeat(server("a", 1));
  now += times.silentMs;
  pool->request(kAdmin, request(1), now);
  CHECK(failure(1).find("silent for 5 s") != std::string::npos);
  beat(1, {});
  leaseNow(2);
}

TEST_CASE_METHOD(Fixture, "who waits is served in order, and told at his deadline") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->request(kAdmin, request(2, 5000), now);
  pool->request(kAdmin, request(3, 60'000), now);
  pool->request(kAdmin, request(4), now);  // will not wait
  CHECK(failure(4).find("2 earlier request(s) are waiting") != std::string::npos);
  now += 5000;
  beat(1, {{1, 1}});
  pool->tick(now);
  CHECK(failure(2).find("held by holder1") != std::string::npos);
  CHECK(failure(3).empty());
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked({1, 1}, now);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[1].id == Id{3, 3});
}

TEST_CASE_METHOD(Fixture, "a small request does not starve a large one that waits") {
  joinAndBeat(server("a", 1, 2));
  leaseNow(1);
  pool->request(kAdmin, request(2, 60'000, 0, 2), now);
  pool->request(kAdmin, request(3, 60'000), now);  // one device is free, but it is not its turn
  CHECK(events.grants.size() == 1);
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked({1, 1}, now);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[1].id == Id{2, 2});
}

TEST_CASE_METHOD(Fixture, "what no server has is refused at once, and holds back nobody") {
  joinAndBeat(server("a", 1, 2));
  pool->request(kAdmin, request(1, 60'000, 0, 64), now);
  CHECK(failure(1).find("64 devices on one server are wanted, but no server has more than 2") !=
        std::string::npos);
  CHECK(events.failures.at({1, 1}).kind == Failure::Kind::nothingFits);
  pool->request(kAdmin, request(2, 60'000, 100 * kGiB, 2), now);
  CHECK(failure(2).find("the most that any server could give is 0") != std::string::npos);
  LeaseRequest elsewhere = request(3, 60'000);
  elsewhere.server = "z";
  pool->request(kAdmin, elsewhere, now);
  CHECK(failure(3).find("there is no server named z") != std::string::npos);
  leaseNow(4);
}

TEST_CASE_METHOD(Fixture, "after the manager's restart a request waits for servers that may come back") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  restart();
  joinAndBeat(server("a", 1), {{1, 1}});
  pool->request(kAdmin, request(2, 60'000, 0, 2), now);
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked({1, 1}, now);
  leaseNow(3);  // although a request for more is waiting
  CHECK(failure(2).empty());
  SECTION("the larger server comes back") {
    joinAndBeat(server("b", 2, 2));
    REQUIRE(events.grants.size() == 3);
    CHECK(events.grants.back().id == Id{2, 2});
  }
  SECTION("it does not") {
    beat(1, {{3, 3}});
    pool->tick(now += 10'000);
    CHECK(failure(2).find("no server has more than 1") != std::string::npos);
  }
}

TEST_CASE_METHOD(Fixture, "the release of an unknown lease costs no write, and a bounded memory") {
  joinAndBeat(server("a", 1));
  const auto revision = store->commitNow({}).revision;
  const size_t entries = store->range("").size();
  for (uint64_t id = 1000; id < 3000; ++id) CHECK_FALSE(pool->release(kAdmin, {id, id}, now));
  CHECK(store->commitNow({}).revision == revision + 1);
  CHECK(store->range("").size() == entries);
  leaseNow(1000);  // long forgotten
  pool->request(kAdmin, request(2999), now);
  CHECK(failure(2999).find("released") != std::string::npos);
}

TEST_CASE_METHOD(Fixture, "nobody who went away is served") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->request(kAdmin, request(2, 60'000), now);
  pool->request(kAdmin, request(3, 60'000), now);
  events.gone.insert({2, 2});
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked({1, 1}, now);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[1].id == Id{3, 3});
}

TEST_CASE_METHOD(Fixture, "releasing a request that waits takes it off the queue") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->request(kAdmin, request(2, 60'000), now);
  CHECK_FALSE(pool->release(kAdmin, {2, 2}, now));
  CHECK(failure(2).find("released") != std::string::npos);
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked({1, 1}, now);
  CHECK(events.grants.size() == 1);
}

TEST_CASE_METHOD(Fixture, "a device is shared up to its memory") {
  joinAndBeat(server("a", 1));
  for (uint64_t id : {1, 2, 3}) {
    pool->request(kAdmin, request(id, 0, 24 * kGiB), now);
    pool->granted({id, id}, now);
    CHECK(has(id));
  }
  pool->request(kAdmin, request(4, 0, 24 * kGiB), now);  // 3 x (24 + 1) of 80 are taken
  CHECK(failure(4).find("5.0 GiB free") != std::string::npos);
  pool->request(kAdmin, request(5), now);
  CHECK(failure(5).find("none is free") != std::string::npos);
  CHECK(pool->inventory(kAdmin, now)[0].devices[0].freeBytes == 5 * kGiB);
}

TEST_CASE_METHOD(Fixture, "a server that refuses a grant is left alone until its next beat") {
  joinAndBeat(server("a", 1));
  pool->request(kAdmin, request(1), now);
  pool->grantFailed({1, 1}, "no memory", true, now);
  CHECK(failure(1).find("no memory") != std::string::npos);
  CHECK(events.failures.at({1, 1}).kind == Failure::Kind::serverLost);
  REQUIRE(events.revokes.size() == 1);  // it may hold a lease that it refuses: one that it is ending
  pool->revoked({1, 1}, now);
  CHECK(pool->leases().empty());
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("did not take its last lease: no memory") != std::string::npos);
  beat(1, {});
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture, "a grant without an answer is taken back before anybody else gets the device") {
  joinAndBeat(server("a", 1));
  pool->request(kAdmin, request(1), now);
  pool->grantFailed({1, 1}, "timed out", false, now);
  REQUIRE(events.revokes.size() == 1);
  pool->granted({1, 1}, now);  // too late
  CHECK_FALSE(has(1));
  beat(1, {{1, 1}});
  pool->request(kAdmin, request(2), now);
  CHECK_FALSE(failure(2).empty());
  pool->revokeFailed({1, 1}, now);
  beat(1, {{1, 1}});
  CHECK(events.revokes.size() == 2);
  pool->revoked({1, 1}, now);
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture,
                 "a grant that its server leaves unanswered ends for that reason, not for its holder's") {
  joinAndBeat(server("a", 1));
  pool->request(kAdmin, request(1), now);
  now += 10'000 + times.driftMs + 1;
  pool->tick(now);
  CHECK(failure(1) == "server a does not answer");
  REQUIRE(events.revokes.size() == 1);
  CHECK(events.revokes[0].reason == "server a did not answer");
}

TEST_CASE_METHOD(Fixture,
                 "a holder of this machine that was killed loses its lease at once, another one not") {
  joinAndBeat(server("a", 1));
  LeaseRequest local = request(1, 0, 20 * kGiB), remote = request(2, 0, 20 * kGiB);
  local.process = {4711, 99};
  for (const LeaseRequest& one : {local, remote}) {
    pool->request(kAdmin, one, now);
    pool->granted(one.id, now);
  }
  pool->tick(now += 100);
  CHECK(events.revokes.empty());
  SECTION("while the manager looks") {}
  SECTION("while the manager was away") {
    restart();
    joinAndBeat(server("a", 1), {{1, 1}, {2, 2}});
  }
  events.dead.insert(4711);
  events.dead.insert(0);  // never asked for: nothing is known of such a holder
  pool->tick(now += 100);
  REQUIRE(events.revokes.size() == 1);
  CHECK(events.revokes[0].id == Id{1, 1});
  CHECK(events.revokes[0].reason == "its holder, process 4711, was killed");
  pool->revoked({1, 1}, now);
  CHECK(pool->leases().size() == 1);
}

TEST_CASE("a process is known by more than its number") {
  const LocalProcess self = identifyProcess(::getpid());
  CHECK(self.pid == ::getpid());
  CHECK_FALSE(hasEnded(self));
  CHECK(hasEnded({self.pid, self.startTicks + 1}));
  CHECK_FALSE(hasEnded({}));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  // A holder may be killed before the manager reads its request.
  LocalProcess zombie;
  for (int i = 0; i < 1000 && !hasEnded(zombie = identifyProcess(child)); ++i) ::usleep(1000);
  CHECK(hasEnded(zombie));
  CHECK(::waitpid(child, nullptr, 0) == child);
  CHECK(hasEnded(identifyProcess(child)));
}

TEST_CASE_METHOD(Fixture, "a device that broke gets no lease until its server says that it is in order") {
  joinAndBeat(server("a", 1, 2));
  const auto says = [&](std::vector<std::string> problems) {
    REQUIRE(pool->beat("a", {1, 0}, {}, problems, 1, now));
  };
  const auto ordinal = [&](uint64_t id) {
    pool->request(kAdmin, request(id), now);
    const auto& leases = pool->leases();
    return leases.contains({id, id}) ? static_cast<int>(leases.at({id, id}).primary().devices[0].info.ordinal)
                                     : -1;
  };
  says({"CUDA_ERROR_ECC_UNCORRECTABLE (214)\x1b; restart gpupool-server", ""});
  CHECK(pool->inventory(kAdmin, now)[0].devices[0].info.problem ==
        "CUDA_ERROR_ECC_UNCORRECTABLE (214)?; restart gpupool-server");
  CHECK(ordinal(1) == 1);
  CHECK(ordinal(2) == -1);
  says({"", ""});
  CHECK(ordinal(3) == 0);
}

TEST_CASE_METHOD(Fixture, "what comes from the wire is checked") {
  CHECK_THROWS_AS(pool->join(kAdmin, server("", 1), {}, now), std::invalid_argument);
  CHECK_THROWS_AS(pool->join(kAdmin, server("bad\nname", 1), {}, now), std::invalid_argument);
  CHECK_THROWS_AS(pool->join(kAdmin, server("a", 1, kMaxDevices + 1), {}, now), std::invalid_argument);
  auto twins = server("a", 1, 2);
  twins.devices[1].ordinal = 0;
  CHECK_THROWS_AS(pool->join(kAdmin, twins, {}, now), std::invalid_argument);
  twins.devices[1].ordinal = 1;
  twins.devices[1].uuid = twins.devices[0].uuid;
  CHECK(contains(thrown([&] { pool->join(kAdmin, twins, {}, now); }), "the same UUID"));
  CHECK(
      contains(thrown([&] { pool->join(kAdmin, server("a", 1), {{}, {}}, now); }), "more or fewer devices"));
  CHECK(contains(thrown([&] { pool->join(kAdmin, server("a", 1), {{~uint64_t{0}, {}}}, now); }), "absurd"));
  auto unnamed = server("a", 1);
  unnamed.devices[0].uuid = "short";
  CHECK(contains(thrown([&] { pool->join(kAdmin, unnamed, {}, now); }), "16 bytes"));
  auto nowhere = server("a", 1);
  nowhere.localPath.clear();
  CHECK_THROWS_AS(pool->join(kAdmin, nowhere, {}, now), std::invalid_argument);

  joinAndBeat(server("a", 1));
  CHECK(contains(thrown([&] { pool->join(kAdmin, server("a", 2), {}, now); }), "another name"));
  CHECK_FALSE(pool->beat("a", {2, 0}, {}, {}, 0, now));
  CHECK_FALSE(pool->beat("b", {1, 0}, {}, {}, 0, now));

  auto none = request(1);
  none.deviceCount = 0;
  pool->request(kAdmin, none, now);
  CHECK(failure(1).find("1 to 64 devices") != std::string::npos);
  auto eager = request(2);
  eager.ttlMs = 0;
  eager.holder = "evil\x1b[2J";
  pool->request(kAdmin, eager, now);
  REQUIRE(events.grants.size() == 1);
  CHECK(events.grants[0].ttlMs == times.minTtlMs);
  CHECK(events.grants[0].holder == "evil?[2J");
}

// --- one GPU is leased once -----------------------------------------------------------------------------

namespace {

// A second server with the first one's GPU.
Server twin(const std::string& boot = "") {
  Server facts = server("b", 2);
  facts.devices[0].uuid = server("a", 1).devices[0].uuid;
  facts.bootId = boot;
  return facts;
}

}  // namespace

TEST_CASE_METHOD(Fixture, "two servers with one GPU: it is the first one's, and both are named") {
  joinAndBeat(server("a", 1));
  joinAndBeat(twin());
  leaseNow(1);
  CHECK(events.grants.back().server.name == "a");
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("b: GPU 0 (GPU) is the same device as GPU 0 of server a") != std::string::npos);
  LeaseRequest there = request(3);
  there.server = "b";
  pool->request(kAdmin, there, now);
  CHECK(failure(3).find("the same device as GPU 0 of server a") != std::string::npos);
  CHECK(events.grants.size() == 1);
}

TEST_CASE_METHOD(Fixture, "a GPU goes over to another server only when nothing of the first can run there") {
  const auto askedOfB = [&](uint64_t id) {
    REQUIRE(pool->beat("b", {2, 0}, {}, {}, 1, now));
    const size_t before = events.grants.size();
    pool->request(kAdmin, request(id), now);
    return events.grants.size() != before && events.grants.back().server.name == "b";
  };
  joinAndBeat(server("a", 1));
  SECTION("the first has left, and nothing of it was leased") {
    joinAndBeat(twin());
    CHECK_FALSE((pool->left("a", {1, 0}, false, now), pool->leases().size()));
    CHECK(askedOfB(5));
  }
  SECTION("a lease of the first runs") {
    leaseNow(1);
    joinAndBeat(twin());
    pool->left("a", {1, 0}, false, now);
    CHECK_FALSE(askedOfB(5));
  }
  SECTION("a lease of the first runs, and the manager is started again") {
    leaseNow(1);
    restart();
    joinAndBeat(twin());
    CHECK_FALSE(askedOfB(5));
  }
  SECTION("the machine was started again under another name") {
    leaseNow(1);
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(twin("the next boot"));
    CHECK(events.over.contains({1, 1}));
    CHECK(askedOfB(5));
    joinAndBeat(server("a", 3));
    pool->request(kAdmin, request(6), now);
    CHECK(failure(6).find("a: GPU 0 (GPU) is the same device as GPU 0 of server b") != std::string::npos);
  }
  SECTION("a worker of the first one's earlier life still runs") {
    REQUIRE(pool->beat("a", {1, 0}, {}, {"a worker of an earlier life still runs"}, 1, now));
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(twin());
    CHECK_FALSE(askedOfB(5));
  }
}

TEST_CASE_METHOD(Fixture, "a server that comes back is leased to nobody while its old workers run") {
  joinAndBeat(server("a", 1, 2));
  const Lease lease = leaseNow(1);
  const uint32_t ordinal = lease.devices[0].info.ordinal;
  pool->left("a", {1, 0}, false, now);
  std::vector<DeviceReport> reports(2);
  std::vector<std::string> problems(2);
  reports[ordinal] = {lease.epoch, {{1, 1}}};
  problems[ordinal] = "a worker of an earlier life still runs";
  const auto beats = [&] { REQUIRE(pool->beat("a", {2, 0}, {}, problems, 1, now)); };
  pool->join(kAdmin, server("a", 2, 2), reports, now);
  CHECK(events.over.contains({1, 1}));
  SECTION("while the manager runs") { beats(); }
  SECTION("the manager is started again, and another server has the GPU too") {
    restart();
    Server other = twin();
    other.devices[0].uuid = lease.devices[0].info.uuid;
    joinAndBeat(other);
    LeaseRequest there = request(7);
    there.server = "b";
    pool->request(kAdmin, there, now);
    CHECK_FALSE(failure(7).empty());
    pool->join(kAdmin, server("a", 2, 2), reports, now);
    beats();
  }
  pool->request(kAdmin, request(2, 0, 0, 2), now);
  CHECK_FALSE(failure(2).empty());
  LeaseRequest there = request(3);
  there.server = "a";
  pool->request(kAdmin, there, now);
  pool->granted({3, 3}, now);
  REQUIRE(has(3));
  CHECK(events.leases.at({3, 3}).devices[0].info.ordinal != ordinal);
  there.id = {4, 4};
  pool->request(kAdmin, there, now);
  pool->revoked({1, 1}, now);  // of an earlier life's lease a server knows nothing
  CHECK_FALSE(has(4));
  CHECK(pool->leases().contains({1, 1}));
  problems[ordinal].clear();
  REQUIRE(pool->beat("a", {2, 0}, {{3, 3}}, problems, 1, now));
  CHECK_FALSE(pool->leases().contains({1, 1}));
  there.id = {5, 5};
  pool->request(kAdmin, there, now);
  pool->granted({5, 5}, now);
  REQUIRE(has(5));
  CHECK(events.leases.at({5, 5}).devices[0].info.ordinal == ordinal);
}

TEST_CASE_METHOD(Fixture,
                 "a manager that lost its store leases nothing that is still held, and no epoch again") {
  joinAndBeat(server("a", 1));
  const Lease lease = leaseNow(1);
  store = makeMemoryStore();
  calendarS = 7;  // and its clock
  restart();
  joinAndBeat(server("a", 1), {{1, 1}}, {{lease.epoch, {}}});
  pool->request(kAdmin, request(2), now);
  CHECK_FALSE(failure(2).empty());
  CHECK(events.revokes.back().id == Id{1, 1});
  pool->revoked({1, 1}, now);
  CHECK(leaseNow(3).epoch > lease.epoch);
}

TEST_CASE_METHOD(Fixture, "epochs start above the calendar, whatever an old copy of the store says") {
  joinAndBeat(server("a", 1));
  const Lease lease = leaseNow(1);
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked({1, 1}, now);
  calendarS += 3600;
  restart();
  joinAndBeat(server("a", 1));
  CHECK(leaseNow(2).epoch > (calendarS << 20));
  CHECK(lease.epoch < (calendarS << 20));
}

// --- the store ------------------------------------------------------------------------------------------

namespace {

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

}  // namespace

TEST_CASE_METHOD(DiskFixture,
                 "with a full disk nothing is leased, and the device is free when it is no more") {
  joinAndBeat(server("a", 1));
  SECTION("the disk was full") { disk->full = true; }
  SECTION("the disk may have kept it") { disk->unsure = true; }
  pool->request(kAdmin, request(1), now);
  CHECK(failure(1).find("cannot write its store: store: d") != std::string::npos);
  CHECK(events.grants.empty());
  pool->request(kAdmin, request(2), now);
  CHECK_FALSE(failure(2).empty());
  disk->full = disk->unsure = false;
  pool->tick(now += 2000);
  beat(1, {});
  leaseNow(3);
  restart();
  CHECK(pool->leases().size() == 1);
}

TEST_CASE_METHOD(DiskFixture,
                 "with a full disk a lease ends all the same, and its device is free afterwards") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  disk->full = true;
  SECTION("released") { CHECK(pool->release(kAdmin, {1, 1}, now)); }
  SECTION("expired") { pool->tick(now += 10'000 + times.driftMs + 1); }
  REQUIRE(events.revokes.size() == 1);  // its server is told at once
  std::string why;
  CHECK_FALSE(pool->renew(kAdmin, {1, 1}, now, &why));
  pool->revoked({1, 1}, now);
  for (int i = 0; i < 20; ++i) pool->tick(now += 500);
  beat(1, {});
  CHECK(events.over.empty());
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("ending") != std::string::npos);
  disk->full = false;
  pool->tick(now += 1000);
  CHECK(events.over.contains({1, 1}));
  beat(1, {});
  leaseNow(3);
}

TEST_CASE_METHOD(DiskFixture, "a cordoned server keeps its leases and gets no new ones") {
  joinAndBeat(server("a", 1, 2));
  leaseNow(1);
  std::string why = "not said yet";
  const auto tell = [&](const std::string& text) { why = text; };
  const Principal user{Principal::Role::user, ""};
  CHECK(contains(thrown([&] { pool->cordon(user, "a", "", tell); }), "operator"));
  CHECK(contains(thrown([&] { pool->cordon(kAdmin, "b", "", tell); }), "there is no server b"));
  CHECK(contains(thrown([&] { pool->uncordon(kAdmin, "a", tell); }), "not cordoned"));
  disk->full = true;
  pool->cordon(kAdmin, "a", "on Friday", tell);
  CHECK(contains(why, "full"));
  CHECK(pool->cordons().empty());
  disk->full = false;
  pool->cordon(kAdmin, "a", "on\nFriday", tell);
  REQUIRE(why.empty());
  beat(1, {{1, 1}});
  CHECK(pool->renew(kAdmin, {1, 1}, now, &why));
  SECTION("as it is") {}
  SECTION("known to a manager that was started again, and of a server that was") {
    restart();
    joinAndBeat(server("a", 1, 2), {{1, 1}});
  }
  pool->request(kAdmin, request(2), now);
  CHECK(contains(failure(2), "cordoned by an operator: on?Friday"));
  pool->request(kAdmin, request(3, 60'000), now);  // this one waits
  CHECK_FALSE(has(3));
  CHECK(contains(thrown([&] { pool->uncordon(user, "a", tell); }), "operator"));
  pool->uncordon(kAdmin, "a", tell);
  REQUIRE(why.empty());
  pool->granted({3, 3}, now);
  CHECK(has(3));
  restart();
  CHECK(pool->cordons().empty());
}

TEST_CASE_METHOD(DiskFixture, "nothing is granted before the store has accepted it") {
  joinAndBeat(server("a", 1));
  pool.pool->request(kAdmin, request(1), now);  // nothing is delivered
  CHECK(events.grants.empty());
  pool.pool->tick(now);
  pool.pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("held by holder1") != std::string::npos);
  SECTION("it does") {
    store->deliver();
    CHECK(events.grants.size() == 1);
  }
  SECTION("the request is taken back before") {
    CHECK(pool->release(kAdmin, {1, 1}, now));
    CHECK(events.grants.empty());
    CHECK(events.revokes.empty());
    CHECK(events.over.contains({1, 1}));
    leaseNow(3);
  }
}

TEST_CASE_METHOD(Fixture, "renewals, and what a restart forgets anyhow, are not written") {
  joinAndBeat(server("a", 1));
  pool->request(kAdmin, request(1), now);
  const auto before = store->commitNow({}).revision;
  pool->granted({1, 1}, now);
  std::string why;
  for (int i = 0; i < 1000; ++i) {
    CHECK(pool->renew(kAdmin, {1, 1}, now += 1000, &why));
    beat(1, {{1, 1}});
    pool->tick(now);
  }
  CHECK(store->commitNow({}).revision == before + 1);
}

TEST_CASE_METHOD(Fixture, "a manager whose store another one has taken over writes and grants nothing") {
  joinAndBeat(server("a", 1));
  Recorder others;
  Pool other(*store, others, times, {"boot", now, calendarS, "another"});
  pool->request(kAdmin, request(1), now);
  CHECK(events.grants.empty());
  CHECK(events.isSuperseded);
  CHECK(failure(1).find("another manager has taken over") != std::string::npos);
  CHECK_FALSE(others.isSuperseded);
  const auto left = store->range("lease/");
  CHECK(left.empty());
}

TEST_CASE("a store of an older gpupool is refused in words") {
  const auto store = makeMemoryStore();
  REQUIRE(store->commitNow({{}, {{"epoch", "12"}}}).committed());
  Recorder events;
  CHECK(contains(thrown([&] { Pool(*store, events, {}, {"boot", 0, 0, "mark"}); }),
                 "written by another version of gpupool (format 1, this one has format 2)"));
}

// --- principals -----------------------------------------------------------------------------------------

TEST_CASE_METHOD(Fixture, "a tenant touches its own leases, and does not learn who holds the others") {
  const Principal alice{Principal::Role::user, "alice"}, bob{Principal::Role::user, "bob"};
  const Principal node{Principal::Role::server, "servers"};
  joinAndBeat(server("a", 1));
  LeaseRequest wish = request(1);
  wish.tenant = "bob";  // what a request says of its tenant counts only from an admin
  pool->request(alice, wish, now);
  pool->granted({1, 1}, now);
  CHECK(events.leases.at({1, 1}).tenant == "alice");

  std::string why;
  CHECK(contains(thrown([&] { pool->renew(bob, {1, 1}, now, &why); }), "another tenant's"));
  CHECK(contains(thrown([&] { pool->release(bob, {1, 1}, now); }), "another tenant's"));
  CHECK(contains(thrown([&] { pool->request(bob, request(1), now); }), "another tenant's"));
  CHECK(contains(thrown([&] { pool->request(node, request(9), now); }), "leases nothing"));
  CHECK(contains(thrown([&] { pool->join(alice, server("x", 9), {}, now); }), "none for servers"));
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);

  pool->request(alice, request(2), now);
  CHECK(failure(2).find("is held by holder1 (tenant alice") != std::string::npos);
  pool->request(bob, request(3), now);
  CHECK(failure(3).find("GPU 0 (GPU) is in use") != std::string::npos);
  CHECK(failure(3).find("holder1") == std::string::npos);
  CHECK(failure(3).find("alice") == std::string::npos);
  CHECK(pool->list(alice, now).at(0).holder == "holder1");
  CHECK(pool->list(kAdmin, now).at(0).tenant == "alice");
  CHECK(pool->list(bob, now).at(0).holder == "in use");
  CHECK(pool->list(bob, now).at(0).tenant.empty());
  CHECK(pool->list(alice, now).at(0).key.empty());
  CHECK(pool->list(alice, now).at(0).state == "active");
}

// --- the stored lease -----------------------------------------------------------------------------------

TEST_CASE("a lease's states follow one another as the table says") {
  using enum LeaseState;
  const std::map<LeaseState, std::set<LeaseState>> table = {
      {queued, {granting, released, revoked}},
      {granting, {active, revoking, lost}},
      {active, {suspended, moving, revoking, lost}},
      {suspended, {active, revoking, lost}},
      {moving, {active, revoking, lost}},
      {revoking, {released, expired, revoked, lost}},
  };
  for (uint32_t from = 0; from < kLeaseStates; ++from)
    for (uint32_t to = 0; to < kLeaseStates; ++to) {
      const auto row = table.find(static_cast<LeaseState>(from));
      INFO(name(static_cast<LeaseState>(from)) << " to " << name(static_cast<LeaseState>(to)));
      CHECK(mayFollow(static_cast<LeaseState>(from), static_cast<LeaseState>(to)) ==
            (row != table.end() && row->second.contains(static_cast<LeaseState>(to))));
    }
  CHECK(name(lost) == "lost");
  CHECK_FALSE(isEnd(revoking));
  CHECK(isEnd(released));
}

TEST_CASE("a stored lease comes back as it was, on every server that it lies on") {
  StoredLease lease;
  lease.id = {1, 2};
  lease.ttlMs = 15'000;
  lease.tenant = "alice";
  lease.holder = "alice@node";
  lease.ending = LeaseState::expired;
  lease.reason = "why";
  lease.process = {17, 99};
  const Server a = server("a", 1), b = server("b", 2);
  lease.placements = {{b, {{b.devices[0], kGiB}}, 8, std::string(32, 'b'), PlacementRole::target},
                      {a, {{a.devices[0], kGiB}}, 7, std::string(32, 'a'), PlacementRole::primary}};
  for (uint32_t state = 0; state < kLeaseStates; ++state) {
    lease.state = static_cast<LeaseState>(state);
    const StoredLease read = decodeLease(encodeLease(lease, "boot"), "boot");
    CHECK(read.state == lease.state);
    CHECK(read.ending == LeaseState::expired);
    REQUIRE(read.placements.size() == 2);
    CHECK(read.placements[0].role == PlacementRole::target);
    CHECK(read.server().name == "a");
    CHECK(read.primary().epoch == 7);
    CHECK(read.primary().key == std::string(32, 'a'));
    CHECK(read.primary().devices.at(0).info.uuid == a.devices[0].uuid);
    CHECK(read.tenant + read.holder + read.reason == "alicealice@nodewhy");
    CHECK(read.process.pid == 17);
  }
  CHECK(decodeLease(encodeLease(lease, "boot"), "another").process.pid == 0);
  const Lease wire = wireLease(lease);
  CHECK(wire.server.name == "a");
  CHECK(wire.epoch == 7);
  lease.placements.pop_back();
  CHECK(contains(thrown([&] { decodeLease(encodeLease(lease, "boot"), "boot"); }), "one primary"));
  CHECK_THROWS_AS(decodeLease("garbage", "boot"), std::runtime_error);
}
