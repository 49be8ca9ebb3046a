// Leases that are suspended and resumed: what is free meanwhile, and what is left when the store, the server
// or the connection to it fails in between.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

TEST_CASE_METHOD(Suspends, "a suspended lease takes only what stays on its device") {
  uint64_t memory = 40 * kGiB;
  SECTION("a part of the device") {}
  SECTION("the whole device") { memory = 0; }
  lease(1, memory);
  const uint64_t before = freeBytes();
  suspend(1);
  REQUIRE(events.suspends.size() == 1);
  CHECK(events.suspends[0].drainMs == 30'000);
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == before);
  serverSuspends();
  CHECK(state(1) == LeaseState::suspended);
  CHECK(events.results.at({1, 1}).movedBytes == 10 * kGiB);
  CHECK(freeBytes() == 79 * kGiB - 16 * kMiB);  // and its context and code
  CHECK(stored(1) == LeaseState::suspended);
  CHECK(pool->list(kAdmin, now).at(0).state == "suspended");

  lease(2, 30 * kGiB);
  pool->request(kAdmin, request(3, 0, 60 * kGiB), now);
  CHECK(contains(failure(3), "held by holder1 (0 ms, suspended) and holder2 (0 ms)"));
  pool->release(kAdmin, {2, 2}, now);
  pool->revoked(kA, {2, 2}, now);

  resume(1);
  CHECK(freeBytes() == before);
  CHECK(stored(1) == LeaseState::active);
  REQUIRE(events.resumes.size() == 1);
  CHECK_FALSE(isRunning(1));
  serverResumes();
  CHECK(isRunning(1));
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == before);
}

TEST_CASE_METHOD(Fixture, "a software GPU keeps no context: two leases of the whole device take turns") {
  Server facts = server("a", 1);
  facts.devices[0].software = true;
  joinAndBeat(facts);
  const auto turn = [&](uint64_t id) {
    pool->suspend(kAdmin, {id, id}, 0, now);
    pool->suspendDone({id, id}, events.suspends.back().number, {{0}, 0, 0, 0}, now);
    REQUIRE(pool->leases().at({id, id}).state == LeaseState::suspended);
  };
  leaseNow(1);
  turn(1);
  CHECK(pool->inventory(kAdmin, now).at(0).devices.at(0).freeBytes == 80 * kGiB);
  leaseNow(2);
  pool->resume(kAdmin, {1, 1}, 0, now);
  CHECK(contains(events.resumeFailures[{1, 1}], "held by holder2"));
  turn(2);
  pool->resume(kAdmin, {1, 1}, 0, now);
  pool->resumeDone({1, 1}, events.resumes.back().number, now);
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);
}

TEST_CASE_METHOD(Suspends, "who asks twice gets one order and the same answer") {
  lease(1, 0);
  suspend(1);
  suspend(1);
  CHECK(events.suspends.size() == 1);
  serverSuspends();
  events.results.clear();
  suspend(1);
  CHECK(events.suspends.size() == 1);
  CHECK(events.results.at({1, 1}).movedBytes == 10 * kGiB);
  resume(1);
  resume(1);
  CHECK(events.resumes.size() == 1);
  serverResumes();
  events.running.clear();
  resume(1);
  CHECK(isRunning(1));
  CHECK(events.resumes.size() == 1);
}

