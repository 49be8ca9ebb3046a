// Leases whose holder has the checkpoints of their sessions: where they go when their server is gone, who may
// send them there, and what the server that they have left is told when it comes back.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

struct Failovers : Suspends {
  // On the server a, with the server b beside it.
  void protectedLease(uint64_t id, bool holderKeeps = true) {
    LeaseRequest wish = request(id, 0, 20 * kGiB);
    wish.server = "a";
    wish.turns.protectMs = 1000;
    wish.turns.holderKeeps = holderKeeps;
    pool->request(kAdmin, wish, now);
    pool->granted({id, id}, now);
    REQUIRE(state(id) == LeaseState::active);
  }
  void failOver(uint64_t id, uint32_t waitMs = 1, const ServerLife& lost = kA, bool cutOff = false) {
    events.running.clear();
    events.resumeFailures.clear();
    pool->failOver(kAdmin, {id, id}, lost, waitMs, now, cutOff);
  }
  bool answered(uint64_t id) { return events.running.contains({id, id}); }
  std::string refused(uint64_t id) {
    return thrown([&] { failOver(id); });
  }
  size_t revokesOf(const std::string& server) {
    return static_cast<size_t>(std::count_if(events.revokes.begin(), events.revokes.end(),
                                             [&](const auto& one) { return one.server == server; }));
  }
};

}  // namespace

TEST_CASE_METHOD(Failovers, "its holder takes a lease to another server with the key that it has") {
  joinAndBeat(server("b", 1));
  protectedLease(1);
  const std::string key = events.leases.at({1, 1}).key;
  const uint64_t epoch = events.leases.at({1, 1}).epoch;
  SECTION("the server's connection has ended") { pool->left("a", {1, 0}, false, now); }
  SECTION("the manager still hears it: it is only the holder that does not") {}
  failOver(1);
  REQUIRE(state(1) == LeaseState::granting);
  CHECK(!answered(1));
  REQUIRE(events.grants.back().server.name == "b");
  CHECK_FALSE(events.grants.back().held);  // there is nothing for the server to restore
  CHECK(events.grants.back().key == key);
  CHECK(events.grants.back().epoch > epoch);
  pool->granted({1, 1}, now);
  CHECK(answered(1));
  CHECK(state(1) == LeaseState::active);
  CHECK(events.resumes.empty());
  const Lease lease = pool->leaseOf(kAdmin, {1, 1});
  CHECK(lease.server.name == "b");
  CHECK(lease.key == key);
  CHECK(pool->places(kAdmin, {1, 1}).front().name == "b");
  const AuditEntry told = pool->audit(kAdmin, {}, 100).back();
  CHECK(told.event == AuditEvent::restored);
  CHECK(contains(told.reason, "from its holder's memory"));
}

TEST_CASE_METHOD(Failovers,
                 "the manager was started again, and its server has not said since that it has the lease") {
  joinAndBeat(server("b", 1));
  protectedLease(1);
  restart();
  joinAndBeat(server("b", 1));
  REQUIRE(state(1) == LeaseState::granting);
  const auto leavesAtOnce = [&] { return thrown([&] { failOver(1, 0); }); };
  CHECK(contains(leavesAtOnce(), "may be on its way back"));
  REQUIRE(state(1) == LeaseState::granting);
  SECTION("the server is gone") {}
  SECTION("it is on its way back") { pool->join(kAdmin, server("a", 1), {}, now); }
  SECTION("another server than the one that it was on: nothing") {
    CHECK(contains(thrown([&] { failOver(1, 1, kB); }), "granting"));
    CHECK(state(1) == LeaseState::granting);
    return;
  }
  failOver(1);
  REQUIRE(state(1) == LeaseState::granting);
  REQUIRE(events.grants.back().server.name == "b");
  pool->granted({1, 1}, now);
  CHECK(answered(1));
  CHECK(record(1).server().name == "b");
}

