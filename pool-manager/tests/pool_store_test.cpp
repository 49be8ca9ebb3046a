// What the pool writes and reads, and what becomes of it when the store refuses; on whose behalf.
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

TEST_CASE_METHOD(DiskFixture,
                 "with a full disk nothing is leased, and the device is free when it is no more") {
  joinAndBeat(server("a", 1));
  SECTION("the disk was full") { disk->full = true; }
  SECTION("the disk may have kept it") { disk->unsure = true; }
  pool->request(kAdmin, request(1), now);
  CHECK(failure(1).find("cannot write its store: store: d") != std::string::npos);
  CHECK(events.failures.at({1, 1}).kind == Failure::Kind::noDevice);  // for now, whoever asks
  CHECK(events.grants.empty());
  pool->request(kAdmin, request(2), now);
  CHECK_FALSE(failure(2).empty());
  disk->full = disk->unsure = false;
  pool->tick(now += 2000);
  beat(1, {});
  events.failures.clear();
  leaseNow(1);  // who is told to ask again has the same id: a claim's follows from its job
  CHECK(events.failures.empty());
  restart();
  CHECK(pool->leases().size() == 1);
}

TEST_CASE_METHOD(DiskFixture,
                 "with a full disk a lease ends all the same, and its device is free afterwards") {
  joinAndBeat(server("a", 1));
  leaseNow(1);
  disk->full = true;
  SECTION("released") { CHECK(pool->release(kAdmin, {1, 1}, now)); }
  SECTION("expired") { pool->tick(now += 10'000 + times.driftMs + 1); }
  REQUIRE(events.revokes.size() == 1);  // its server is told at once
  std::string why;
  CHECK_FALSE(pool->renew(kAdmin, {1, 1}, now, &why));
  pool->revoked(kA, {1, 1}, now);
  for (int i = 0; i < 20; ++i) pool->tick(now += 500);
  beat(1, {});
  CHECK(events.over.empty());
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("ending") != std::string::npos);
  disk->full = false;
  pool->tick(now += 1000);
  CHECK(events.over.contains({1, 1}));
  beat(1, {});
  leaseNow(3);
}

TEST_CASE_METHOD(DiskFixture, "nothing is granted before the store has accepted it") {
  joinAndBeat(server("a", 1));
  pool.pool->request(kAdmin, request(1), now);  // nothing is delivered
  CHECK(events.grants.empty());
  pool.pool->tick(now);
  pool.pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("held by holder1") != std::string::npos);
  SECTION("it does") {
    store->deliver();
    CHECK(events.grants.size() == 1);
  }
  SECTION("the request is taken back before") {
    CHECK(pool->release(kAdmin, {1, 1}, now));
    CHECK(events.grants.empty());
    CHECK(events.revokes.empty());
    CHECK(events.over.contains({1, 1}));
    leaseNow(3);
  }
}

TEST_CASE_METHOD(
    Fixture, "renewals, and what a restart forgets anyhow, are not written; what was used is, now and then") {
  joinAndBeat(server("a", 1));
  pool->request(kAdmin, request(1), now);
  const auto before = store->commitNow({}).revision;
  pool->granted({1, 1}, now);
  std::string why;
  for (int i = 0; i < 1000; ++i) {
    CHECK(pool->renew(kAdmin, {1, 1}, now += 1000, &why));
    beat(1, {{1, 1}});
    pool->tick(now);
  }
  CHECK(store->commitNow({}).revision == before + 1 + 1000 / 60);
}

TEST_CASE_METHOD(Fixture, "a manager whose store another one has taken over writes and grants nothing") {
  joinAndBeat(server("a", 1));
  Recorder others;
  Pool other(*store, others, times, {"boot", now, calendarS, "another"});
  pool->request(kAdmin, request(1), now);
  CHECK(events.grants.empty());
  CHECK(events.isSuperseded);
  CHECK(failure(1).find("another manager has taken over") != std::string::npos);
  CHECK_FALSE(others.isSuperseded);
  const auto left = store->range("lease/");
  CHECK(left.empty());
}

TEST_CASE("a store of an older gpupool is refused in words") {
  const auto store = makeMemoryStore();
  REQUIRE(store->commitNow({{}, {{"epoch", "12"}}}).committed());
  Recorder events;
  CHECK(contains(thrown([&] { Pool(*store, events, {}, {"boot", 0, 0, "mark"}); }),
                 "written by another version of gpupool (format 1, this one has format 2)"));
}

// --- principals -----------------------------------------------------------------------------------------

TEST_CASE_METHOD(Fixture, "a tenant touches its own leases, and does not learn who holds the others") {
  const Principal alice{Principal::Role::user, "alice"}, bob{Principal::Role::user, "bob"};
  const Principal node{Principal::Role::server, "servers"};
  joinAndBeat(server("a", 1));
  LeaseRequest wish = request(1);
  wish.tenant = "bob";  // what a request says of its tenant counts only from an admin
  pool->request(alice, wish, now);
  pool->granted({1, 1}, now);
  CHECK(events.leases.at({1, 1}).tenant == "alice");

  std::string why;
  CHECK(contains(thrown([&] { pool->renew(bob, {1, 1}, now, &why); }), "another tenant's"));
  CHECK(contains(thrown([&] { pool->release(bob, {1, 1}, now); }), "another tenant's"));
  CHECK(contains(thrown([&] { pool->request(bob, request(1), now); }), "another tenant's"));
  CHECK(contains(thrown([&] { pool->request(node, request(9), now); }), "cannot lease"));
  CHECK(contains(thrown([&] { pool->join(alice, server("x", 9), {}, now); }), "cannot be used by servers"));
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);

  pool->request(alice, request(2), now);
  CHECK(failure(2).find("is held by holder1 (tenant alice") != std::string::npos);
  pool->request(bob, request(3), now);
  CHECK(failure(3).find("GPU 0 (GPU) is in use") != std::string::npos);
  CHECK(failure(3).find("holder1") == std::string::npos);
  CHECK(failure(3).find("alice") == std::string::npos);
  CHECK(pool->list(alice, now).at(0).holder == "holder1");
  CHECK(pool->list(kAdmin, now).at(0).tenant == "alice");
  CHECK(pool->list(bob, now).at(0).holder == "in use");
  CHECK(pool->list(bob, now).at(0).tenant.empty());
  CHECK(pool->list(alice, now).at(0).key.empty());
  CHECK(pool->list(alice, now).at(0).state == "active");
}

