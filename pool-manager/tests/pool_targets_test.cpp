// Leases that move to other devices, of their server or of another one.
#include "targets_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

TEST_CASE_METHOD(Targets, "a lease moves to another server, and is on both until all have said so") {
  disk->full = true;
  migrate({"b"});
  CHECK(events.prepares.empty());  // the store comes first
  CHECK(contains(notMoved(), "the manager cannot write its store"));
  disk->full = false;
  pool->tick(now += 2000);
  beats({kLease}, {});
  CHECK(state() == LeaseState::active);
  CHECK(freeOn("b") == 2);
  CHECK(revokesOf("b") == 0);  // it was never told

  migrate({"b"});
  REQUIRE(events.prepares.size() == 1);
  const auto prepare = events.prepares[0];
  CHECK(prepare.server == "b");
  CHECK_FALSE(prepare.here);
  CHECK(prepare.target.key == record().primary().key);
  CHECK(prepare.target.epoch > record().primary().epoch);
  CHECK(prepare.target.devices.at(0).memoryBytes == 80 * kGiB);
  CHECK(stored()->state == LeaseState::moving);
  CHECK(stored()->target() != nullptr);
  CHECK(to() == "b GPU 0");
  CHECK(places() == "ba");
  CHECK(freeOn("a") == 1);
  CHECK(freeOn("b") == 1);
  CHECK(events.migrates.empty());
  migrate({"b"});  // joins it
  migrate({});
  beats({kLease}, {});  // b has not heard of it yet
  CHECK(events.prepares.size() == 1);
  CHECK(state() == LeaseState::moving);

  prepared();
  REQUIRE(events.migrates.size() == 1);
  CHECK(events.migrates[0].server == "a");
  CHECK(events.migrates[0].drainMs == 4000);
  CHECK(events.migrates[0].target.server.name == "b");
  beats({kLease}, {kLease});
  CHECK(state() == LeaseState::moving);
  moves();
  CHECK(events.moved[kLease].sessions == 2);
  CHECK(events.moved[kLease].server == "b GPU 0");
  CHECK(state() == LeaseState::active);
  CHECK(at() == "b GPU 0");
  CHECK(stored()->primary().server.name == "b");
  CHECK(places() == "b");
  CHECK(freeOn("a") == 1);  // a has not said that nothing of it is there
  REQUIRE(revokesOf("a") == 1);
  pool->revokeFailed(kA, kLease, now);
  beats({}, {kLease});
  CHECK(revokesOf("a") == 2);
  pool->revoked(kA, kLease, now);
  CHECK(freeOn("a") == 2);
  CHECK(freeOn("b") == 1);
  CHECK(state() == LeaseState::active);
  CHECK(stored()->placements.size() == 1);
  pool->request(kAdmin, request(1), now);
  CHECK(events.leases.at(kLease).server.name == "b");
  beats({}, {kLease});
  CHECK(revokesOf("b") == 0);
  pool->release(kAdmin, kLease, now);
  CHECK(revokesOf("b") == 1);
  CHECK(revokesOf("a") == 2);
}

// Sessions go to another server over the network, also those that share memory with their clients now.
TEST_CASE_METHOD(Targets, "a lease moves to a server that takes network sessions, and to no other") {
  const bool takes = GENERATE(true, false);
  Server better = server("aa", 3, 1);  // the fewer devices of its are left
  if (!takes) better.port = 0;
  joinAndBeat(better);
  SECTION("to the better one") {
    migrate(elsewhere());
    REQUIRE(events.prepares.size() == 1);
    CHECK(events.prepares[0].server == (takes ? "aa" : "b"));
  }
  SECTION("by its name") {
    if (takes) return migrate({"aa"});
    CHECK(contains(refused({"aa"}), "it takes no network sessions: start it with --listen"));
  }
}

// Where it is, it may share memory.
TEST_CASE_METHOD(Targets, "within a server that takes no network sessions a lease moves") {
  Server deaf = server("a", 1, 2);
  deaf.port = 0;
  startedAgain(deaf);
  beats({kLease}, {});
  migrate({"", {1}});
  REQUIRE(events.prepares.size() == 1);
  CHECK(events.prepares[0].here);
}