TEST_CASE_METHOD(Failovers, "what it has left is told so when it comes back, and counts until it says so") {
  joinAndBeat(server("b", 1));
  protectedLease(1);
  pool->left("a", {1, 0}, false, now);
  failOver(1);
  pool->granted({1, 1}, now);
  const size_t before = revokesOf("a");
  joinAndBeat(server("a", 1), {{1, 1}});
  CHECK(revokesOf("a") == before + 1);
  CHECK(record(1).on("a") != nullptr);
  pool->revoked(kA, {1, 1}, now);
  CHECK(record(1).on("a") == nullptr);
  CHECK(state(1) == LeaseState::active);
  CHECK(record(1).server().name == "b");
}

TEST_CASE_METHOD(Failovers, "one that was started again has lost it: its holder is waited for") {
  protectedLease(1);
  pool->left("a", {1, 0}, false, now);
  joinAndBeat(server("a", 2));
  REQUIRE(state(1) == LeaseState::held);
  CHECK(pool->list(kAdmin, now).at(0).why.find("it waits for another server: its own is gone") == 0);
  CHECK(pool->places(kAdmin, {1, 1}).empty());
  CHECK(record(1).placements.empty());
  SECTION("it goes back there") {
    failOver(1);
    pool->granted({1, 1}, now);
    CHECK(answered(1));
    CHECK(record(1).server().life() == ServerLife{"a", {2, 0}});
  }
  SECTION("also when the manager was started again") {
    restart();
    joinAndBeat(server("a", 2));
    REQUIRE(state(1) == LeaseState::held);
    failOver(1);
    pool->granted({1, 1}, now);
    CHECK(answered(1));
  }
  SECTION("it does not come") {
    now += 60'000;
    pool->tick(now);
    CHECK(events.over.contains({1, 1}));
  }
  SECTION("others may not restore it") {
    CHECK(contains(refusal(1, false), "its server is gone"));
    CHECK(contains(thrown([&] { pool->resume(kAdmin, {1, 1}, 0, now, "monday"); }), "its server is gone"));
  }
}

TEST_CASE_METHOD(Failovers, "without room it waits, and stays what it is when that is too long") {
  protectedLease(1);
  failOver(1);
  pool->tick(now += 2);
  CHECK(contains(events.resumeFailures.at({1, 1}), "a: it has not confirmed yet"));
  CHECK(state(1) == LeaseState::held);
  failOver(1, 5000);
  CHECK(events.resumeFailures.empty());
  SECTION("another server comes") {
    joinAndBeat(server("b", 1));
    REQUIRE(state(1) == LeaseState::granting);
    SECTION("and takes it") {
      pool->granted({1, 1}, now);
      CHECK(answered(1));
    }
    SECTION("and does not") {
      pool->grantFailed({1, 1}, "no", true, now);
      CHECK(state(1) == LeaseState::held);
      CHECK(contains(events.resumeFailures.at({1, 1}), "did not take the lease"));
    }
  }
  SECTION("none does") {
    now += 6000;
    pool->tick(now);
    CHECK(contains(events.resumeFailures.at({1, 1}), "cannot be restored"));
  }
}

TEST_CASE_METHOD(Failovers, "asked again, or of another life, it does nothing more") {
  joinAndBeat(server("b", 1));
  protectedLease(1);
  failOver(1);
  failOver(1);  // meanwhile
  pool->granted({1, 1}, now);
  CHECK(answered(1));
  const size_t grants = events.grants.size();
  failOver(1);
  CHECK(answered(1));
  CHECK(events.grants.size() == grants);
  CHECK(record(1).server().name == "b");
  failOver(1, 5000, kB);  // this one is gone, too
  CHECK(state(1) == LeaseState::held);
}

