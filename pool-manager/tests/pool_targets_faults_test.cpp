// Leases that move, when a server goes away meanwhile, or the manager does, or the store is full.
#include "targets_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

TEST_CASE_METHOD(Targets, "the target's server was told, perhaps: what it names decides") {
  migrate({"b"});
  SECTION("no answer") { pool->prepareFailed(kLease, events.prepares[0].number, "silent", false, now); }
  SECTION("lost") {
    pool->left("b", kOther.incarnation, false, now);
    joinAndBeat(server("b", 2, 2), {});
  }
  beats({kLease}, {});
  CHECK(state() == LeaseState::active);
  CHECK(at() == "a GPU 0");
  CHECK(freeOn("b") == 1);
  CHECK(revokesOf("b") == 1);
  pool->revoked(kOther, kLease, now);
  CHECK(freeOn("b") == 2);
}

TEST_CASE_METHOD(Targets, "the target's server goes away before it is told") {
  migrate({"b"});
  pool->left("b", kOther.incarnation, true, now);
  CHECK(contains(notMoved(), "server b"));
  CHECK(state() == LeaseState::active);
  CHECK(record().placements.size() == 1);
}

TEST_CASE_METHOD(Targets, "what the store refuses when all have moved is not told, and tried again") {
  ordered({"b"});
  disk->full = true;
  moves();
  CHECK(contains(notMoved(), "the lease is on b GPU 0, but what it has left is not free"));
  beats({kLease}, {kLease});
  CHECK(revokesOf("a") == 0);
  CHECK(contains(thrown([&] { pool->suspend(kAdmin, kLease, 0, now); }), "is being moved at this moment"));
  SECTION("the store is there again") {
    disk->full = false;
    pool->tick(now += 2000);
    CHECK(revokesOf("a") == 1);
    CHECK(stored()->primary().server.name == "b");
    CHECK(isMoved());
  }
  SECTION("another manager goes on") {
    disk->full = false;
    restarted();
    rejoin({kLease}, {kLease});
    CHECK(state() == LeaseState::moving);
    CHECK(at() == "a GPU 0");
    migrate({});
    prepared();
    moves();
    CHECK(at() == "b GPU 0");
    CHECK(revokesOf("a") == 1);
  }
}

TEST_CASE_METHOD(Targets, "a manager that ends meanwhile knows of both when it is started again") {
  SECTION("another server") {
    ordered({"b"});
    const uint64_t before = events.migrates.back().number;
    restarted();
    CHECK(state() == LeaseState::moving);
    CHECK(places() == "ba");
    rejoin({kLease}, {kLease});
    CHECK(state() == LeaseState::moving);
    CHECK(freeOn("a") == 1);
    CHECK(freeOn("b") == 1);
    moves(before);  // of the manager before
    CHECK(state() == LeaseState::moving);
    CHECK(contains(refused({"a"}), "is moving to b GPU 0 already"));
    ordered({"b"});
    moves();
    CHECK(at() == "b GPU 0");
    SECTION("and again before a has confirmed") {
      restarted();
      rejoin({kLease}, {kLease});
      CHECK(at() == "b GPU 0");
      CHECK(state() == LeaseState::active);
      CHECK(freeOn("a") == 1);
      CHECK(revokesOf("a") == 1);
      pool->revoked(kA, kLease, now);
      CHECK(freeOn("a") == 2);
    }
  }
  SECTION("its own server") {
    ordered({"", {1}});
    restarted();
    rejoin({kLease}, {});
    CHECK(state() == LeaseState::moving);
    CHECK(freeOn("a") == 0);
    ordered({});
    CHECK(events.prepares[0].here);
    moves();
    restarted();
    rejoin({kLease}, {});
    CHECK(at() == "a GPU 1");
    REQUIRE(events.settles.size() == 1);
    pool->settled(kLease, events.settles[0].number, now);
    CHECK(freeOn("a") == 1);
  }
  SECTION("the store has it, and nobody else") {
    disk->unsure = true;
    pool.pool->migrate(kAdmin, kLease, 0, {"b"}, now);
    store->deliver();  // and what follows from that is not written any more
    CHECK(events.prepares.empty());
    disk->unsure = false;
    restarted();
    CHECK(state() == LeaseState::moving);
    rejoin({kLease}, {});
    CHECK(state() == LeaseState::active);  // nothing can be there
    CHECK(at() == "a GPU 0");
    CHECK(revokesOf("b") == 1);
  }
}