TEST_CASE_METHOD(Suspends,
                 "only its owner and operators suspend and resume a lease, and only one that runs") {
  const auto says = [&](uint64_t id, const std::string& text) {
    INFO(refusal(id, false) << "; " << refusal(id, true));
    return contains(refusal(id, false), text) && contains(refusal(id, true), text);
  };
  CHECK(says(1, "there is no lease"));
  pool->request(kAlice, request(1), now);
  CHECK(says(1, "it is granting"));
  pool->granted({1, 1}, now);
  CHECK(contains(thrown([&] { pool->suspend(kBob, {1, 1}, 0, now); }), "another tenant's"));
  CHECK(contains(thrown([&] { pool->resume(kBob, {1, 1}, 0, now); }), "another tenant's"));
  pool->suspend(kAlice, {1, 1}, 0, now);
  CHECK(contains(refusal(1, true), "is being suspended"));
  serverSuspends();
  pool->resume(kAlice, {1, 1}, 0, now);
  CHECK(contains(refusal(1, false), "is being resumed"));
  serverResumes();
  pool->release(kAlice, {1, 1}, now);
  CHECK(says(1, "it is revoking (released)"));
  pool->revoked(kA, {1, 1}, now);
  CHECK(says(1, "has ended: released"));
  lease(2, 0);
  pool->left("a", {1, 0}, false, now);
  CHECK(contains(refusal(2, false), "server a: not connected"));
  pool->tick(now += 20'000);
  pool->tick(now += 20'000);
  CHECK(says(2, "it is lost"));
}

TEST_CASE_METHOD(Suspends, "a server that does not suspend: why, and the lease goes on") {
  lease(1, 0);
  suspend(1);
  const uint64_t order = events.suspends[0].number;
  SECTION("it refuses") {
    pool->suspendFailed({1, 1}, order, "GPU 0 was not idle within 30 s", now);
    CHECK(notSuspended(1) == "server a: GPU 0 was not idle within 30 s");
  }
  SECTION("the connection ends") {
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(notSuspended(1), "lost the connection to server a"));
    joinAndBeat(server("a", 1), {{1, 1}});
  }
  SECTION("it comes back on another connection") {
    pool->join(kAdmin, server("a", 1), {}, now);
    CHECK(contains(notSuspended(1), "lost the connection to server a"));
    beat(1, {{1, 1}});
  }
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == 0);
  pool->suspendDone({1, 1}, order, {{0}, 0, 0, 0}, now);  // of an order that nobody waits for any more
  CHECK(state(1) == LeaseState::active);
  suspended(1);
}

TEST_CASE_METHOD(Suspends, "nothing is free before the store has accepted it") {
  lease(1, 0);
  suspend(1);
  const auto order = events.suspends.back();
  pool.pool->suspendDone(order.id, order.number, {{0}, 0, 0, 0}, now);
  CHECK(freeBytes() == 0);
  CHECK(events.results.empty());
  pool.pool->tick(now += 4000);
  CHECK(freeBytes() == 0);
  const auto revision = store->commitNow({}).revision;
  while (store->deliver()) {
  }
  CHECK(freeBytes() == 79 * kGiB);
  CHECK(events.results.size() == 1);
  CHECK(store->commitNow({}).revision == revision + 2);  // one write, and this one
}

