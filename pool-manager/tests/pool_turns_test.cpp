// Servers that lease more memory than they have: how leases are placed there, on what terms, and what the
// pool shows of their turns.
#include <capnp/message.h>
#include <capnp/serialize.h>

#include "pool-manager/convert.h"
#include "schema/store.capnp.h"
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

Server overcommitted(uint32_t percent, uint64_t incarnation = 1) {
  Server facts = server("a", incarnation);
  facts.overcommitPercent = percent;
  return facts;
}

LeaseTurn turn(uint64_t id, TurnPlace place, std::vector<uint64_t> kept = {}) {
  return {{id, id}, place, 1500, 2, "", std::move(kept)};
}

// One server, one device of 80 GiB, of which 160 may be leased.
struct Turns : Suspends {
  Turns() {
    pool->left("a", {1, 0}, true, now);
    joinAndBeat(overcommitted(200));
  }
  void ask(uint64_t id, uint64_t memory, uint32_t share = 0, uint32_t waitMs = 0) {
    LeaseRequest wish = request(id, waitMs, memory);
    wish.turns.sharePercent = share;
    pool->request(kAdmin, wish, now);
    pool->granted({id, id}, now);
  }
  void take(uint64_t id, uint64_t memory, uint32_t share = 0) {
    ask(id, memory, share);
    REQUIRE(has(id));
  }
  void say(const std::vector<Id>& leases, const std::vector<LeaseTurn>& turns,
           const std::vector<SuspendedLease>& suspended = {}) {
    REQUIRE(pool->beat("a", {1, 0}, leases, {}, 1, now, suspended, turns));
  }
  Lease listed(uint64_t id, const Principal& who = kAdmin) {
    for (Lease& lease : pool.pool->list(who, now))
      if (lease.id == Id{id, id}) return lease;
    FAIL("no such lease");
    return {};
  }
};

}  // namespace

TEST_CASE_METHOD(Fixture, "a server leases 100% to 800% of its memory, and no more") {
  for (uint32_t percent : {0u, 99u, 801u, ~0u}) {
    INFO(percent);
    CHECK(contains(thrown([&] { pool->join(kAdmin, overcommitted(percent), {}, now); }),
                   "leases 100% to 800% of its devices' memory, not " + std::to_string(percent) + "%"));
    CHECK(pool->servers().empty());
  }
  for (uint32_t percent : {100u, 150u, 800u}) {
    joinAndBeat(overcommitted(percent));
    CHECK(pool->inventory(kAdmin, now).at(0).devices.at(0).freeBytes == 80 * kGiB * percent / 100);
  }
  Server absurd = overcommitted(800);
  absurd.devices[0].memoryBytes = ~uint64_t{0} / 4;
  CHECK(contains(thrown([&] { pool->join(kAdmin, absurd, {}, now); }), "memory is absurd"));
}

TEST_CASE_METHOD(Turns, "more is leased than there is, and its server knows on what terms") {
  LeaseRequest wish = request(1, 0, 70 * kGiB);
  wish.turns = {25, Priority::high};
  pool->request(kAdmin, wish, now);
  pool->granted({1, 1}, now);
  take(2, 70 * kGiB);
  CHECK(freeBytes() == 18 * kGiB);
  REQUIRE(events.grants.size() == 2);
  CHECK(events.grants[0].terms.sharePercent == 25);
  CHECK(events.grants[0].terms.priority == Priority::high);
  CHECK(events.grants[0].server.overcommitPercent == 200);
  CHECK(events.grants[1].terms.sharePercent == 0);
  CHECK(events.grants[1].terms.priority == Priority::normal);
  ask(3, 18 * kGiB);
  CHECK(contains(failure(3), "with 18.0 GiB free of the 160 GiB that may be leased"));

  restart();  // the terms go on
  pool->join(kAdmin, overcommitted(200), {}, now);
  SECTION("its server holds the leases") { beat(1, {{1, 1}, {2, 2}}); }
  SECTION("its server has to be told again") {
    events.grants.clear();
    beat(1, {});
    REQUIRE(events.grants.size() == 2);
    CHECK(events.grants[0].terms.sharePercent == 25);
  }
  CHECK(listed(1).terms.sharePercent == 25);
  CHECK(listed(1).terms.priority == Priority::high);
  CHECK(listed(1).server.overcommitPercent == 200);
  CHECK(freeBytes() == 18 * kGiB);
}

