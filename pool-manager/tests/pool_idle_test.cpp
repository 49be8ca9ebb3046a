// Leases that are given back when nobody uses them.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

constexpr uint32_t kLimitMs = 60'000;

struct Idle : Suspends {
  void leaseFor(uint64_t id, uint64_t memory, uint32_t idleMs = kLimitMs) {
    LeaseRequest wish = request(id, 0, memory);
    wish.turns.idleMs = idleMs;
    wish.tenant = "alice";
    wish.ttlMs = 3'600'000;
    pool->request(kAdmin, wish, now);
    pool->granted({id, id}, now);
    REQUIRE(has(id));
  }
  // Of server a, which holds lease 1, and says this of it.
  void beatUse(uint64_t idleMs, uint32_t sessions, bool wanted = false, bool away = false) {
    std::vector<SuspendedLease> suspended;
    if (away) suspended.push_back({{1, 1}, {16 * kMiB}});
    std::vector<Id> held;
    for (const auto& [lease, record] : pool.pool->leases()) held.push_back(lease);
    REQUIRE(
        pool->beat("a", {1, 0}, held, {}, 1, now, suspended, {}, {}, {{{1, 1}, idleMs, sessions, wanted}}));
  }
  void idleSuspended() {
    leaseFor(1, 40 * kGiB);
    beatUse(kLimitMs, 1);
    REQUIRE(events.suspends.size() == 1);
    serverSuspends();
    REQUIRE(state(1) == LeaseState::suspended);
  }
};

}  // namespace

TEST_CASE_METHOD(Idle, "a lease without a session ends when it is idle for its time") {
  leaseFor(1, 40 * kGiB);
  beatUse(kLimitMs - 1, 0);
  CHECK(state(1) == LeaseState::active);
  beatUse(kLimitMs, 0, true);  // a session is asked for
  CHECK(state(1) == LeaseState::active);
  beatUse(kLimitMs, 0);
  CHECK(state(1) == LeaseState::revoking);
  CHECK(record(1).ending == LeaseState::released);
  CHECK(record(1).reason == "it was idle for 60 s");
  REQUIRE(events.revokes.size() == 1);
  CHECK(events.revokes[0].reason == "it was idle for 60 s");
}

TEST_CASE_METHOD(Idle, "one that does not ask for it is left alone") {
  leaseFor(1, 40 * kGiB, 0);
  beatUse(uint64_t{10} * kLimitMs, 0);
  CHECK(state(1) == LeaseState::active);
}

TEST_CASE_METHOD(Idle, "one with sessions is suspended, and comes back with its next call") {
  idleSuspended();
  CHECK(events.suspends[0].drainMs <= 1000);  // what runs on the device is not waited for
  CHECK(freeBytes() == 80 * kGiB - 1 * kGiB - 16 * kMiB);
  beatUse(uint64_t{2} * kLimitMs, 1, false, true);
  CHECK(events.resumes.empty());
  SECTION("at once where there is room") {
    beatUse(0, 1, true, true);
    REQUIRE(events.resumes.size() == 1);
    serverResumes();
    CHECK(state(1) == LeaseState::active);
    CHECK(stored(1) == LeaseState::active);
    const AuditEntry back = pool->audit(kAdmin, {}, 100).back();
    CHECK(back.event == AuditEvent::resumed);
    CHECK(back.by == "tenant alice");
    CHECK(Principal{Principal::Role::user, ""}.text().empty());  // without tenants it is the manager's word
    beatUse(0, 1, true);
    beatUse(kLimitMs, 1);  // and so on
    CHECK(events.suspends.size() == 2);
  }
  SECTION("when there is room again, however long that takes") {
    leaseFor(2, 60 * kGiB);
    beatUse(0, 1, true, true);
    beatUse(0, 1, true, true);
    now += 3'000'000;
    beatUse(0, 1, true, true);
    pool->tick(now);
    CHECK(events.resumes.empty());
    CHECK(state(1) == LeaseState::suspended);
    pool->release(kAdmin, {2, 2}, now);
    pool->revoked(kA, {2, 2}, now);
    CHECK(events.resumes.size() == 1);
  }
  SECTION("after a restart of the manager, too") {
    restart();
    pool->join(kAdmin, server("a", 1), {}, now);
    beatUse(0, 1, true, true);
    CHECK(events.resumes.size() == 1);
  }
  SECTION("not when somebody has ordered meanwhile that it be suspended") {
    suspend(1);
    CHECK(events.results.contains({1, 1}));
    beatUse(0, 1, true, true);
    CHECK(events.resumes.empty());
    restart();
    pool->join(kAdmin, server("a", 1), {}, now);
    beatUse(0, 1, true, true);
    CHECK(events.resumes.empty());
    resume(1);
    CHECK(events.resumes.size() == 1);
  }
  SECTION("its server cannot: not again and again") {
    beatUse(0, 1, true, true);
    REQUIRE(events.resumes.size() == 1);
    pool->resumeFailed({1, 1}, events.resumes[0].number, "no memory", true, now);
    beatUse(0, 1, true, true);
    CHECK(events.resumes.size() == 1);
    now += 10'000;
    beatUse(0, 1, true, true);
    CHECK(events.resumes.size() == 2);
  }
}