// --- the stored lease -----------------------------------------------------------------------------------

TEST_CASE("a lease's states follow one another as the table says") {
  using enum LeaseState;
  const std::map<LeaseState, std::set<LeaseState>> table = {
      {queued, {granting, released, revoked}},
      {granting, {active, held, revoking, lost}},
      {active, {suspended, moving, held, revoking, lost}},
      {held, {granting, revoking}},
      {suspended, {active, held, revoking, lost}},
      {moving, {active, revoking, lost}},
      {revoking, {released, expired, revoked, lost}},
  };
  for (uint32_t from = 0; from < kLeaseStates; ++from)
    for (uint32_t to = 0; to < kLeaseStates; ++to) {
      const auto row = table.find(static_cast<LeaseState>(from));
      INFO(name(static_cast<LeaseState>(from)) << " to " << name(static_cast<LeaseState>(to)));
      CHECK(mayFollow(static_cast<LeaseState>(from), static_cast<LeaseState>(to)) ==
            (row != table.end() && row->second.contains(static_cast<LeaseState>(to))));
    }
  CHECK(name(lost) == "lost");
  CHECK_FALSE(isEnd(revoking));
  CHECK_FALSE(isEnd(held));
  CHECK(isEnd(released));
}

TEST_CASE("a stored lease comes back as it was, on every server that it lies on") {
  StoredLease lease;
  lease.id = {1, 2};
  lease.ttlMs = 15'000;
  lease.tenant = "alice";
  lease.holder = "alice@node";
  lease.ending = LeaseState::expired;
  lease.reason = "why";
  lease.process = {17, 99};
  const Server a = server("a", 1), b = server("b", 2);
  lease.placements = {{b, {{b.devices[0], kGiB}}, 8, std::string(32, 'b'), PlacementRole::target},
                      {a, {{a.devices[0], kGiB}}, 7, std::string(32, 'a'), PlacementRole::primary, {123}}};
  for (uint32_t state = 0; state < kLeaseStates; ++state) {
    lease.state = static_cast<LeaseState>(state);
    if (lease.state == LeaseState::held) continue;
    const StoredLease read = decodeLease(encodeLease(lease, "boot"), "boot");
    CHECK(read.state == lease.state);
    CHECK(read.ending == LeaseState::expired);
    REQUIRE(read.placements.size() == 2);
    CHECK(read.placements[0].role == PlacementRole::target);
    CHECK(read.server().name == "a");
    CHECK(read.primary().epoch == 7);
    CHECK(read.primary().key == std::string(32, 'a'));
    CHECK(read.primary().devices.at(0).info.uuid == a.devices[0].uuid);
    CHECK(read.primary().kept == std::vector<uint64_t>{123});
    CHECK(read.placements[0].kept.empty());  // as in a store of before
    CHECK(read.tenant + read.holder + read.reason == "alicealice@nodewhy");
    CHECK(read.process.pid == 17);
  }
  lease.state = LeaseState::active;
  CHECK(decodeLease(encodeLease(lease, "boot"), "another").process.pid == 0);
  const Lease wire = wireLease(lease);
  CHECK(wire.server.name == "a");
  CHECK(wire.epoch == 7);
  lease.placements.pop_back();
  CHECK(contains(thrown([&] { decodeLease(encodeLease(lease, "boot"), "boot"); }), "one primary"));
  CHECK_THROWS_AS(decodeLease("garbage", "boot"), std::runtime_error);
}

TEST_CASE("a stored lease that is held is nowhere, and its files and where it was come back") {
  StoredLease lease;
  lease.id = {1, 2};
  const Server a = server("a", 1);
  lease.state = LeaseState::active;
  lease.placements = {{a, {{a.devices[0], kGiB}}, 7, std::string(32, 'a')}};
  lease.holdIn({{3, 4}, "monday", "a"});
  StoredLease read = decodeLease(encodeLease(lease, "boot"), "boot");
  CHECK(read.state == LeaseState::held);
  CHECK_FALSE(read.isPlaced());
  REQUIRE(read.placements.size() == 1);
  CHECK(read.placements[0].role == PlacementRole::left);
  REQUIRE(read.hold);
  CHECK(read.hold->held.checkpoint == Id{3, 4});
  CHECK(read.hold->held.folder + read.hold->held.server == "mondaya");
  CHECK(read.hold->was.key == std::string(32, 'a'));
  CHECK(read.hold->was.devices.at(0).info.uuid == a.devices[0].uuid);
  read.forget({7});
  CHECK(read.placements.empty());
  CHECK(decodeLease(encodeLease(read, "boot"), "boot").placements.empty());
  lease.hold.reset();
  CHECK(contains(thrown([&] { decodeLease(encodeLease(lease, "boot"), "boot"); }), "in no files"));
}
