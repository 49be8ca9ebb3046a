// Suspended leases after a manager's restart; and who comes first where leases wait to be resumed.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

// --- restarts and disagreement --------------------------------------------------------------------------

TEST_CASE_METHOD(Suspends, "after a manager's restart a suspended lease is not given away") {
  lease(1, 40 * kGiB);
  suspended(1);
  const uint64_t before = freeBytes();
  restart();
  CHECK(state(1) == LeaseState::suspended);
  pool->join(kAdmin, server("a", 1), {}, now);
  pool->request(kAdmin, request(2, 60'000, 60 * kGiB), now);
  pool->request(kAdmin, request(3, 0, kGiB), now);
  CHECK(contains(failure(3), "not yet said which leases it holds"));
  resume(1);
  CHECK(contains(notResumed(1), "not yet said which leases it holds"));
  SECTION("the server says that it is suspended") {
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    CHECK(state(1) == LeaseState::suspended);
    suspend(1);
    CHECK(events.results.at({1, 1}).kept == std::vector<uint64_t>{16 * kMiB});
    CHECK(events.grants.size() == 2);
  }
  SECTION("more stays there than the store says") {
    beat(1, {{1, 1}}, {{{1, 1}, {20 * kGiB}}});
    CHECK(freeBytes() == 59 * kGiB);
    CHECK(events.grants.size() == 1);
  }
  SECTION("the server says that it runs") {
    beat(1, {{1, 1}});
    CHECK(state(1) == LeaseState::active);
    CHECK(stored(1) == LeaseState::active);
    CHECK(freeBytes() == 39 * kGiB);
    CHECK(events.grants.size() == 1);
  }
  SECTION("the server does not hold it") {
    beat(1, {});
    now += uint64_t{3} * times.beatMs;
    beat(1, {});
    CHECK(state(1) == LeaseState::revoking);
    CHECK(contains(record(1).reason, "no longer holds it"));
    CHECK(freeBytes() <= before);
  }
}

TEST_CASE_METHOD(Suspends, "a manager that died before it stored a suspension hears of it from the server") {
  lease(1, 40 * kGiB);
  suspend(1);
  restart();
  pool->join(kAdmin, server("a", 1), {}, now);
  SECTION("and stores it") {
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    CHECK(state(1) == LeaseState::suspended);
    CHECK(stored(1) == LeaseState::suspended);
    CHECK(freeBytes() == 79 * kGiB - 16 * kMiB);
  }
  SECTION("and stores it when it can") {
    disk->full = true;
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    CHECK(freeBytes() == 39 * kGiB);
    disk->full = false;
    pool->tick(now += 1000);
    CHECK(state(1) == LeaseState::suspended);
  }
  SECTION("with more devices, or less, than it has") {
    beat(1, {{1, 1}}, {{{1, 1}, {}}});
    CHECK(state(1) == LeaseState::suspended);
    CHECK(freeBytes() == 39 * kGiB);  // what it does not say counts as the whole
  }
  resume(1);
  serverResumes();
  CHECK(isRunning(1));
}

TEST_CASE_METHOD(Suspends, "a beat that was sent before an order says nothing of the lease") {
  lease(1, 40 * kGiB);
  suspend(1);
  beat(1, {{1, 1}});
  serverSuspends();
  CHECK(state(1) == LeaseState::suspended);
  resume(1);
  beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
  CHECK(freeBytes() == 39 * kGiB);
  serverResumes();
  beat(1, {{1, 1}});
  CHECK(state(1) == LeaseState::active);
}

// --- the queue ------------------------------------------------------------------------------------------

TEST_CASE_METHOD(Suspends, "resuming says what is missing and who holds it, or waits for it") {
  lease(1, 40 * kGiB);
  suspended(1);
  lease(2, 60 * kGiB);
  resume(1);
  CHECK(contains(notResumed(1),
                 "cannot be resumed: a: GPU 0 (GPU) has 19.0 GiB free of the 41.0 GiB that are wanted: it is "
                 "held by holder2 (0 ms)"));
  events.resumeFailures.clear();
  resume(1, 60'000);
  CHECK(notResumed(1).empty());
  CHECK(contains(refusal(1, true), "waits already to be resumed: a: GPU 0"));  // who does not want to wait
  SECTION("until a lease ends") {
    pool->request(kAdmin, request(3, 60'000, 70 * kGiB), now);
    pool->request(kAdmin, request(4, 0, 15 * kGiB), now);  // what is free is not for it
    CHECK(contains(failure(4), "2 earlier requests are waiting"));
    pool->release(kAdmin, {2, 2}, now);
    pool->revoked(kA, {2, 2}, now);
    REQUIRE(events.resumes.size() == 1);
    CHECK(events.grants.size() == 2);
    serverResumes();
    CHECK(isRunning(1));
  }
  SECTION("until a lease is suspended") {
    suspended(2);
    REQUIRE(events.resumes.size() == 1);
  }
  SECTION("until its deadline") {
    std::string why;
    for (int i = 0; i < 12; ++i) {
      CHECK(notResumed(1).empty());
      now += 5000;
      CHECK(pool->renew(kAdmin, {1, 1}, now, &why));
      CHECK(pool->renew(kAdmin, {2, 2}, now, &why));
      beat(1, {{1, 1}, {2, 2}}, {{{1, 1}, {16 * kMiB}}});
    }
    CHECK(contains(notResumed(1), "held by holder2"));
    CHECK(state(1) == LeaseState::suspended);
  }
  SECTION("until nobody waits for it any more") {
    events.gone.insert({1, 1});
    pool->release(kAdmin, {2, 2}, now);
    pool->revoked(kA, {2, 2}, now);
    CHECK(events.resumes.empty());
    lease(3, 60 * kGiB);
  }
}

TEST_CASE_METHOD(Suspends,
                 "who waits to be resumed is not overtaken, and holds back only what would delay it") {
  joinAndBeat(server("b", 2));
  lease(1, 40 * kGiB);
  const bool onA = record(1).server().name == "a";
  REQUIRE(onA);
  suspended(1);
  LeaseRequest there = request(2, 0, 50 * kGiB);
  there.server = "a";
  pool->request(kAdmin, there, now);
  pool->granted({2, 2}, now);
  resume(1, 60'000);
  SECTION("a request that would take its memory waits") {
    there = request(3, 60'000, 25 * kGiB);  // 29 GiB are free, 41 are wanted
    there.server = "a";
    pool->request(kAdmin, there, now);
    CHECK(events.grants.size() == 2);
    pool->release(kAdmin, {2, 2}, now);
    pool->revoked(kA, {2, 2}, now);
    REQUIRE(events.resumes.size() == 1);
    CHECK(events.grants.size() == 3);  // beside it there is room
  }
  SECTION("a request for any server is served elsewhere") {
    pool->request(kAdmin, request(3, 0, 25 * kGiB), now);
    REQUIRE(events.grants.size() == 3);
    CHECK(events.grants.back().server.name == "b");
  }
  SECTION("a larger request for its server does not overtake it") {
    there = request(3, 60'000, 60 * kGiB);
    there.server = "a";
    pool->request(kAdmin, there, now);  // behind the lease that waits
    pool->release(kAdmin, {2, 2}, now);
    pool->revoked(kA, {2, 2}, now);
    CHECK(events.resumes.size() == 1);
    CHECK(events.grants.size() == 2);
  }
}

TEST_CASE_METHOD(Suspends, "who waits for its server comes before a lease that is to be resumed later") {
  lease(1, 40 * kGiB);
  suspended(1);
  lease(2, 50 * kGiB);
  pool->request(kAdmin, request(3, 60'000, 70 * kGiB), now);
  pool->release(kAdmin, {2, 2}, now);
  resume(1);
  CHECK(contains(notResumed(1) + (pool->tick(now += 2000), notResumed(1)), "earlier request"));
  pool->revoked(kA, {2, 2}, now);
  CHECK(events.grants.size() == 3);
  CHECK(events.resumes.empty());
}

TEST_CASE_METHOD(Suspends, "of two leases that wait to be resumed the first comes first") {
  lease(1, 60 * kGiB);
  suspended(1);
  lease(2, 10 * kGiB);
  suspended(2);
  lease(3, 40 * kGiB);
  resume(1, 60'000);  // 61 GiB; 38 are free, its own kept ones among them
  resume(2, 60'000);
  CHECK(events.resumes.empty());
  pool->release(kAdmin, {3, 3}, now);
  pool->revoked(kA, {3, 3}, now);
  REQUIRE(events.resumes.size() == 2);
  CHECK(events.resumes[0].id == Id{1, 1});
}

TEST_CASE_METHOD(Fixture, "a request that fits beside a lease that waits to be resumed is served") {
  joinAndBeat(server("a", 1, 2));
  leaseNow(1);
  pool->suspend(kAdmin, {1, 1}, 0, now);
  pool->suspendDone({1, 1}, events.suspends.back().number, {{0}, 0, 0, 0}, now);
  const auto ask = [&](uint64_t id, uint64_t memory) {
    LeaseRequest there = request(id, 60'000, memory);
    there.server = "a";
    pool->request(kAdmin, there, now);
    pool->granted(there.id, now);
  };
  ask(2, 70 * kGiB);
  CHECK(events.leases.at({2, 2}).devices[0].info.ordinal == 0);  // the fullest
  pool->resume(kAdmin, {1, 1}, 60'000, now);
  ask(3, kGiB);
  REQUIRE(has(3));
  CHECK(events.leases.at({3, 3}).devices[0].info.ordinal == 1);
  CHECK(events.resumes.empty());
}

TEST_CASE_METHOD(Suspends, "what lies on a cordoned server is resumed; on a broken device it is not") {
  lease(1, 40 * kGiB);
  suspended(1);
  SECTION("cordoned") {
    pool->cordon(kAdmin, "a", {}, [](const std::string&) {});
    resume(1);
    CHECK(events.resumes.size() == 1);
  }
  SECTION("cordoned, while others wait for whatever comes free") {
    pool->cordon(kAdmin, "a", {}, [](const std::string&) {});
    joinAndBeat(server("b", 2));
    pool->request(kAdmin, request(7), now);
    pool->request(kAdmin, request(8, 60'000), now);
    resume(1);
    CHECK(events.resumes.size() == 1);
  }
  SECTION("broken") {
    REQUIRE(pool->beat("a", {1, 0}, {{1, 1}}, {"ECC"}, 1, now, {{{1, 1}, {16 * kMiB}}}));
    resume(1);
    CHECK(contains(notResumed(1), "GPU 0 (GPU) is broken (ECC)"));
  }
  SECTION("away") {
    pool->left("a", {1, 0}, false, now);
    resume(1);
    CHECK(contains(notResumed(1), "a: not connected"));
    resume(1, 60'000);
    pool->join(kAdmin, server("a", 1), {}, now);
    CHECK(events.resumes.empty());
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    CHECK(events.resumes.size() == 1);
  }
}

TEST_CASE("what a suspended lease takes is computed without an overflow") {
  LeasedDevice device;
  device.info.memoryBytes = 80 * kGiB;
  device.memoryBytes = 40 * kGiB;
  CHECK(suspendedBytes(device, 0) == kGiB);
  CHECK(suspendedBytes(device, 40 * kGiB) == 41 * kGiB);
  CHECK(suspendedBytes(device, ~uint64_t{0}) == 41 * kGiB);
  CHECK(suspendedBytes(device, ~uint64_t{0} - kGiB + 1) == 41 * kGiB);
  device.info.software = true;
  CHECK(suspendedBytes(device, 0) == 0);
  CHECK(suspendedBytes(device, ~uint64_t{0}) == 40 * kGiB);
}
