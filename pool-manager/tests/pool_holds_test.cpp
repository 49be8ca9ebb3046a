// Leases that are held in files: what is free meanwhile, what they outlive, where they are restored, and what
// they are when something fails in between.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const Id kCheckpoint{7, 7};

struct Holds : Suspends {
  void serverHolds() {
    const auto order = events.suspends.back();
    pool->suspendDone(order.id, order.number, {{0}, 10 * kGiB, 100, 300, {kCheckpoint, order.folder, "a"}},
                      now);
  }
  void hold(uint64_t id) {
    pool->suspend(kAdmin, {id, id}, 30'000, now, "monday");
    serverHolds();
    REQUIRE(state(id) == LeaseState::held);
  }
  void held(uint64_t id) {
    lease(id, 0);
    hold(id);
    pool->revoked(kA, {id, id}, now);
    REQUIRE(record(id).placements.empty());
  }
  void restore(uint64_t id, uint32_t waitMs = 0, const MoveTarget& to = {}) {
    pool->resume(kAdmin, {id, id}, waitMs, now, "monday", to);
  }
  // As far as the order to rebuild its sessions.
  void granted(uint64_t id, const MoveTarget& to = {}) {
    restore(id, 0, to);
    INFO(notResumed(id));
    REQUIRE(state(id) == LeaseState::granting);
    pool->granted({id, id}, now);
    REQUIRE(events.resumes.back().folder == "monday");
    REQUIRE(state(id) == LeaseState::active);
  }
  StoredLease storedLease(uint64_t id) {
    for (const Entry& entry : store->range("lease/"))
      if (auto lease = decodeLease(entry.value, "boot"); lease.id == Id{id, id}) return lease;
    return {};
  }
  bool isHeld(uint64_t id) {
    return state(id) == LeaseState::held && stored(id) == LeaseState::held &&
           pool->places(kAdmin, {id, id}).empty();
  }
  void startServer(uint64_t incarnation) {
    Server facts = server("a", incarnation);
    facts.bootId = "boot " + std::to_string(incarnation);
    pool->left("a", {incarnation - 1, 0}, false, now);
    joinAndBeat(facts);
  }
  bool isLive(uint64_t id) {
    const auto& leases = pool.pool->leases();
    return leases.contains({id, id}) && leases.at({id, id}).runs();
  }
  size_t revokesOf(uint64_t id) {
    return static_cast<size_t>(std::count_if(events.revokes.begin(), events.revokes.end(),
                                             [&](const auto& one) { return one.id == Id{id, id}; }));
  }
};

}  // namespace

TEST_CASE_METHOD(Holds, "a held lease has no devices, and its server is told that it has left") {
  lease(1, 0);
  CHECK(freeBytes() == 0);
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "monday");
  CHECK(events.suspends.back().folder == "monday");
  CHECK(state(1) == LeaseState::active);
  serverHolds();
  CHECK(isHeld(1));
  CHECK(events.results.at({1, 1}).movedBytes == 10 * kGiB);
  REQUIRE(revokesOf(1) == 1);
  CHECK(events.revokes.back().server == "a");
  CHECK(freeBytes() == 79 * kGiB);  // until the server has said so
  pool->revoked(kA, {1, 1}, now);
  CHECK(freeBytes() == 80 * kGiB);
  CHECK(storedLease(1).placements.empty());
  const Lease listed = pool->list(kAdmin, now).at(0);
  CHECK(listed.state == "held");
  CHECK(listed.held.folder == "monday");
  CHECK(listed.held.server == "a");
  CHECK(listed.why == "in monday, which a has written; gpupool restore brings it back");
  CHECK(listed.server.name.empty());
  CHECK(listed.devices.empty());
  CHECK(pool->audit(kAdmin, {}, 100).back().event == AuditEvent::held);
  lease(2, 0);

  CHECK(contains(refusal(1, false), "held in files (gpupool restore 00000000 monday)"));
  CHECK(contains(refusal(1, true), "held in files"));
  CHECK(contains(thrown([&] { pool->migrate(kAdmin, {1, 1}, 0, {}, now); }), "held in files"));
  CHECK(contains(thrown([&] { pool->checkpoint(kAdmin, {1, 1}, 0, "x", now); }), "held in files"));
  CHECK(contains(thrown([&] { pool->suspend(kAdmin, {1, 1}, 0, now, "tuesday"); }),
                 "cannot be written into files: it is held in files (gpupool restore 00000000 monday)"));
  events.results.clear();
  pool->suspend(kAdmin, {1, 1}, 0, now, "monday");  // asked again
  CHECK(events.results.contains({1, 1}));
  CHECK(contains(thrown([&] { pool->suspend(kAdmin, {1, 1}, 0, now, "tuesday"); }), "held in files"));
}