TEST_CASE_METHOD(Targets, "a lease moves to another device of its server") {
  migrate({"", {1}});
  REQUIRE(events.prepares.size() == 1);
  CHECK(events.prepares[0].here);
  CHECK(places() == "a");
  CHECK(freeOn("a") == 0);
  prepared();
  moves();
  CHECK(events.moved[kLease].server == "a GPU 1");
  CHECK(events.revokes.empty());
  REQUIRE(events.settles.size() == 1);
  CHECK(freeOn("a") == 0);
  pool->settleFailed(kLease, events.settles[0].number, now);
  beats({kLease}, {});
  REQUIRE(events.settles.size() == 2);
  pool->settled(kLease, events.settles[0].number, now);  // late
  CHECK(freeOn("a") == 0);
  pool->settled(kLease, events.settles[1].number, now);
  CHECK(freeOn("a") == 1);
  CHECK(at() == "a GPU 1");
  beats({kLease}, {});
  CHECK(events.settles.size() == 2);
}

TEST_CASE_METHOD(Targets, "whoever names no device gets any that fit") {
  SECTION("of its own server: not its own") { ordered({"a"}); }
  SECTION("elsewhere") { ordered(elsewhere()); }
  SECTION("the fullest server that fits, on the fullest device") {
    lease(2, "b", 40 * kGiB);
    joinAndBeat(server("c", 3, 4));
    pool->release(kAdmin, kLease, now);
    pool->revoked(kA, kLease, now);
    pool->request(kAdmin, request(3, 0, kGiB), now);  // another one, of a part of a device
    pool->granted({3, 3}, now);
    pool->migrate(kAdmin, {3, 3}, 0, elsewhere(), now);
    const Lease& target = events.prepares.back().target;
    CHECK(target.server.name != events.leases.at({3, 3}).server.name);
    CHECK(target.devices.at(0).memoryBytes == kGiB);
    return;
  }
  CHECK(events.prepares[0].target.devices.at(0).info.uuid != record().primary().devices.at(0).info.uuid);
}

TEST_CASE_METHOD(Targets, "a lease of a server where leases take turns moves to one where they do not") {
  Server other = server("c", 3);
  other.overcommitPercent = 200;
  joinAndBeat(other);
  lease(2, "c");
  pool->migrate(kAdmin, {2, 2}, 0, {"b"}, now);  // when it has its turn, its server knows
  REQUIRE(events.prepares.size() == 1);
  CHECK(events.prepares.back().server == "b");
  pool->prepareDone({2, 2}, events.prepares.back().number, now);
  REQUIRE(events.migrates.size() == 1);
  pool->migrateDone({2, 2}, events.migrates.back().number, {1, kGiB, 10}, now);
  CHECK(pool.pool->leases().at({2, 2}).server().name == "b");
}