TEST_CASE_METHOD(Suspends, "a suspension that the store refuses is written again until it accepts it") {
  lease(1, 0);
  suspend(1);
  (GENERATE(false, true) ? disk->full : disk->unsure) = true;  // it may have kept it, then
  serverSuspends();
  CHECK(contains(notSuspended(1), "its memory is not free before the manager can write its store"));
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == 0);
  CHECK(contains(refusal(1, true), "being suspended"));
  pool->tick(now += 500);
  pool->request(kAdmin, request(2, 60'000, 20 * kGiB), now);
  disk->full = disk->unsure = false;
  SECTION("it is tried again") {
    suspend(1);  // joins
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    pool->tick(now += 1000);
    CHECK(state(1) == LeaseState::suspended);
    CHECK(events.results.size() == 1);
    CHECK(events.suspends.size() == 1);
    CHECK(events.grants.size() == 2);  // who waits is served
  }
  SECTION("the lease ends meanwhile") {
    suspend(1);
    pool->release(kAdmin, {1, 1}, now);
    CHECK(contains(notSuspended(1), "has ended: released"));
    pool->tick(now += 1000);
    CHECK(state(1) == LeaseState::revoking);
    CHECK(freeBytes() == 0);
    pool->revoked(kA, {1, 1}, now);
    CHECK(events.grants.size() == 2);
  }
  SECTION("the manager dies meanwhile") {
    restart();
    joinAndBeat(server("a", 1), {{1, 1}});  // and the server says that it runs
    CHECK(state(1) == LeaseState::active);
    CHECK(freeBytes() == 0);
  }
}

TEST_CASE_METHOD(Suspends, "with a full disk nothing is resumed") {
  lease(1, 40 * kGiB);
  suspended(1);
  const uint64_t before = freeBytes();
  (GENERATE(false, true) ? disk->full : disk->unsure) = true;  // it may have kept it, then
  resume(1);
  CHECK(contains(notResumed(1), "cannot write its store"));
  CHECK(events.resumes.empty());
  CHECK(state(1) == LeaseState::suspended);
  CHECK(freeBytes() == before);
  disk->full = disk->unsure = false;
  SECTION("the manager is started again") {
    restart();
    pool->join(kAdmin, server("a", 1), {}, now);
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    CHECK(state(1) == LeaseState::suspended);
  }
  SECTION("it goes on") {}
  CHECK(freeBytes() == before);
  resume(1);
  serverResumes();
  CHECK(isRunning(1));
}

TEST_CASE_METHOD(Suspends, "a server without room for it: suspended again, and why") {
  lease(1, 40 * kGiB);
  suspended(1);
  const uint64_t before = freeBytes();
  resume(1);
  const auto order = events.resumes.back();
  SECTION("stored at once") { pool->resumeFailed(order.id, order.number, "GPU 0 has 3 GiB free", true, now); }
  SECTION("stored later") {
    disk->full = true;
    pool->resumeFailed(order.id, order.number, "GPU 0 has 3 GiB free", true, now);
    CHECK(freeBytes() == 39 * kGiB);  // reserved until then
    disk->full = false;
    pool->tick(now += 1000);
  }
  CHECK(notResumed(1) == "server a: GPU 0 has 3 GiB free");
  CHECK(state(1) == LeaseState::suspended);
  CHECK(stored(1) == LeaseState::suspended);
  CHECK(freeBytes() == before);
  resume(1);
  serverResumes();
  CHECK(isRunning(1));
}

TEST_CASE_METHOD(Suspends, "an order to resume whose end is unknown keeps the memory reserved") {
  lease(1, 40 * kGiB);
  suspended(1);
  resume(1);
  const auto order = events.resumes.back();
  const std::vector<SuspendedLease> itIs = {{{1, 1}, {16 * kMiB}}};
  SECTION("it does not answer, and may read the order later") {
    pool->resumeFailed(order.id, order.number, "it does not answer", false, now);
    CHECK(notResumed(1) == "server a: it does not answer");
    beat(1, {{1, 1}}, itIs);
    CHECK(freeBytes() == 39 * kGiB);
    REQUIRE(events.resumes.size() == 2);  // asked again, behind it
    SECTION("it is resumed") { serverResumes(); }
    SECTION("it is not") {
      pool->resumeFailed({1, 1}, events.resumes.back().number, "no room", true, now);
      CHECK(state(1) == LeaseState::suspended);
      return;
    }
  }
  SECTION("the connection ends, and it is resumed") {
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(notResumed(1), "lost the connection"));
    joinAndBeat(server("a", 1), {{1, 1}});
  }
  SECTION("the connection ends, and it is not") {
    pool->left("a", {1, 0}, false, now);
    CHECK(freeBytes() == 39 * kGiB);
    // Nobody knows: it does not run because a command was sent.
    CHECK(contains(refusal(1, true), "not connected"));
    pool->join(kAdmin, server("a", 1), {}, now);
    CHECK(contains(refusal(1, true), "not yet said"));
    beat(1, {{1, 1}}, itIs);
    CHECK(state(1) == LeaseState::suspended);
    CHECK(stored(1) == LeaseState::suspended);
    return;
  }
  SECTION("it does not answer, and a second command asks it again") {
    pool->resumeFailed(order.id, order.number, "it does not answer", false, now);
    resume(1);
    REQUIRE(events.resumes.size() == 2);
    pool->resumeFailed({1, 1}, events.resumes.back().number, "no room", true, now);
    CHECK(state(1) == LeaseState::suspended);
    return;
  }
  SECTION("the manager dies, and it is resumed") {
    restart();
    joinAndBeat(server("a", 1), {{1, 1}});
  }
  SECTION("the manager dies, and it is not") {
    restart();
    pool->join(kAdmin, server("a", 1), {}, now);
    beat(1, {{1, 1}}, itIs);
    CHECK(state(1) == LeaseState::suspended);
    return;
  }
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == 39 * kGiB);
}