TEST_CASE_METHOD(Holds,
                 "it outlives its server and the manager, and is restored at the server that is there") {
  lease(1, 20 * kGiB);
  const std::string key = events.leases.at({1, 1}).key;
  hold(1);
  SECTION("the server has confirmed that it has left") { pool->revoked(kA, {1, 1}, now); }
  SECTION("it has not") {}
  uint64_t life = 1;
  SECTION("the server is started again") { startServer(++life); }
  SECTION("it leaves") {
    pool->left("a", {1, 0}, true, now);
    joinAndBeat(server("a", ++life));
  }
  SECTION("the manager is started again") {
    restart();
    joinAndBeat(server("a", 1));
    pool->revoked(kA, {1, 1}, now);
  }
  SECTION("both are, twice") {
    for (int i = 0; i < 2; ++i) {
      restart();
      startServer(++life);
    }
  }
  if (life == 1) pool->revoked(kA, {1, 1}, now);
  REQUIRE(isHeld(1));
  CHECK(freeBytes() == 80 * kGiB);
  std::string why;
  CHECK(pool->renew(kAdmin, {1, 1}, now, &why));

  restore(1);
  CHECK(freeBytes() == 59 * kGiB);
  const Lease grant = events.grants.back();
  CHECK(grant.held.checkpoint == kCheckpoint);
  CHECK(grant.server.incarnation == Id{life, 0});
  CHECK(grant.key == key);
  CHECK(pool->places(kAdmin, {1, 1}).empty());  // a client has to wait still
  pool->granted({1, 1}, now);
  CHECK(events.resumes.back().folder == "monday");
  CHECK_FALSE(isRunning(1));
  serverResumes();
  CHECK(isRunning(1));
  CHECK(pool->places(kAdmin, {1, 1}).size() == 1);
  CHECK(state(1) == LeaseState::active);
  CHECK_FALSE(storedLease(1).hold);
  CHECK(pool->audit(kAdmin, {}, 100).back().event == AuditEvent::restored);
  restore(1);  // whether it has gone on since, its server knows
  CHECK(events.resumes.back().here);
}