TEST_CASE_METHOD(Targets, "what cannot be had is refused with the reason, and nothing changes") {
  const auto is = [&](const MoveTarget& where, const char* why) {
    const std::string text = refused(where);
    INFO(text);
    CHECK(contains(text, "lease 00000000 cannot be moved: "));
    CHECK(contains(text, why));
  };
  SECTION("no such server") { is({"z"}, "there is no server named z"); }
  SECTION("no such device") { is({"b", {7}}, "b: there is no such GPU"); }
  SECTION("its own device") { is({"a", {0}}, "GPU 0 (GPU) is the lease's own"); }
  SECTION("too many devices") { is({"b", {0, 1}}, "it has 1 GPU(s), and 2 are named"); }
  SECTION("devices of any server") { is({"", {0}, true}, "by their numbers on one server"); }
  SECTION("no room") {
    lease(2, "b");
    lease(3, "b", 10 * kGiB);
    is({"b"}, "GPU 0 (GPU) is held by holder2");
    is(elsewhere(), "with 69.0 GiB free");
  }
  SECTION("another tenant's leases have no names") {
    lease(2, "b");
    lease(3, "b");
    LeaseRequest wish = request(4);
    const Principal tenant{Principal::Role::user, "t"};
    pool->request(tenant, wish, now);
    pool->granted({4, 4}, now);
    CHECK(contains(thrown([&] { pool->migrate(tenant, {4, 4}, 0, elsewhere(), now); }),
                   "GPU 0 (GPU) is in use"));
    CHECK(contains(thrown([&] { pool->migrate(tenant, kLease, 0, {"b"}, now); }), "another tenant's"));
    CHECK(thrown([&] { pool.pool->places(tenant, kLease); }) == "that lease is another tenant's");
  }
  SECTION("cordoned") {
    pool->cordon(kAdmin, "b", {"a new fan", "", 0}, [](const std::string&) {});
    is({"b"}, "b: cordoned by an operator: a new fan");
    is(elsewhere(), "b: cordoned");
  }
  SECTION("broken") {
    REQUIRE(pool->beat("b", kOther.incarnation, {}, {"ECC", "ECC"}, 1, now));
    is({"b"}, "GPU 0 (GPU) is broken (ECC)");
  }
  SECTION("not connected") {
    pool->left("b", kOther.incarnation, false, now);
    is({"b"}, "b: not connected");
  }
  SECTION("other devices") {
    Server other = server("c", 3);
    SECTION("model") { other.devices[0].name = "other"; }
    SECTION("memory") { other.devices[0].memoryBytes += kGiB; }
    SECTION("driver") { other.devices[0].driverVersion = 12040; }
    SECTION("kind") { other.devices[0].software = true; }
    joinAndBeat(other);
    is({"c"}, "is another model or has another driver than the lease's GPU");
  }
  SECTION("where leases take turns") {
    Server other = server("c", 3);
    other.overcommitPercent = 200;
    joinAndBeat(other);
    is({"c"}, "c: its leases take turns");
    lease(2, "c");
    for (const MoveTarget& own : {MoveTarget{"c"}, MoveTarget{"", {1}}})
      CHECK(contains(thrown([&] { pool->migrate(kAdmin, {2, 2}, 0, own, now); }),
                     "leases of server c take turns on the GPUs that they have"));
  }
  SECTION("not free: its own server, which is cordoned") {
    pool->cordon(kAdmin, "a", {"", "", 0}, [](const std::string&) {});
    is({"a", {1}}, "a: cordoned");
  }
  CHECK(events.prepares.empty());
  CHECK(state() == LeaseState::active);
  CHECK(record().placements.size() == 1);
}

TEST_CASE_METHOD(Targets, "a lease that moves is not suspended, and goes nowhere else") {
  ordered({"b", {1}});
  movesNot("", false);
  CHECK(state() == LeaseState::moving);
  CHECK(contains(thrown([&] { pool->suspend(kAdmin, kLease, 0, now); }),
                 "cannot be suspended: it is moving to b GPU 1, and has to arrive there first"));
  CHECK(contains(thrown([&] { pool->resume(kAdmin, kLease, 0, now); }),
                 "cannot be resumed: it is moving to b GPU 1"));
  for (const MoveTarget& other : {MoveTarget{"b", {0}}, MoveTarget{"a"}, MoveTarget{"", {1}}})
    CHECK(contains(refused(other), "is moving to b GPU 1 already"));
  for (const MoveTarget& same : {MoveTarget{"b", {1}}, MoveTarget{"b"}, elsewhere(), MoveTarget{}}) {
    migrate(same);
    CHECK(state() == LeaseState::moving);
  }
  CHECK(events.prepares.size() == 2);  // the others have joined the first one
  std::string why;
  CHECK(pool->renew(kAdmin, kLease, now, &why));
  CHECK(contains(pool.pool->inventory(kAdmin, now).at(0).devices.at(0).holders.at(0), ", moving"));
}