TEST_CASE_METHOD(Turns, "who asks for more than can be promised is refused with the reason") {
  LeaseRequest wish = request(1);
  wish.turns.sharePercent = 101;
  pool->request(kAdmin, wish, now);
  CHECK(failure(1) == "a lease's share of a device's time is at most 100%");
  wish = request(2);
  wish.turns.priority = static_cast<Priority>(3);
  pool->request(kAdmin, wish, now);
  CHECK(contains(failure(2), "there is no such priority"));
  take(3, 20 * kGiB, 60);
  ask(4, 20 * kGiB, 41);
  CHECK(contains(failure(4), "only 40% of its time is not promised to others"));
  take(6, 20 * kGiB);
  ask(5, 20 * kGiB, 50, 60'000);
  CHECK_FALSE(has(5));
  pool->release(kAdmin, {3, 3}, now);
  pool->revoked(kA, {3, 3}, now);  // and who waited has it
  pool->granted({5, 5}, now);
  CHECK(has(5));
}

TEST_CASE_METHOD(Suspends, "where nothing is overcommitted a share is no reason, and no turn is noted") {
  LeaseRequest wish = request(1, 0, 20 * kGiB);
  wish.turns.sharePercent = 70;
  for (uint64_t id : {1, 2}) {
    wish.id = {id, id};
    pool->request(kAdmin, wish, now);
    pool->granted(wish.id, now);
    CHECK(has(id));
  }
  REQUIRE(pool->beat("a", {1, 0}, {{1, 1}, {2, 2}}, {}, 1, now, {}, {turn(1, TurnPlace::aside)}));
  CHECK_FALSE(pool->list(kAdmin, now).at(0).turn.has_value());
}

TEST_CASE_METHOD(Turns, "the leases' turns are those of the last beat") {
  take(1, 40 * kGiB);
  take(2, 40 * kGiB);
  CHECK_FALSE(listed(1).turn.has_value());
  LeaseTurn told = turn(1, TurnPlace::waiting);
  told.note = "its kernel runs\n" + std::string(500, 'x');
  say({{1, 1}, {2, 2}}, {told, turn(2, TurnPlace::resident), turn(77, TurnPlace::aside)});
  REQUIRE(listed(1).turn.has_value());
  CHECK(listed(1).turn->place == TurnPlace::waiting);
  CHECK(listed(1).turn->servedMs == 1500);
  CHECK(listed(1).turn->turns == 2);
  CHECK(listed(1).turn->note.starts_with("its kernel runs?xxx"));
  CHECK(listed(1).turn->note.size() == 200);
  CHECK(listed(2).turn->place == TurnPlace::resident);
  CHECK(pool->list(kAdmin, now).size() == 2);
  const Principal bob{Principal::Role::user, "bob"};
  CHECK(listed(1, bob).turn->place == TurnPlace::waiting);
  CHECK(listed(1, bob).turn->note.empty());
  SECTION("which may not name it any more") {
    say({{1, 1}, {2, 2}}, {turn(2, TurnPlace::aside)});
    CHECK_FALSE(listed(1).turn.has_value());
    CHECK(listed(2).turn->place == TurnPlace::aside);
  }
  SECTION("a lease that is suspended by order has none") {
    suspended(1);
    CHECK_FALSE(listed(1).turn.has_value());
    CHECK(listed(2).turn.has_value());
  }
  SECTION("none is known while its server is away") {
    pool->left("a", {1, 0}, false, now);
    CHECK_FALSE(listed(1).turn.has_value());
  }
}

TEST_CASE_METHOD(Turns, "why leases could not be moved is what their servers' last beats say") {
  const auto say = [&](const std::vector<LeaseHindrances>& told) {
    REQUIRE(pool->beat("a", {1, 0}, {{1, 1}}, {}, 1, now, {}, {}, told));
  };
  const auto listed = [&](const Principal& who = kAdmin) { return Turns::listed(1, who).hindrances; };
  take(1, 40 * kGiB);
  CHECK(listed().empty());
  const Id stranger{77, 77};
  say({{{1, 1}, {"cannot be moved: why\n" + std::string(500, 'x')}}, {stranger, {"cannot be moved"}}});
  REQUIRE(listed().size() == 1);
  CHECK(listed()[0].starts_with("cannot be moved: why?xxx"));
  CHECK(listed()[0].size() == 200);
  CHECK(listed({Principal::Role::user, "bob"}).empty());
  SECTION("no more of them than people read") {
    std::vector<std::string> many;
    many.reserve(50);
    for (int i = 0; i < 50; ++i) many.push_back(std::to_string(i));
    say({{{1, 1}, many}});
    CHECK(listed().size() == 8);
  }
  SECTION("which may not name it any more") {
    say({});
    CHECK(listed().empty());
  }
  SECTION("none is known while its server is away") {
    pool->left("a", {1, 0}, false, now);
    CHECK(listed().empty());
  }
}

TEST_CASE_METHOD(Turns, "what stays of leases aside is not promised to another one") {
  take(1, 40 * kGiB);
  take(2, 40 * kGiB);
  SECTION("as a beat says") {
    say({{1, 1}, {2, 2}}, {turn(1, TurnPlace::aside, {10 * kGiB}), turn(2, TurnPlace::resident)});
    ask(3, 68 * kGiB);  // 69 beside 11 and 1: one too much
    CHECK(contains(failure(3), "for one lease only 68.0 GiB of its 80.0 GiB"));
    take(4, 67 * kGiB);
  }
  SECTION("as it was when it was suspended") {
    suspend(1);
    serverSuspends({10 * kGiB});
    resume(1);
    serverResumes();
    ask(3, 68 * kGiB);
    CHECK_FALSE(has(3));
    say({{1, 1}, {2, 2}}, {turn(1, TurnPlace::aside, {0}), turn(2, TurnPlace::resident)});
    take(4, 68 * kGiB);
  }
  SECTION("as far as it is no nonsense") {
    say({{1, 1}, {2, 2}}, {turn(1, TurnPlace::aside, {~uint64_t{0}, 1, 2}), turn(2, TurnPlace::aside)});
    ask(3, kGiB);  // 41 stay of lease 1, all that it has, and lease 2 needs 41
    CHECK(contains(failure(3), "the largest lease there would not fit"));
    say({{1, 1}, {2, 2}}, {turn(1, TurnPlace::aside, {30 * kGiB, 1}), turn(2, TurnPlace::aside)});
    take(4, kGiB);
  }
}

TEST_CASE_METHOD(Turns, "a lease that was suspended comes back when it can have its turn, and its share") {
  take(1, 70 * kGiB, 50);
  suspended(1);
  CHECK(freeBytes() == 159 * kGiB - 16 * kMiB);
  take(2, 70 * kGiB, 60);
  resume(1);
  CHECK(contains(notResumed(1), "but only 40% of its time is not promised to others"));
  resume(1, 60'000);
  CHECK(events.resumes.empty());
  pool->release(kAdmin, {2, 2}, now);
  pool->revoked(kA, {2, 2}, now);
  REQUIRE(events.resumes.size() == 1);
  serverResumes();
  take(3, 70 * kGiB, 50);
  CHECK(freeBytes() == 18 * kGiB);
}

TEST_CASE("the terms of a stored lease come back; one of before has none") {
  StoredLease lease;
  lease.id = {1, 2};
  const Server a = server("a", 1);
  lease.placements = {{a, {{a.devices[0], kGiB}}, 7, std::string(32, 'a'), PlacementRole::primary, {}}};
  lease.terms = {40, Priority::low};
  const StoredLease read = decodeLease(encodeLease(lease, "boot"), "boot");
  CHECK(read.terms.sharePercent == 40);
  CHECK(read.terms.priority == Priority::low);
  lease.terms.sharePercent = 101;
  CHECK(contains(thrown([&] { decodeLease(encodeLease(lease, "boot"), "boot"); }), "in an unknown way"));

  capnp::MallocMessageBuilder message;
  auto before = message.initRoot<schema::StoredLease>();
  write(lease.id, before.initId());
  before.initPlacements(1)[0].initServer().setName("a");
  const auto words = capnp::messageToFlatArray(message);
  const StoredLease old = decodeLease({words.asChars().begin(), words.asChars().size()}, "boot");
  CHECK(old.terms.sharePercent == 0);
  CHECK(old.terms.priority == Priority::normal);
  CHECK(old.server().overcommitPercent == 100);
}