TEST_CASE_METHOD(Suspends, "a server that goes away between the store and the order: suspended still") {
  lease(1, 40 * kGiB);
  suspended(1);
  pool.pool->resume(kAdmin, {1, 1}, 0, now);  // nothing is delivered
  pool.pool->left("a", {1, 0}, false, now);
  while (store->deliver()) {
  }
  CHECK(events.resumes.empty());
  CHECK(contains(notResumed(1), "lost the connection to server a"));
  CHECK(state(1) == LeaseState::suspended);
}

// --- ends -----------------------------------------------------------------------------------------------

TEST_CASE_METHOD(Suspends, "a suspended lease is renewed, and ends, as every other") {
  const bool again = GENERATE(false, true);
  lease(1, 40 * kGiB);
  suspended(1);
  const uint64_t before = freeBytes();
  std::string why;
  for (int i = 0; i < 5; ++i) {
    REQUIRE(pool->renew(kAdmin, {1, 1}, now += 6000, &why));
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    pool->tick(now);
    REQUIRE(state(1) == LeaseState::suspended);
  }
  pool->request(kAdmin, request(1), now);  // its holder asks again, on a new connection
  CHECK(failure(1).empty());
  SECTION("released") { pool->release(kAdmin, {1, 1}, now); }
  SECTION("expired") { pool->tick(now += 10'000 + times.driftMs + 1); }
  SECTION("its server has forgotten it") { beat(1, {}); }
  REQUIRE(state(1) == LeaseState::revoking);
  if (again) {
    restart();
    joinAndBeat(server("a", 1));
  }
  CHECK(freeBytes() == before);
  pool->revoked(kA, {1, 1}, now);
  CHECK(pool->leases().empty());
  CHECK(freeBytes() == 80 * kGiB);
}

TEST_CASE_METHOD(Suspends, "a lease that ends while it is resumed: who waits for that is told") {
  lease(1, 40 * kGiB);
  suspended(1);
  SECTION("in the queue") {
    lease(2, 60 * kGiB);
    resume(1, 60'000);
    pool->release(kAdmin, {1, 1}, now);
    pool->tick(now);
  }
  SECTION("on its server") {
    resume(1);
    pool->release(kAdmin, {1, 1}, now);
    serverResumes();
    CHECK(state(1) == LeaseState::revoking);
    CHECK(freeBytes() == 39 * kGiB);
  }
  SECTION("its server was started again") {
    resume(1);
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(server("a", 2));
    CHECK(pool->leases().empty());
    return;
  }
  CHECK(contains(notResumed(1), "the lease has ended: released"));
  CHECK_FALSE(isRunning(1));
  pool->revoked(kA, {1, 1}, now);
  CHECK_FALSE(pool->leases().contains({1, 1}));
}

TEST_CASE_METHOD(Suspends, "a suspended lease whose server is started again is over") {
  lease(1, 40 * kGiB);
  suspended(1);
  pool->left("a", {1, 0}, false, now);
  joinAndBeat(server("a", 2));
  CHECK(events.over.contains({1, 1}));
  CHECK(freeBytes() == 80 * kGiB);
}
