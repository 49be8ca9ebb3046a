// Leases against a clock and a server made by hand.
#include <sys/wait.h>
#include <unistd.h>

#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  SECTION("this manager lost it") {}
  SECTION("a manager reads it") { restart(); }
  SECTION("the server is there") {
    joinAndBeat(server("a", 1), {{1, 1}});
    CHECK(contains(thrown([&] { pool->drop(kAdmin, {1, 1}, now); }), "server a is connected"));
    CHECK(pool->leases().size() == 1);
    return;
  }
  CHECK(pool->drop(kAdmin, {1, 1}, now));
  CHECK(events.over.contains({1, 1}));
  CHECK(pool->leases().empty());
  CHECK(store->range("lease/").empty());
  CHECK_FALSE(pool->drop(kAdmin, {1, 1}, now));  // once is enough
  // The operator was wrong: nothing is leased where it still runs.
  joinAndBeat(server("a", 1), {{1, 1}});
  pool->request(kAdmin, request(2), now);
  CHECK(contains(failure(2), "still runs there"));
  pool->revoked(kA, {1, 1}, now);
  leaseNow(3);
}

TEST_CASE_METHOD(Fixture, "a lease that is not lost is released in its holder's place") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  CHECK(pool->drop(kAdmin, {1, 1}, now));
  REQUIRE(events.revokes.size() == 1);
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  now += uint64_t{3} * times.beatMs;
  beat(1, {});
  REQUIRE(events.revokes.size() == 1);  // its workers may still be ending
  CHECK_FALSE(events.over.contains({1, 1}));
  pool->revoked(kA, {1, 1}, now);
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
  CHECK(failure(4).find("2 earlier requests are waiting") != std::string::npos);
  LeaseRequest elsewhere = request(5);
  elsewhere.server = "z";
  pool->request(kAdmin, elsewhere, now);
  CHECK(failure(5) == "there is no server named z in the pool; there are: a");  // it waits for nobody
  now += 5000;
  beat(1, {{1, 1}});
  pool->tick(now);
  CHECK(failure(2).find("held by holder1") != std::string::npos);
  CHECK(failure(3).empty());
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[1].id == Id{2, 2});
}

TEST_CASE_METHOD(Fixture, "what no server has is refused at once, and holds back nobody") {
  joinAndBeat(server("a", 1, 2));
  pool->request(kAdmin, request(1, 60'000, 0, 8), now);
  CHECK(failure(1).find("8 devices on one server are wanted, but no server has more than 2") !=
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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revoked(kA, {1, 1}, now);
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
  pool->revokeFailed(kA, {1, 1}, now);
  beat(1, {{1, 1}});
  CHECK(events.revokes.size() == 2);
  pool->revoked(kA, {1, 1}, now);
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

TEST_CASE_METHOD(
    Fixture,
    "a holder of this machine that was killed loses its lease if no other one takes it over at once") {
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
  pool->tick(now += 1400);
  CHECK(events.revokes.empty());
  SECTION("another one does") {
    local.process = {4712, 100};
    events.leases.clear();
    pool->request(kAdmin, local, now);
    CHECK(events.leases.contains(local.id));
    pool->tick(now += 100);
    pool->tick(now += 1600);
    CHECK(events.revokes.empty());
    restart();  // the store knows it, too
    joinAndBeat(server("a", 1), {{1, 1}, {2, 2}});
    pool->tick(now += 100);
    pool->tick(now += 1600);
    CHECK(events.revokes.empty());
    events.dead.insert(4712);
    pool->tick(now += 100);
    pool->tick(now += 1600);
    REQUIRE(events.revokes.size() == 1);
    CHECK(events.revokes[0].reason == "its holder, process 4712, was killed");
    return;
  }
  pool->tick(now += 200);
  REQUIRE(events.revokes.size() == 1);
  CHECK(events.revokes[0].id == Id{1, 1});
  CHECK(events.revokes[0].reason == "its holder, process 4711, was killed");
  pool->revoked(kA, {1, 1}, now);
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