TEST_CASE_METHOD(Failovers, "at once it leaves only a server that nobody hears, for a place that is free") {
  const auto stays = [&](bool cutOff = false) {
    const std::string why = thrown([&] { failOver(1, 0, kA, cutOff); });
    CHECK(state(1) == LeaseState::active);
    CHECK(record(1).server().name == "a");
    CHECK(events.resumeFailures.empty());
    return why;
  };
  joinAndBeat(server("b", 1));
  protectedLease(1);
  CHECK(contains(stays(), "its server is heard"));
  now += 1999;
  CHECK(contains(stays(), "its server is heard"));
  SECTION("somebody waits for GPUs") {
    now += 1;
    pool->request(kAdmin, request(2, 60'000, 100 * kGiB), now);
    pool->request(kAdmin, request(3, 60'000, 70 * kGiB), now);
    pool->request(kAdmin, request(4, 60'000, 70 * kGiB), now);
    CHECK(contains(stays(), "others wait for GPUs"));
    CHECK(contains(stays(true), "others wait for GPUs"));
  }
  SECTION("something else is under way with it") {
    now += 1;
    suspend(1);
    CHECK(contains(thrown([&] { failOver(1, 0); }), "something else is under way"));
    CHECK(record(1).server().name == "a");
  }
  SECTION("it goes") {
    bool cutOff = false;
    SECTION("the server has missed a beat") { now += 1; }
    SECTION("its connection has ended") { pool->left("a", {1, 0}, false, now); }
    SECTION("the network is cut between its holder and the server") { cutOff = true; }
    failOver(1, 0, kA, cutOff);
    REQUIRE(state(1) == LeaseState::granting);
    CHECK(events.grants.back().server.name == "b");
    pool->granted({1, 1}, now);
    CHECK(answered(1));
  }
}

TEST_CASE_METHOD(Failovers, "at once it leaves no server where there is no other place") {
  protectedLease(1);
  now += 2000;
  CHECK(contains(thrown([&] { failOver(1, 0); }), "it has no other place: "));
  CHECK(state(1) == LeaseState::active);
  CHECK(record(1).server().name == "a");
  CHECK(events.resumeFailures.empty());
}

namespace {

struct Suspended : Failovers {
  std::string why_;
  Suspended() { protectedLease(1); }
  // Lease 2, high, has the devices of lease 1, low, which waits for them.
  void preempted() {
    LeaseRequest wish = request(2, 3'600'000);
    wish.server = "a";
    wish.turns.priority = Priority::high;
    times.preempt = {Preemption::suspend, 30'000, 20'000, 0};
    restart();
    now += 11'000;
    joinAndBeat(server("a", 1), {{1, 1}});
    pool->request(kAdmin, wish, now);
    REQUIRE(events.suspends.size() == 1);
    serverSuspends();
    REQUIRE(state(1) == LeaseState::suspended);
    pool->granted({2, 2}, now);
    REQUIRE(state(2) == LeaseState::active);
    pool->renew(kAdmin, {1, 1}, now, &why_);
  }
  void goesOnAtB() {
    REQUIRE(state(1) == LeaseState::granting);
    CHECK(events.grants.back().server.name == "b");
    pool->granted({1, 1}, now);
    CHECK(answered(1));
    CHECK(state(1) == LeaseState::active);
    CHECK(stored(1) == LeaseState::active);
    CHECK(record(1).primary().kept.empty());
    CHECK(record(1).reason.empty());
    CHECK(events.resumes.empty());
    // Its old server is back: nothing of it is resumed there.
    joinAndBeat(server("a", 2));
    pool->tick(now += 2000);
    CHECK(record(1).on("a") == nullptr);
    CHECK(state(1) == LeaseState::active);
    CHECK(events.resumes.empty());
  }
};

}  // namespace

TEST_CASE_METHOD(Suspended, "a suspended lease whose server dies has devices again where it goes") {
  SECTION("by order") { suspended(1); }
  SECTION("by order, and somebody waits to resume it") {
    suspended(1);
    pool->left("a", {1, 0}, false, now);
    resume(1, 60'000);
  }
  SECTION("preempted: it waits for its devices") { preempted(); }
  joinAndBeat(server("b", 1));
  pool->left("a", {1, 0}, false, now);
  failOver(1);
  goesOnAtB();
}

TEST_CASE_METHOD(Suspended, "it is on its way off its devices, or onto them, when its server dies") {
  SECTION("off") { suspend(1); }
  SECTION("onto them") {
    suspended(1);
    resume(1);
    REQUIRE(!events.resumes.empty());
    events.resumes.clear();
  }
  SECTION("off, and only the holder does not hear the server") {
    suspend(1);
    joinAndBeat(server("b", 1));
    failOver(1);
    REQUIRE(state(1) == LeaseState::granting);
    serverSuspends();  // which it has done all the same
    CHECK(state(1) == LeaseState::granting);
    pool->granted({1, 1}, now);
    CHECK(answered(1));
    CHECK(record(1).server().name == "b");
    return;
  }
  joinAndBeat(server("b", 1));
  pool->left("a", {1, 0}, false, now);
  failOver(1);
  goesOnAtB();
}

TEST_CASE_METHOD(Suspended, "what a suspended lease has left counts as little as before") {
  preempted();
  const uint64_t before = freeBytes();
  joinAndBeat(server("b", 1));
  failOver(1);  // it is only its holder that does not hear the server
  CHECK(freeBytes() == before);
  pool->granted({1, 1}, now);
  CHECK(answered(1));
  CHECK(freeBytes() == before);
  CHECK(state(2) == LeaseState::active);
}

TEST_CASE_METHOD(Suspended, "a suspended lease is not lost with a server that is started again") {
  preempted();
  SECTION("started again") {
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(server("a", 2));
  }
  SECTION("or was shut down") { pool->left("a", {1, 0}, true, now); }
  REQUIRE(state(1) == LeaseState::held);
  CHECK(stored(1) == LeaseState::held);
  pool->tick(now += 2000);
  CHECK(state(1) == LeaseState::held);  // nobody resumes it but its holder
  CHECK(contains(refusal(1, true), "its server is gone"));
  joinAndBeat(server("b", 1));
  failOver(1);
  pool->granted({1, 1}, now);
  CHECK(answered(1));
  CHECK(state(1) == LeaseState::active);
}

TEST_CASE_METHOD(Failovers, "who asks while it moves to another server is to ask again") {
  joinAndBeat(server("b", 1));
  protectedLease(1);
  pool->migrate(kAdmin, {1, 1}, 1000, {"b", {}, false}, now);
  REQUIRE(state(1) == LeaseState::moving);
  failOver(1);
  CHECK(contains(events.resumeFailures.at({1, 1}), "under way"));
  CHECK(state(1) == LeaseState::moving);
}

TEST_CASE_METHOD(Failovers, "others are not taken anywhere") {
  joinAndBeat(server("b", 1));
  protectedLease(1, false);
  CHECK(contains(refused(1), "is not protected by its holder"));
  pool->left("a", {1, 0}, false, now);
  joinAndBeat(server("a", 2));
  CHECK(events.over.contains({1, 1}));
  CHECK(contains(refused(1), "the lease has ended"));
}

TEST_CASE_METHOD(Failovers, "of its sessions the servers count where they may be, not one that it has left") {
  joinAndBeat(server("b", 1));
  protectedLease(1);
  const auto says = [&](const ServerLife& life, const std::string& what) {
    const std::vector<LeaseHindrances> told{{{1, 1}, {what}, {what}}};
    REQUIRE(pool->beat(life.name, life.incarnation, {{1, 1}}, {}, 1, now, {}, {}, told));
  };
  const auto listed = [&] { return pool->list(kAdmin, now).at(0); };
  says(kA, "is protected for 3s: work");
  CHECK(listed().protection.at(0) == "is protected for 3s: work");
  failOver(1);
  pool->granted({1, 1}, now);
  REQUIRE(record(1).on("a") != nullptr);
  says(kB, "is not protected: none of its programs has a session");
  says(kA, "is protected for 4s: work");  // it does not know yet
  const std::vector<std::string> expected{"is not protected: none of its programs has a session"};
  CHECK(listed().protection == expected);
  CHECK(listed().hindrances == expected);
  pool->revoked(kA, {1, 1}, now);
  REQUIRE(record(1).on("a") == nullptr);
  CHECK(record(1).protection.size() == 1);  // should it come there again
  CHECK(listed().protection == expected);
}
