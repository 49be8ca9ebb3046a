// Leases against a clock and a server made by hand.
#include "pool-manager/pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <set>

#include "catch.h"
#include "support.h"

using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

struct Recorder final : PoolEvents {
  void grant(const Lease& lease) override { grants.push_back(lease); }
  void revoke(const std::string& server, const Id& id, const std::string& reason) override {
    revokes.push_back({server, id, reason});
  }
  void granted(const Lease& lease) override { leases[lease.id] = lease; }
  void failed(const Id& id, const Failure& failure) override { failures[id] = failure; }
  void ended(const Id& id) override { over.insert(id); }
  bool wanted(const Id& id) override { return !gone.contains(id); }
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
  void restart() { pool.emplace(*store, events, times, "boot", now); }
  void joinAndBeat(const Server& facts, std::vector<Id> leases = {}) {
    pool->join(facts, now);
    REQUIRE(pool->beat(facts.name, facts.incarnation, leases, {}, 1, now));
  }
  void beat(uint64_t incarnation, std::vector<Id> leases) {
    REQUIRE(pool->beat("a", {incarnation, 0}, leases, {}, 1, now));
  }
  Lease leaseNow(uint64_t id) {
    pool->request(request(id), now);
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

  uint64_t now = 1'000'000;
  PoolTimes times;
  std::unique_ptr<Store> store;
  Recorder events;
  std::optional<Pool> pool;
};

}  // namespace

TEST_CASE_METHOD(Fixture, "a lease is given after the server took it, with a key and an epoch of its own") {
  joinAndBeat(server("a", 1, 2));
  pool->request(request(1), now);
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
  pool->request(request(1), now);
  REQUIRE(has(1));
  CHECK(events.leases.at({1, 1}).key == lease.key);
  CHECK(events.grants.size() == 1);
  CHECK(pool->release({1, 1}, now));
  pool->revoked({1, 1}, now);
  CHECK(events.over.contains({1, 1}));
  pool->request(request(1), now);
  CHECK(failure(1).find("has ended: released") != std::string::npos);
  CHECK_FALSE(pool->release({1, 1}, now));
  restart();  // tombstones are durable
  joinAndBeat(server("a", 1));
  events.failures.clear();
  pool->request(request(1), now);
  CHECK(failure(1).find("has ended: released") != std::string::npos);
}

TEST_CASE_METHOD(Fixture, "a release that overtakes its request wins") {
  joinAndBeat(server("a", 1));
  CHECK_FALSE(pool->release({1, 1}, now));
  pool->request(request(1), now);
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
  CHECK_FALSE(pool->renew({1, 1}, now, &why));
  CHECK(why.find("has not renewed") != std::string::npos);
  beat(1, {{1, 1}});
  pool->request(request(2), now);
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
    REQUIRE(pool->renew({1, 1}, now, &why) == 10'000u);
    pool->tick(now);
  }
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);
  CHECK_FALSE(pool->renew({7, 7}, now, &why));
}

TEST_CASE_METHOD(Fixture,
                 "without the server's word a device is free only after deadline, drift and kill time") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->left("a", {1, 0}, false, now);
  CHECK(pool->release({1, 1}, now));
  CHECK(events.revokes.empty());  // nobody to tell
  now += 10'000 + times.driftMs + times.killMs;
  pool->tick(now);
  CHECK_FALSE(events.over.contains({1, 1}));
  ++now;
  pool->tick(now);
  CHECK(events.over.contains({1, 1}));
  CHECK(pool->leases().empty());
}

TEST_CASE_METHOD(Fixture,
                 "a server that comes back is told what ended meanwhile, and what it should not hold") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->left("a", {1, 0}, false, now);
  pool->release({1, 1}, now);
  pool->join(server("a", 1), now);
  pool->request(request(2), now);
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
  CHECK(pool->leases().at({1, 1}).lease.key == lease.key);
  pool->tick(now);
  CHECK(pool->leases().at({1, 1}).state != LeaseState::revoking);
  std::string why;
  CHECK(pool->renew({1, 1}, now + 9000, &why));
  pool->join(server("a", 1), now);
  pool->request(request(2), now);
  CHECK(failure(2).find("not yet said which leases") != std::string::npos);
  beat(1, {{1, 1}});
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);
  CHECK(events.grants.empty());
  pool->request(request(3), now);
  CHECK(failure(3).find("held by holder1") != std::string::npos);
  pool->release({1, 1}, now);
  pool->revoked({1, 1}, now);
  CHECK(leaseNow(4).epoch > lease.epoch);
}

