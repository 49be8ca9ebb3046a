// Servers that are started again and go on with leases of their earlier life.
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const ServerLife kNext{"a", {2, 0}};

struct Restarted : Fixture {
  Restarted() {
    joinAndBeat(server("a", 1));
    lease = leaseNow(1);
    pool->left("a", {1, 0}, false, now);
  }
  // The next process of the server joins with the lease, as it says.
  void comesBack(uint64_t epoch, uint64_t incarnation = 2) {
    pool->join(kAdmin, server("a", incarnation), {{lease.epoch, {{1, 1}}}}, now, {{{1, 1}, epoch}});
  }
  ServerLife placedOn() { return pool->leases().at({1, 1}).server().life(); }
  // Somebody else has the device, who has asked for it now or waits for its end.
  bool isFree(uint64_t id) {
    if (events.grants.size() == 1) pool->request(kAdmin, request(id), now);
    return events.grants.size() != 1;
  }

  Lease lease;
};

}  // namespace

TEST_CASE_METHOD(Restarted, "a lease goes on with the process of its server that goes on with it") {
  SECTION("while the manager runs") {}
  SECTION("the manager was started again, too") { restart(); }
  comesBack(lease.epoch);
  CHECK(placedOn() == kA);  // this process may have died since
  beat(2, {{1, 1}});
  CHECK(placedOn() == kNext);
  CHECK(events.over.empty());
  CHECK(events.revokes.empty());
  CHECK_FALSE(isFree(2));
  // It is stored, and its end is the new process's to confirm.
  restart();
  CHECK(placedOn() == kNext);
  pool->join(kAdmin, server("a", 2), {{lease.epoch, {{1, 1}}}}, now);
  beat(2, {{1, 1}});
  CHECK(pool->release(kAdmin, {1, 1}, now));
  REQUIRE(events.revokes.size() == 1);
  CHECK(events.revokes[0].incarnation == kNext.incarnation);
  pool->revoked(kA, {1, 1}, now);  // late, of the earlier one
  CHECK_FALSE(isFree(3));
  pool->revoked(kNext, {1, 1}, now);
  CHECK(isFree(4));
}

TEST_CASE_METHOD(Restarted, "a restarted server may go on with its leases again and again") {
  for (uint64_t life = 2; life < 5; ++life) {
    comesBack(lease.epoch, life);
    if (life != 3) beat(life, {{1, 1}});  // that one dies before
    pool->left("a", {life, 0}, false, now);
  }
  CHECK(placedOn() == ServerLife{"a", {4, 0}});
  CHECK(events.over.empty());
}

TEST_CASE_METHOD(Restarted, "what ended while its server was away ends when that goes on with it") {
  pool->release(kAdmin, {1, 1}, now);
  CHECK(events.revokes.empty());
  comesBack(lease.epoch);
  SECTION("it names it") { beat(2, {{1, 1}}); }
  SECTION("it has heard of it since it joined, and does not name it any more") { beat(2, {}); }
  REQUIRE(!events.revokes.empty());
  CHECK(events.revokes.back().incarnation == kNext.incarnation);
  CHECK_FALSE(isFree(2));
  pool->revoked(kNext, {1, 1}, now);
  CHECK(isFree(3));
}

TEST_CASE_METHOD(Restarted, "a lease that its server goes on with as another placement is not that one") {
  comesBack(lease.epoch + 1);
  beat(2, {{1, 1}});
  CHECK(events.over.contains({1, 1}));
  REQUIRE(!events.revokes.empty());
  CHECK(events.revokes.back().incarnation == kNext.incarnation);
  CHECK_FALSE(isFree(2));
  pool->revoked(kNext, {1, 1}, now);
  beat(2, {});
  CHECK(isFree(3));
}

TEST_CASE_METHOD(Restarted, "a lease that its server goes on with and then has no more is lost") {
  comesBack(lease.epoch);
  now += 60'000;
  pool->renew(kAdmin, {1, 1}, now, nullptr);
  beat(2, {});
  REQUIRE(!events.revokes.empty());
  CHECK(events.revokes.back().reason == "its server a no longer holds it");
}