TEST_CASE_METHOD(Targets,
                 "a moving lease that ends is revoked on both servers, and over when both have said so") {
  ordered({"b"});
  enum class End { released, expired, andRestarted };
  const End how = GENERATE(End::released, End::expired, End::andRestarted);
  if (how == End::expired) {
    now += 11'000;
    beats({kLease}, {kLease});
    pool->tick(now);
  } else {
    pool->release(kAdmin, kLease, now);
  }
  if (how == End::andRestarted) {
    restarted();
    rejoin({kLease}, {kLease});
    CHECK(state() == LeaseState::revoking);
  }
  REQUIRE(revokesOf("a") == 1);
  REQUIRE(revokesOf("b") == 1);
  CHECK(contains(record().reason, how == End::expired ? "renewed" : "released"));
  CHECK(contains(thrown([&] { pool.pool->places(kAdmin, kLease); }), "the lease has ended: "));
  SECTION("both") {
    pool->revoked(kOther, kLease, now);
    CHECK_FALSE(events.over.contains(kLease));
    CHECK(state() == LeaseState::revoking);
    pool->revoked(kA, kLease, now);
    CHECK(events.over.contains(kLease));
    CHECK(freeOn("a") + freeOn("b") == 4);
    CHECK_FALSE(stored());
  }
  SECTION("one does not") {
    pool->revoked(kOther, kLease, now);
    pool->left("a", kA.incarnation, false, now);
    now += 20'000;
    pool->tick(now);
    CHECK(state() == LeaseState::lost);
    CHECK(events.over.contains(kLease));
    REQUIRE(pool->beat("b", kOther.incarnation, {}, {}, 1, now));
    CHECK(freeOn("b") == 2);  // a's are kept
    CHECK(stored()->placements.size() == 1);
    CHECK(stored()->primary().server.name == "a");
    joinAndBeat(server("a", 1, 2), {kLease});
    pool->revoked(kA, kLease, now);
    CHECK(pool.pool->leases().empty());
    CHECK(freeOn("a") == 2);
  }
  SECTION("one after the lease was given up") {
    pool->left("a", kA.incarnation, false, now);
    pool->revokeFailed(kOther, kLease, now);
    now += 20'000;
    pool->tick(now);
    CHECK(state() == LeaseState::lost);
    REQUIRE(pool->beat("b", kOther.incarnation, {kLease}, {}, 1, now));
    pool->revoked(kOther, kLease, now);
    CHECK(freeOn("b") == 2);
    REQUIRE(pool.pool->leases().size() == 1);
    pool->drop(kAdmin, kLease, now);
    CHECK(pool.pool->leases().empty());
  }
}

TEST_CASE_METHOD(Targets, "the lease lives on where its server is not gone") {
  ordered({"b"});
  const auto answered = [&](const char* why) {
    INFO(notMoved());
    CHECK(contains(notMoved(), why));
    CHECK(state() == LeaseState::active);
    CHECK(stored()->placements.size() == 1);
    CHECK_FALSE(events.over.contains(kLease));
  };
  SECTION("the target, when its server is started again") {
    startedAgain(server("a", 9, 2));
    answered("the lease is on b GPU 0 now: its server a was restarted");
    CHECK(at() == "b GPU 0");
    CHECK(freeOn("a") == 2);
  }
  SECTION("the target, when its server leaves") {
    pool->left("a", kA.incarnation, true, now);
    answered("the lease is on b GPU 0 now: its server a left the pool");
    CHECK(at() == "b GPU 0");
  }
  SECTION("the target, when its server does not hold it any more") {
    now += 5000;
    beats({}, {kLease});
    CHECK(contains(notMoved(), "the lease is on b GPU 0 now: its server a no longer holds it"));
    CHECK(at() == "b GPU 0");
    CHECK(freeOn("a") == 1);
    pool->revoked(kA, kLease, now);
    CHECK(freeOn("a") == 2);
  }
  SECTION("the primary, when the target's server is started again") {
    startedAgain(server("b", 9, 2));
    answered("the lease is on a GPU 0 now: its server b was restarted");
    CHECK(at() == "a GPU 0");
    CHECK(freeOn("b") == 2);
    moves();  // late
    CHECK(at() == "a GPU 0");
  }
  SECTION("the target; what still runs on the server that was started again is kept") {
    Server again = server("a", 9, 2);
    again.devices[0].problem = "an old worker runs";
    std::vector<DeviceReport> reports(2);
    reports[0].running = {kLease};
    startedAgain(again, reports);
    REQUIRE(pool->beat("a", {9, 0}, {}, {"an old worker runs", ""}, 1, now));
    CHECK(state() == LeaseState::moving);
    CHECK(contains(refused({}), "server a: it was restarted"));
    REQUIRE(pool->beat("a", {9, 0}, {}, {"", ""}, 1, now));
    CHECK(state() == LeaseState::active);
    CHECK(at() == "b GPU 0");
    CHECK(freeOn("a") == 2);
  }
  SECTION("and ends with the other one") {
    startedAgain(server("a", 9, 2));
    startedAgain(server("b", 9, 2));
    CHECK(events.over.contains(kLease));
    CHECK(freeOn("a") + freeOn("b") == 4);
  }
}