TEST_CASE_METHOD(Fixture, "a manager that died between store and grant tells the server after its restart") {
  joinAndBeat(server("a", 1));
  pool->request(request(1), now);
  REQUIRE(events.grants.size() == 1);
  const Lease sent = events.grants[0];
  events = {};
  restart();
  joinAndBeat(server("a", 1));
  REQUIRE(events.grants.size() == 1);
  CHECK(events.grants[0].key == sent.key);
  CHECK(events.grants[0].epoch == sent.epoch);
  pool->granted({1, 1}, now);
  pool->request(request(1), now);  // the holder asks again
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
  CHECK_FALSE(pool->renew({1, 1}, now, &why));
  CHECK(why.find("server a was restarted") != std::string::npos);
  CHECK(leaseNow(2).server.incarnation == Id{2, 0});
}

TEST_CASE_METHOD(Fixture, "a machine that crashed comes back although its old connection was never closed") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  CHECK_THROWS_AS(pool->join(server("a", 2), now), std::invalid_argument);
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
  CHECK(events.over.contains({1, 1}));
}

TEST_CASE_METHOD(Fixture, "nothing is placed on a silent server") {
  joinAndBeat(server("a", 1));
  now += times.silentMs;
  pool->request(request(1), now);
  CHECK(failure(1).find("silent for 5 s") != std::string::npos);
  beat(1, {});
  leaseNow(2);
}

TEST_CASE_METHOD(Fixture, "who waits is served in order, and told at his deadline") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->request(request(2, 5000), now);
  pool->request(request(3, 60'000), now);
  pool->request(request(4), now);  // will not wait
  CHECK(failure(4).find("2 earlier request(s) are waiting") != std::string::npos);
  now += 5000;
  beat(1, {{1, 1}});
  pool->tick(now);
  CHECK(failure(2).find("held by holder1") != std::string::npos);
  CHECK(failure(3).empty());
  pool->release({1, 1}, now);
  pool->revoked({1, 1}, now);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[1].id == Id{3, 3});
}