TEST_CASE_METHOD(Targets, "where nothing has moved the lease is what it was") {
  SECTION("another server") {
    ordered({"b"});
    movesNot("a capture is open");
    REQUIRE(events.returns.size() == 1);
    CHECK_FALSE(events.returns[0].here);
    CHECK(notMoved().empty());
    returned(true);
    CHECK(notMoved() == "server a: a capture is open");
    const AuditEntry told = pool->audit(kAdmin, {}, 100).back();
    CHECK(told.event == AuditEvent::stayed);
    CHECK(told.reason == "server a: a capture is open");
    CHECK(state() == LeaseState::active);
    CHECK(at() == "a GPU 0");
    REQUIRE(revokesOf("b") == 1);
    CHECK(freeOn("b") == 1);
    CHECK(contains(refused({"b"}), "b: it has not confirmed yet that the lease has left it"));
    pool->revoked(kOther, kLease, now);
    CHECK(freeOn("b") == 2);
  }
  SECTION("its own server") {
    ordered({"", {1}});
    movesNot("a capture is open");
    REQUIRE(events.returns.size() == 1);
    CHECK(events.returns[0].here);
    returned(true);  // and given back
    CHECK(freeOn("a") == 1);
    CHECK(events.settles.empty());
    CHECK(events.revokes.empty());
  }
  SECTION("the target's server refuses it") {
    migrate({"b"});
    pool->prepareFailed(kLease, events.prepares[0].number, "no", true, now);
    returned(true);
    CHECK(notMoved() == "server b: no");
    pool->revoked(kOther, kLease, now);
    CHECK(freeOn("b") == 2);
  }
  CHECK(state() == LeaseState::active);
  CHECK(stored()->state == LeaseState::active);
  CHECK(stored()->placements.size() == 1);
  CHECK(events.migrates.size() <= 1);
  migrate({"b"});
  CHECK(state() == LeaseState::moving);
}

TEST_CASE_METHOD(Targets, "where sessions may have moved the lease keeps both, and goes on when asked") {
  ordered({"b"});
  std::string why = "lost";
  SECTION("a session is there") {
    movesNot("one cannot be moved");
    returned(false);
    why =
        "server a: one cannot be moved; the lease may have sessions in both places: it is moving to b GPU 0 "
        "still";
  }
  SECTION("b does not say") {
    movesNot("no");
    pool->returnFailed(kLease, events.returns[0].number, "it does not answer", now);
    why = "server a: no; server b does not say what is there: it does not answer; the lease may";
  }
  SECTION("b is lost meanwhile") {
    movesNot("no");
    pool->left("b", kOther.incarnation, false, now);
    why = "lost the connection to server b; whether its sessions have moved is not known";
    joinAndBeat(server("b", 2, 2), {kLease});
  }
  SECTION("a does not answer") {
    movesNot("it does not answer", false);
    why = "server a: it does not answer";
  }
  SECTION("a is lost meanwhile") {
    pool->left("a", kA.incarnation, false, now);
    why = "lost the connection to server a; whether its sessions have moved is not known";
    CHECK(contains(refused({}), "cannot be moved: server a: not connected"));
    joinAndBeat(server("a", 1, 2), {kLease});
  }
  INFO(notMoved());
  CHECK(contains(notMoved(), why));
  beats({kLease}, {kLease});
  CHECK(state() == LeaseState::moving);
  CHECK(freeOn("a") == 1);
  CHECK(freeOn("b") == 1);
  CHECK(events.revokes.empty());
  migrate({});
  REQUIRE(events.prepares.size() == 2);
  CHECK(events.prepares[1].target.epoch == events.prepares[0].target.epoch);
  prepared();
  REQUIRE(events.migrates.size() == 2);
  moves();
  CHECK(at() == "b GPU 0");
}

TEST_CASE_METHOD(Targets, "a device of a lease that has moved away and back") {
  ordered({"b"});
  moves();
  pool->revoked(kA, kLease, now);
  migrate({"a", {0}});
  prepared();
  moves();
  CHECK(at() == "a GPU 0");
  pool->revoked(kOther, kLease, now);
  CHECK(freeOn("a") == 1);
  CHECK(freeOn("b") == 2);
  CHECK(record().primary().epoch > events.prepares[0].target.epoch);
}

TEST_CASE_METHOD(Targets, "all devices of a lease move, each to one like it") {
  joinAndBeat(server("c", 3, 3));
  LeaseRequest wish = request(5, 0, 0, 2);
  wish.server = "b";
  pool->request(kAdmin, wish, now);
  pool->granted({5, 5}, now);
  pool->migrate(kAdmin, {5, 5}, 0, {"c", {2, 0}}, now);
  const auto& devices = events.prepares.back().target.devices;
  REQUIRE(devices.size() == 2);
  CHECK(devices[0].info.ordinal == 2);
  CHECK(devices[1].info.ordinal == 0);
  CHECK(pool.pool->list(kAdmin, now).at(1).movesTo == "c GPUs 2,0");
}