TEST_CASE_METHOD(Targets, "a target that its server has not been told of does not save the lease") {
  SECTION("the store has not accepted it") {
    pool.pool->migrate(kAdmin, kLease, 0, {"b"}, now);
    CHECK(state() == LeaseState::moving);
    SECTION("its server leaves") { pool.pool->left("a", kA.incarnation, true, now); }
    SECTION("its server does not hold it any more") {
      now += 5000;
      REQUIRE(pool.pool->beat("a", kA.incarnation, {}, {}, 1, now));
      CHECK(state() == LeaseState::revoking);
      pool->revoked(kA, kLease, now);
    }
    pool->tick(now);
    CHECK(revokesOf("b") == 0);
  }
  SECTION("it is told, and has it not") {
    migrate({"b"});
    pool->left("a", kA.incarnation, true, now);
    CHECK(state() == LeaseState::active);
    now += 5000;
    REQUIRE(pool->beat("b", kOther.incarnation, {}, {}, 1, now));
    CHECK(state() == LeaseState::revoking);
    pool->revoked(kOther, kLease, now);
  }
  CHECK(events.over.contains(kLease));
  CHECK(freeOn("b") == 2);
  CHECK_FALSE(stored());
}

TEST_CASE_METHOD(Targets, "a lease that has moved ends with its server, whatever it has left elsewhere") {
  ordered({"b"});
  moves();
  startedAgain(server("b", 9, 2));
  CHECK(state() == LeaseState::revoking);
  CHECK(freeOn("b") == 1);
  pool->revoked(kA, kLease, now);
  CHECK(events.over.contains(kLease));
  CHECK(freeOn("a") + freeOn("b") == 4);
}

TEST_CASE_METHOD(Targets, "what a lease has left is free when its server is gone for good") {
  ordered({"b"});
  moves();
  startedAgain(server("a", 9, 2));
  CHECK(state() == LeaseState::active);
  CHECK(at() == "b GPU 0");
  CHECK(freeOn("a") == 2);
  CHECK(stored()->placements.size() == 1);
}

TEST_CASE_METHOD(Targets,
                 "a lease that goes into files stays there, whatever is written of what it has left") {
  ordered({"b"});
  moves();
  pool->suspend(kAdmin, kLease, 1000, now, "monday");
  const auto held = [&] {
    const auto order = events.suspends.back();
    pool.pool->suspendDone(kLease, order.number, {{0}, 0, 0, 0, {{7, 7}, "monday", "b"}}, now);
  };
  SECTION("what it has left is gone at that moment") {
    pool->left("a", kA.incarnation, false, now);
    pool->join(kAdmin, server("a", 9, 2), {}, now);
    REQUIRE(pool.pool->beat("a", {9, 0}, {}, {}, 1, now));
    held();
    pool->tick(now);
  }
  SECTION("the store refuses that for a while, and its server is started again, too") {
    disk->full = true;
    startedAgain(server("a", 9, 2));
    now += 500;
    held();
    startedAgain(server("b", 9, 2));
    disk->full = false;
    pool->tick(now += 600);  // what it has left
    pool->tick(now += 500);  // that it is held
    CHECK(record().placements.empty());
  }
  CHECK(state() == LeaseState::held);
  CHECK(record().hold->was.server.name == "b");
  REQUIRE(stored());
  CHECK(stored()->state == LeaseState::held);
  restarted();
  CHECK(state() == LeaseState::held);
}