TEST_CASE_METHOD(Fixture, "a small request does not starve a large one that waits") {
  joinAndBeat(server("a", 1, 2));
  leaseNow(1);
  pool->request(request(2, 60'000, 0, 2), now);
  pool->request(request(3, 60'000), now);  // one device is free, but it is not its turn
  CHECK(events.grants.size() == 1);
  pool->release({1, 1}, now);
  pool->revoked({1, 1}, now);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[1].id == Id{2, 2});
}

TEST_CASE_METHOD(Fixture, "nobody who went away is served") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->request(request(2, 60'000), now);
  pool->request(request(3, 60'000), now);
  events.gone.insert({2, 2});
  pool->release({1, 1}, now);
  pool->revoked({1, 1}, now);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[1].id == Id{3, 3});
}

TEST_CASE_METHOD(Fixture, "releasing a request that waits takes it off the queue") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  pool->request(request(2, 60'000), now);
  CHECK_FALSE(pool->release({2, 2}, now));
  CHECK(failure(2).find("released") != std::string::npos);
  pool->release({1, 1}, now);
  pool->revoked({1, 1}, now);
  CHECK(events.grants.size() == 1);
}

TEST_CASE_METHOD(Fixture, "a device is shared up to its memory") {
  joinAndBeat(server("a", 1));
  for (uint64_t id : {1, 2, 3}) {
    pool->request(request(id, 0, 24 * kGiB), now);
    pool->granted({id, id}, now);
    CHECK(has(id));
  }
  pool->request(request(4, 0, 24 * kGiB), now);  // 3 x (24 + 1) of 80 are taken
  CHECK(failure(4).find("5.0 GiB free") != std::string::npos);
  pool->request(request(5), now);
  CHECK(failure(5).find("none is free") != std::string::npos);
  CHECK(pool->inventory(now)[0].devices[0].freeBytes == 5 * kGiB);
}

TEST_CASE_METHOD(Fixture, "a server that refuses a grant is left alone until its next beat") {
  joinAndBeat(server("a", 1));
  pool->request(request(1), now);
  pool->grantFailed({1, 1}, "no memory", true, now);
  CHECK(failure(1).find("no memory") != std::string::npos);
  CHECK(events.failures.at({1, 1}).kind == Failure::Kind::serverLost);
  CHECK(pool->leases().empty());
  pool->request(request(2), now);
  CHECK(failure(2).find("did not take its last lease: no memory") != std::string::npos);
  beat(1, {});
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture, "a grant without an answer is taken back before anybody else gets the device") {
  joinAndBeat(server("a", 1));
  pool->request(request(1), now);
  pool->grantFailed({1, 1}, "timed out", false, now);
  REQUIRE(events.revokes.size() == 1);
  pool->granted({1, 1}, now);  // too late
  CHECK_FALSE(has(1));
  beat(1, {{1, 1}});
  pool->request(request(2), now);
  CHECK_FALSE(failure(2).empty());
  pool->revokeFailed({1, 1}, now);
  beat(1, {{1, 1}});
  CHECK(events.revokes.size() == 2);
  pool->revoked({1, 1}, now);
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture,
                 "a holder of this machine that was killed loses its lease at once, another one not") {
  joinAndBeat(server("a", 1));
  LeaseRequest local = request(1, 0, 20 * kGiB), remote = request(2, 0, 20 * kGiB);
  local.process = {4711, 99};
  for (const LeaseRequest& one : {local, remote}) {
    pool->request(one, now);
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
    pool->request(request(id), now);
    const auto& leases = pool->leases();
    return leases.contains({id, id}) ? static_cast<int>(leases.at({id, id}).lease.devices[0].info.ordinal)
                                     : -1;
  };
  says({"CUDA_ERROR_ECC_UNCORRECTABLE (214)\x1b; restart gpupool-server", ""});
  CHECK(pool->inventory(now)[0].devices[0].info.problem ==
        "CUDA_ERROR_ECC_UNCORRECTABLE (214)?; restart gpupool-server");
  CHECK(ordinal(1) == 1);
  CHECK(ordinal(2) == -1);
  says({"", ""});
  CHECK(ordinal(3) == 0);
}

TEST_CASE_METHOD(Fixture, "what comes from the wire is checked") {
  CHECK_THROWS_AS(pool->join(server("", 1), now), std::invalid_argument);
  CHECK_THROWS_AS(pool->join(server("bad\nname", 1), now), std::invalid_argument);
  CHECK_THROWS_AS(pool->join(server("a", 1, kMaxDevices + 1), now), std::invalid_argument);
  auto twins = server("a", 1, 2);
  twins.devices[1].ordinal = 0;
  CHECK_THROWS_AS(pool->join(twins, now), std::invalid_argument);
  auto nowhere = server("a", 1);
  nowhere.localPath.clear();
  CHECK_THROWS_AS(pool->join(nowhere, now), std::invalid_argument);

  joinAndBeat(server("a", 1));
  CHECK(contains(thrown([&] { pool->join(server("a", 2), now); }), "another name"));
  CHECK_FALSE(pool->beat("a", {2, 0}, {}, {}, 0, now));
  CHECK_FALSE(pool->beat("b", {1, 0}, {}, {}, 0, now));

  auto none = request(1);
  none.deviceCount = 0;
  pool->request(none, now);
  CHECK(failure(1).find("1 to 64 devices") != std::string::npos);
  auto eager = request(2);
  eager.ttlMs = 0;
  eager.holder = "evil\x1b[2J";
  pool->request(eager, now);
  REQUIRE(events.grants.size() == 1);
  CHECK(events.grants[0].ttlMs == times.minTtlMs);
  CHECK(events.grants[0].holder == "evil?[2J");
}