TEST_CASE_METHOD(Holds, "while it is written into files nobody is told that it is suspended") {
  lease(1, 0);
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "monday");
  const std::string busy = "is being written into files at this moment";
  const auto refuses = [&] {
    CHECK(contains(thrown([&] { pool->suspend(kAdmin, {1, 1}, 30'000, now); }), busy));
    CHECK(contains(thrown([&] { pool->suspend(kAdmin, {1, 1}, 30'000, now, "tuesday"); }), busy));
    CHECK(contains(thrown([&] { pool->migrate(kAdmin, {1, 1}, 4000, {}, now); }), busy));
  };
  refuses();
  disk->full = true;  // and while that is stored
  serverHolds();
  refuses();
  disk->full = false;
  pool->tick(now += 2000);
  CHECK(isHeld(1));
}

TEST_CASE_METHOD(Holds, "where it cannot be restored it is held as before") {
  held(1);
  uint64_t life = 1;
  SECTION("its server refuses the grant") {
    restore(1);
    pool->grantFailed({1, 1}, "it is busy", true, now);
    CHECK(contains(notResumed(1), "it is busy; the lease is held as before"));
  }
  SECTION("its server does not answer to it") {
    restore(1);
    pool->grantFailed({1, 1}, "it does not answer", false, now);
  }
  SECTION("the files are damaged") {
    granted(1);
    const auto order = events.resumes.back();
    pool->resumeFailed(order.id, order.number, "the file is damaged", true, now);
    CHECK(contains(notResumed(1), "server a: the file is damaged; the lease is held as before"));
  }
  SECTION("the store is full") {
    disk->full = true;
    restore(1);
    CHECK(contains(notResumed(1), "cannot write its store"));
    disk->full = false;
    pool->tick(now += 2000);
  }
  SECTION("its server is started again, before it has heard of it") {
    restore(1);
    startServer(++life);
    CHECK(contains(notResumed(1), "restarted"));
  }
  SECTION("its server is started again, half way") {
    granted(1);
    startServer(++life);
  }
  SECTION("its server is started again, and workers of it live") {
    granted(1);
    pool->left("a", {1, 0}, false, now);
    Server facts = server("a", ++life);
    facts.devices[0].problem = "an old worker runs";
    joinAndBeat(facts, {}, {{5, {{1, 1}}}});
    CHECK(isHeld(1));
    CHECK(freeBytes() == 0);
    REQUIRE(pool->beat("a", {life, 0}, {}, {""}, 1, now));
  }
  SECTION("the manager is started again, and the server has not heard of it") {
    restore(1);
    restart();
    joinAndBeat(server("a", 1));
  }
  SECTION("the manager is started again, and the server has it, held") {
    granted(1);
    restart();
    pool->join(kAdmin, server("a", 1), {}, now);
    beat(1, {{1, 1}}, {{{1, 1}, {0}, {kCheckpoint, "monday", "a"}}});
  }
  SECTION("the connection is lost, and the server has it, held") {
    granted(1);
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(notResumed(1), "lost the connection"));
    pool->join(kAdmin, server("a", 1), {}, now);
    beat(1, {{1, 1}}, {{{1, 1}, {0}, {kCheckpoint, "monday", "a"}}});
  }
  REQUIRE(isHeld(1));
  if (life == 1) {
    beat(1, {});  // a server that did not take a lease is not asked again before
    if (!record(1).placements.empty()) {
      restore(1);  // what it had is to be gone first
      CHECK(contains(notResumed(1), "has not confirmed yet that the lease has left it"));
    }
    pool->revoked(kA, {1, 1}, now);
  }
  CHECK(freeBytes() == 80 * kGiB);
  granted(1);
  serverResumes();
  CHECK(isRunning(1));
  CHECK(record(1).hold == std::nullopt);
}

TEST_CASE_METHOD(Holds, "where nobody heard the answer, the server's beats say that it runs") {
  held(1);
  granted(1);
  SECTION("the manager is started again") { restart(); }
  SECTION("the connection is lost") { pool->left("a", {1, 0}, false, now); }
  pool->join(kAdmin, server("a", 1), {}, now);
  beat(1, {{1, 1}});
  CHECK(events.resumes.back().folder == "monday");  // the answer to which it is
  serverResumes();
  CHECK(state(1) == LeaseState::active);
  CHECK_FALSE(record(1).hold);
  CHECK_FALSE(storedLease(1).hold);
  CHECK(revokesOf(1) == 1);  // when it was held
}

TEST_CASE_METHOD(Holds, "it goes into other files when the store knows that it has come from these") {
  held(1);
  granted(1);
  disk->full = true;
  serverResumes();
  CHECK(isRunning(1));
  CHECK(pool->places(kAdmin, {1, 1}).size() == 1);
  const auto again = [&] { pool->suspend(kAdmin, {1, 1}, 30'000, now, "tuesday"); };
  CHECK(contains(thrown(again), "is being resumed at this moment"));
  CHECK(events.suspends.size() == 1);  // the one into monday
  disk->full = false;
  SECTION("the store accepts it") {
    pool->tick(now += 2000);
    CHECK_FALSE(storedLease(1).hold);
    again();
    serverHolds();
    CHECK(isHeld(1));
    CHECK(record(1).hold->held.folder == "tuesday");
  }
  SECTION("everything is started again before") {
    restart();
    startServer(2);
    CHECK(isHeld(1));
    CHECK(record(1).hold->held.folder == "monday");  // there are no others
  }
}

TEST_CASE_METHOD(Holds, "where nobody heard that it is held, the server's beats say so") {
  lease(1, 0);
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "monday");
  SECTION("the connection is lost") { pool->left("a", {1, 0}, false, now); }
  SECTION("the manager is started again") { restart(); }
  pool->join(kAdmin, server("a", 1), {}, now);
  beat(1, {{1, 1}}, {{{1, 1}, {0}, {kCheckpoint, "monday", "a"}}});
  CHECK(isHeld(1));
  CHECK(record(1).hold->held.folder == "monday");
}

TEST_CASE_METHOD(Holds,
                 "where its server ended behind the files, and nobody heard it, its next life says so") {
  lease(1, 0);
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "monday");
  const std::vector<SuspendedLease> found{{{1, 1}, {}, {kCheckpoint, "monday", "a"}}};
  SECTION("the connection is lost") { pool->left("a", {1, 0}, false, now); }
  SECTION("the manager is started again") { restart(); }
  SECTION("the store is full at first") { disk->full = true; }
  pool->left("a", {1, 0}, false, now);
  pool->join(kAdmin, server("a", 2), {}, now);
  const auto beats = [&] { return pool->beat("a", {2, 0}, {}, {}, 0, now, found); };
  CHECK(beats());
  CHECK(beats());
  disk->full = false;
  pool->tick(now += 2000);
  CHECK(isHeld(1));
  CHECK(record(1).hold->held.folder == "monday");
  CHECK(record(1).placements.empty());

  // It says so until it is told that this is stored; till then the lease is not restored there.
  CHECK(beats());
  CHECK(revokesOf(1) >= 1);
  restore(1);
  CHECK_FALSE(notResumed(1).empty());
  pool->revoked({"a", {2, 0}}, {1, 1}, now);
  restore(1);
  CHECK(state(1) == LeaseState::granting);
}

TEST_CASE_METHOD(
    Holds, "where it has gone on, or has ended, it is not held for what a server says of its earlier life") {
  const auto beats = [&] {
    return pool->beat("a", {2, 0}, {}, {}, 0, now, {{{1, 1}, {}, {kCheckpoint, "monday", "a"}}});
  };
  lease(1, 0);
  SECTION("it ends") {
    pool->release(kAdmin, {1, 1}, now);
    pool->left("a", {1, 0}, false, now);
    pool->join(kAdmin, server("a", 2), {}, now);
    CHECK(beats());
    CHECK_FALSE(isLive(1));
  }
  SECTION("it is held already, and elsewhere") {
    hold(1);
    pool->left("a", {1, 0}, false, now);
    pool->join(kAdmin, server("a", 2), {}, now);
    CHECK(beats());
    CHECK(isHeld(1));
  }
  CHECK(revokesOf(1) >= 1);
}

TEST_CASE_METHOD(Holds,
                 "a full store: it is held when the store has it, and its devices are not free before") {
  lease(1, 0);
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "monday");
  disk->full = true;
  serverHolds();
  CHECK(contains(notSuspended(1), "cannot") == false);
  CHECK_FALSE(notSuspended(1).empty());
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == 0);
  CHECK(revokesOf(1) == 0);
  disk->full = false;
  pool->tick(now += 2000);
  CHECK(isHeld(1));
  CHECK(revokesOf(1) == 1);
}

TEST_CASE_METHOD(Holds, "it is restored on devices like its own, where it is told to") {
  held(1);
  joinAndBeat(server("b", 1, 2));
  SECTION("another server") {
    granted(1, {"b"});
    serverResumes();
    CHECK(record(1).server().name == "b");
  }
  SECTION("one GPU of it") {
    granted(1, {"b", {1}});
    CHECK(record(1).primary().devices.at(0).info.ordinal == 1);
  }
  SECTION("as many as it had") {
    CHECK(contains(thrown([&] { restore(1, 0, {"b", {0, 1}}); }), "it has 1 GPU(s), and 2 are named"));
  }
  SECTION("another driver, or model: it does not wait for that") {
    Server facts = server("c", 1);
    SECTION("driver") { facts.devices[0].driverVersion = 13; }
    SECTION("model") { facts.devices[0].name = "other"; }
    SECTION("memory") { facts.devices[0].memoryBytes = 90 * kGiB; }
    joinAndBeat(facts);
    restore(1, 60'000, {"c"});
    CHECK(contains(notResumed(1), "is another model or has another driver than the lease's GPU"));
    CHECK(isHeld(1));
    CHECK(events.grants.size() == 1);
  }
  SECTION("a server that is cordoned") {
    pool->cordon(kAdmin, "b", {"new fan", "eve", 1}, [](const std::string&) {});
    restore(1, 0, {"b"});
    CHECK(contains(notResumed(1), "cordoned by an operator: new fan"));
  }
  SECTION("one that is away: it waits for it") {
    pool->left("b", {1, 0}, false, now);
    restore(1, 60'000, {"b"});
    CHECK(state(1) == LeaseState::held);
    joinAndBeat(server("b", 2, 2));
    CHECK(state(1) == LeaseState::granting);
  }
}

TEST_CASE_METHOD(Holds, "it waits for room, and nobody behind it overtakes it") {
  held(1);
  lease(2, 0);
  restore(1);
  CHECK(contains(notResumed(1), "is held by holder2"));
  restore(1, 60'000);
  pool->request(kAdmin, request(3, 60'000), now);
  pool->release(kAdmin, {2, 2}, now);
  pool->revoked(kA, {2, 2}, now);
  CHECK(state(1) == LeaseState::granting);
  CHECK_FALSE(pool.pool->leases().contains({3, 3}));
  pool->granted({1, 1}, now);
  serverResumes();
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked(kA, {1, 1}, now);
  CHECK(pool.pool->leases().contains({3, 3}));
}

TEST_CASE_METHOD(Holds, "a lease is as old as its grant, whatever has become of it since") {
  held(1);
  now += 60'000;
  const auto ageMs = [&] { return pool->list(kAdmin, now).at(0).ageMs; };
  CHECK(ageMs() == 60'000);
  restart();
  CHECK(ageMs() == 60'000);
  startServer(2);
  granted(1);
  now += 5000;
  CHECK(ageMs() == 65'000);
  pool->resumeFailed({1, 1}, events.resumes.back().number, "damaged", true, now);
  REQUIRE(state(1) == LeaseState::held);
  CHECK(ageMs() == 65'000);
  calendarS -= 3600;  // somebody has set the clock: never younger than the manager's own life
  restart();
  CHECK(ageMs() == 0);
  now += 1000;
  CHECK(ageMs() == 1000);
}

TEST_CASE_METHOD(Holds, "who ends it for its holder may wait until that one knows") {
  held(1);
  CHECK(pool->hasHeard({1, 1}, now));
  SECTION("it renews") {
    pool->drop(kAdmin, {1, 1}, now);
    CHECK_FALSE(pool->hasHeard({1, 1}, now));
    std::string why;
    CHECK_FALSE(pool->renew(kAdmin, {1, 1}, now, &why));
  }
  SECTION("a program of it waits") {
    pool->drop(kAdmin, {1, 1}, now);
    CHECK_FALSE(pool->hasHeard({1, 1}, now));
    CHECK(contains(thrown([&] { pool->places(kAdmin, {1, 1}); }), "gpupool release"));
  }
  SECTION("it is gone") {
    pool->drop(kAdmin, {1, 1}, now);
    now += request(1).ttlMs / 3;
    CHECK_FALSE(pool->hasHeard({1, 1}, now));
    now += 1000;
  }
  SECTION("it does so itself") { pool->release(kAdmin, {1, 1}, now); }
  CHECK(pool->hasHeard({1, 1}, now));
  CHECK_FALSE(isLive(1));
}

TEST_CASE_METHOD(Holds, "it ends as others do") {
  lease(1, 0);
  hold(1);
  const bool confirmed = GENERATE(true, false);
  if (confirmed) pool->revoked(kA, {1, 1}, now);
  std::string reason = "released";
  SECTION("released") { pool->release(kAdmin, {1, 1}, now); }
  SECTION("its holder is gone") {
    reason = "has not renewed it";
    for (int i = 0; i < 11; ++i) {
      beat(1, {});
      pool->tick(now += 1000);
    }
  }
  SECTION("released while it is being restored") {
    if (!confirmed) return;
    restore(1);
    pool->release(kAdmin, {1, 1}, now);
    CHECK_FALSE(notResumed(1).empty());
    CHECK(state(1) == LeaseState::revoking);
    pool->revoked(kA, {1, 1}, now);
  }
  if (!confirmed) {
    CHECK(state(1) == LeaseState::revoking);
    pool->revoked(kA, {1, 1}, now);
  }
  CHECK_FALSE(pool.pool->leases().contains({1, 1}));
  CHECK(contains(*pool.pool->endedBecause({1, 1}), reason));
  CHECK(freeBytes() == 80 * kGiB);
  restart();
  CHECK(pool.pool->leases().empty());
}

TEST_CASE_METHOD(Holds, "its server's use of one that has just been held is nobody's use") {
  lease(1, 0);
  hold(1);
  // Before its server has heard that it has left.
  CHECK(pool->beat("a", kA.incarnation, {{1, 1}}, {}, 1, now, {}, {}, {}, {{{1, 1}, 1'000'000, 0, true}}));
  pool->revoked(kA, {1, 1}, now);
  CHECK(pool->beat("a", kA.incarnation, {}, {}, 1, now, {}, {}, {}, {{{1, 1}, 1'000'000, 0, true}}));
  CHECK(state(1) == LeaseState::held);
}

TEST_CASE_METHOD(Holds, "who waits is served by what a server that takes a GPU over really has") {
  held(1);
  granted(1);  // it is being restored on a's GPU
  Server other = server("b", 1, 2);
  other.devices[0].uuid = server("a", 1).devices[0].uuid;
  SECTION("one of its GPUs is that of a third server") {
    joinAndBeat(server("c", 1));
    joinAndBeat(server("d", 1, 2));
    pool->request(kAdmin, request(3, 0, 0, 2), now);
    pool->request(kAdmin, request(2, 60'000, 0, 2), now);  // waits for d's GPUs
    pool->left("a", {1, 0}, false, now);
    other.devices[1].uuid = server("c", 1).devices[0].uuid;
    other.bootId = "the next boot";
    joinAndBeat(other);
    CHECK(state(1) == LeaseState::held);
    CHECK(failure(2).empty());
    CHECK_FALSE(pool.pool->leases().contains({2, 2}));
  }
  SECTION("it was a's GPU before") {
    other.devices.resize(1);
    joinAndBeat(other);
    pool->request(kAdmin, request(2, 60'000), now);
    pool->left("a", {1, 0}, false, now);
    pool->left("b", {1, 0}, false, now);
    other.bootId = "the next boot";
    other.incarnation = {2, 0};
    joinAndBeat(other);
    CHECK(state(1) == LeaseState::held);
    CHECK(pool.pool->leases().contains({2, 2}));
  }
  CHECK(pool.pool->inventoryFault(now).empty());
}
