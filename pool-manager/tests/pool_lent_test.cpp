// Leases that have ended while other leases of their tenant have memory of them.
#include "catch.h"
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const Id kLease{1, 1};
const Principal kAlps{Principal::Role::user, "alps"}, kAndes{Principal::Role::user, "andes"};

struct Lending : Fixture {
  Lending() {
    joinAndBeat(server("a", 1));
    pool->request(kAlps, request(1), now);
    pool->granted(kLease, now);
    REQUIRE(has(1));
    pool->beat("a", {1, 0}, {kLease}, {}, 1, now);
    pool->release(kAlps, kLease, now);
    REQUIRE(events.revokes.size() == 1);
  }
  // The server's beat, a second later.
  void beat(const std::string& lentTo, uint64_t incarnation = 1) {
    now += 1000;
    std::vector<LeaseHindrances> said;
    if (!lentTo.empty()) said.push_back({kLease, {}, {}, lentTo});
    REQUIRE(pool->beat("a", {incarnation, 0}, {}, {}, 1, now, {}, {}, said));
    pool->tick(now);
  }
  LeaseState state() { return pool->leases().at(kLease).state; }
  Lease listed(const Principal& who) {
    for (const Lease& one : pool->list(who, now))
      if (one.id == kLease) return one;
    return {};
  }
};

}  // namespace

TEST_CASE_METHOD(Lending, "a lease of which others have memory is neither over nor lost, and says why") {
  CHECK_FALSE(events.over.contains(kLease));
  beat("python (process 7) of lease 00000002");
  CHECK(events.over.contains(kLease));  // its holder need not wait for the others
  CHECK(pool->isLent(kLease));
  CHECK_FALSE(pool->release(kAlps, kLease, now));
  for (int second = 0; second < 60; ++second) beat("python (process 7) of lease 00000002");
  CHECK(state() == LeaseState::revoking);
  CHECK(listed(kAlps).state == "revoking");
  CHECK(listed(kAlps).why ==
        "has ended, and keeps its GPUs while memory of it is in use by python (process 7) of lease 00000002");
  CHECK(listed(kAndes).why.empty());
  pool->request(kAlps, request(2), now);
  CHECK(contains(failure(2), "ending: memory of it is in use by python (process 7) of lease 00000002"));
  pool->request(kAndes, request(3), now);
  CHECK_FALSE(contains(failure(3), "python"));
  std::string why;
  CHECK_FALSE(pool->renew(kAlps, kLease, now, &why));
  const TenantUse use = pool->tenants(kAlps, {}, now).at(0);
  CHECK(use.usage > 55);
  CHECK(use.quota.milliDevices == 1000);
  pool->revoked(kA, kLease, now);
  CHECK(pool->leases().empty());
  pool->request(kAndes, request(4), now);
  pool->granted({4, 4}, now);
  CHECK(has(4));
}

TEST_CASE_METHOD(Lending,
                 "a server that stops saying that memory is lent has the usual time to confirm the end") {
  for (int second = 0; second < 30; ++second) beat("python");
  REQUIRE(state() == LeaseState::revoking);
  SECTION("by a beat that does not name it") {
    beat("");
    beat("");
  }
  SECTION("by saying nothing") {
    now += times.silentMs - 1;
    pool->tick(now);
    now += 2;
    pool->tick(now);
  }
  SECTION("by going away") {
    pool->left("a", {1, 0}, false, now);
    now += 1000;
    pool->tick(now);
  }
  CHECK(state() == LeaseState::revoking);
  CHECK_FALSE(pool->isLent(kLease));
  now += times.driftMs + times.killMs;
  pool->tick(now);
  CHECK(state() == LeaseState::lost);
}

TEST_CASE_METHOD(Lending, "a server that is told again while memory is lent answers when that is over") {
  beat("python");
  pool->revokeFailed(kA, kLease, now);  // no answer in the order's time
  const size_t orders = events.revokes.size();
  beat("python");
  REQUIRE(events.revokes.size() == orders + 1);
  pool->revoked(kA, kLease, now);
  CHECK(pool->leases().empty());
}

TEST_CASE_METHOD(Lending, "a manager that was started again hears of it") {
  beat("python");
  restart();
  pool->join(kAdmin, server("a", 1), {}, now);
  beat("python");
  CHECK(state() == LeaseState::revoking);
  CHECK(contains(listed(kAlps).why, "in use by python"));
  for (int second = 0; second < 60; ++second) beat("python");
  CHECK(state() == LeaseState::revoking);
  pool->revoked(kA, kLease, now);
  CHECK(pool->leases().empty());
}

TEST_CASE_METHOD(Lending, "with its server's life that memory ends") {
  beat("python");
  pool->left("a", {1, 0}, false, now);
  joinAndBeat(server("a", 2));
  CHECK(pool->leases().empty());
}