TEST_CASE_METHOD(Idle, "what runs on the device, or cannot be suspended, counts as use") {
  leaseFor(1, 40 * kGiB);
  beatUse(kLimitMs, 1);
  REQUIRE(events.suspends.size() == 1);
  pool->suspendFailed({1, 1}, events.suspends[0].number, "its device is busy", now);
  CHECK(state(1) == LeaseState::active);
  beatUse(kLimitMs + 1000, 1);
  CHECK(events.suspends.size() == 1);
  now += kLimitMs;
  beatUse(uint64_t{2} * kLimitMs, 1);
  CHECK(events.suspends.size() == 2);
}

TEST_CASE_METHOD(Idle, "a manager that died while it suspended an idle lease brings it back as well") {
  leaseFor(1, 40 * kGiB);
  beatUse(kLimitMs, 1);
  restart();
  pool->join(kAdmin, server("a", 1), {}, now);
  beatUse(kLimitMs, 1, false, true);
  REQUIRE(state(1) == LeaseState::suspended);
  beatUse(0, 1, true, true);
  CHECK(events.resumes.size() == 1);
}

TEST_CASE_METHOD(Idle, "a site's default and maximum") {
  times.idleMs = 30'000, times.mostIdleMs = 90'000;
  restart();
  joinAndBeat(server("a", 1));
  leaseFor(1, kGiB, 0);
  leaseFor(2, kGiB, 600'000);
  leaseFor(3, kGiB, 10'000);
  CHECK(record(1).terms.idleMs == 30'000);
  CHECK(record(2).terms.idleMs == 90'000);
  CHECK(record(3).terms.idleMs == 10'000);
  times.idleMs = 0;
  restart();
  joinAndBeat(server("a", 1), {{1, 1}, {2, 2}, {3, 3}});
  leaseFor(4, kGiB, 0);
  CHECK(record(4).terms.idleMs == 90'000);
}

TEST_CASE_METHOD(Idle, "one that is suspended by order after it came back stays suspended") {
  idleSuspended();
  beatUse(0, 1, true, true);  // a program calls
  REQUIRE(events.resumes.size() == 1);
  pool->resumeDone({1, 1}, events.resumes.back().number, now);
  REQUIRE(state(1) == LeaseState::active);
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "");
  serverSuspends();
  REQUIRE(state(1) == LeaseState::suspended);
  beatUse(0, 1, true, true);
  CHECK(events.resumes.size() == 1);
}

TEST_CASE_METHOD(Idle, "an order while it is being suspended makes it stay so") {
  leaseFor(1, 40 * kGiB);
  beatUse(kLimitMs, 1);
  REQUIRE(events.suspends.size() == 1);
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "");
  serverSuspends();
  REQUIRE(state(1) == LeaseState::suspended);
  beatUse(0, 1, true, true);
  CHECK(events.resumes.empty());
}
