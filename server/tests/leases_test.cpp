// Leases that move to other devices of their server: what is reserved, and from when to when.
#include "server/front/leases.h"

#include <algorithm>
#include <utility>

#include "server/front/lease_tally.h"
#include "server/front/memory_account.h"
#include "server/tests/support.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

constexpr Id kMoving{1, 1};

std::vector<size_t> indices(const Placement& placement) {
  std::vector<size_t> list;
  list.reserve(placement.devices.size());
  for (const auto& device : placement.devices) list.push_back(device.index);
  return list;
}

}  // namespace

TEST_CASE("a lease that moves has both of its placements") {
  LeaseTable table(twoDevices());
  REQUIRE(grant(table, kMoving, 4, {0}, 3 * kGiB) == "");
  const Grant& lease = *table.admissible(kMoving);
  CHECK(lease.placement(5) == nullptr);
  REQUIRE(addTarget(table, kMoving, 5, {1}, 3 * kGiB) == "");
  CHECK(table.reserved(0) == 3 * kGiB);
  CHECK(table.reserved(1) == 3 * kGiB);
  CHECK(table.promised(1) == 3 * kGiB);
  CHECK(table.holders(1) == std::vector<Id>{kMoving});
  CHECK(table.epoch(1) == 5);
  CHECK(table.epoch(0) == 4);
  REQUIRE(lease.placement(5) != nullptr);
  CHECK(indices(*lease.placement(5)) == std::vector<size_t>{1});
  CHECK(table.ordinals(*lease.placement(5)) == std::vector<int>{1});
  CHECK(indices(*lease.placement(4)) == std::vector<size_t>{0});
  CHECK(table.active() == std::vector<Id>{kMoving});
  CHECK(contains(grant(table, {1, 2}, 6, {1}, 6 * kGiB), "bytes free"));
  CHECK(grant(table, {1, 2}, 6, {1}, 5 * kGiB) == "");
  // Granted again as either: a new key, and nothing else.
  CHECK(grant(table, kMoving, 4, {0}, 3 * kGiB, std::string(32, 'z')) == "");
  CHECK(grant(table, kMoving, 5, {1}, 3 * kGiB, std::string(32, 'y')) == "");
  CHECK(static_cast<char>(lease.key[0]) == 'y');
  CHECK(contains(grant(table, kMoving, 7, {1}, kGiB), "another epoch"));
  CHECK(table.reserved(0) == 3 * kGiB);
}

TEST_CASE("a target is refused as a grant is, and nothing of it stays") {
  LeaseTable table(twoDevices());
  REQUIRE(grant(table, kMoving, 4, {0}, 3 * kGiB) == "");
  REQUIRE(grant(table, {1, 2}, 5, {1}, 6 * kGiB) == "");
  CHECK(contains(addTarget(table, {7, 7}, 6, {1}), "not known here"));
  CHECK(contains(addTarget(table, kMoving, 5, {1}, kGiB), "not higher than 5"));
  CHECK(contains(addTarget(table, kMoving, 4, {1}, kGiB), "not higher than 4, the lease's own"));
  CHECK(contains(addTarget(table, kMoving, 6, {1}, 3 * kGiB), "bytes free"));
  CHECK(contains(addTarget(table, kMoving, 6, {9}), "no device of the uuid"));
  CHECK(contains(addTarget(table, kMoving, 6, {}), "would have 0"));
  CHECK(contains(addTarget(table, kMoving, 6, {0, 1}), "would have 2"));
  table.setBusy(1, "a worker of an earlier life");
  CHECK(contains(addTarget(table, kMoving, 6, {1}), "busy"));
  table.setBusy(1, "");
  CHECK(table.reserved(1) == 6 * kGiB);
  CHECK(table.epoch(1) == 5);
  CHECK_FALSE(table.admissible(kMoving)->target.has_value());
  CHECK(addTarget(table, kMoving, 6, {1}, 2 * kGiB) == "");
  CHECK(addTarget(table, kMoving, 6, {1}, 2 * kGiB) == "");  // once more
  CHECK(table.reserved(1) == 8 * kGiB);
  CHECK(contains(addTarget(table, kMoving, 7, {1}, 2 * kGiB), "moving to other GPUs already"));
}

TEST_CASE("a target is settled one way or the other") {
  for (const bool moved : {true, false}) {
    LeaseTable table(twoDevices());
    REQUIRE(grant(table, kMoving, 1, {0}, 3 * kGiB) == "");
    table.settle(kMoving, true);  // nothing to settle
    CHECK(table.reserved(0) == 3 * kGiB);
    REQUIRE(addTarget(table, kMoving, 2, {1}, 2 * kGiB) == "");
    table.settle(kMoving, moved);
    CHECK(table.reserved(0) == (moved ? 0 : 3 * kGiB));
    CHECK(table.reserved(1) == (moved ? 2 * kGiB : 0));
    const Grant& lease = *table.admissible(kMoving);
    CHECK(lease.epoch == (moved ? 2 : 1));
    CHECK((lease.placement(moved ? 1 : 2) == nullptr));
    table.settle(kMoving, !moved);  // nothing to settle any more
    CHECK(lease.epoch == (moved ? 2 : 1));
    // The epoch was given away all the same.
    CHECK(contains(addTarget(table, kMoving, 2, {moved ? 0 : 1}), "not higher than 2"));
    CHECK(addTarget(table, kMoving, 3, {moved ? 0 : 1}) == "");
    table.settle({7, 7}, true);
  }
}

TEST_CASE("a revoked lease keeps both placements until its workers are gone") {
  LeaseTable table(twoDevices());
  REQUIRE(grant(table, kMoving, 1, {0}, 3 * kGiB) == "");
  REQUIRE(addTarget(table, kMoving, 2, {1}, 3 * kGiB) == "");
  table.close(kMoving);
  CHECK(contains(addTarget(table, kMoving, 2, {1}), "is ending"));
  table.settle(kMoving, true);
  CHECK(table.reserved(0) == 3 * kGiB);
  CHECK(table.reserved(1) == 3 * kGiB);
  table.remove(kMoving);
  CHECK(table.reserved(0) == 0);
  CHECK(table.reserved(1) == 0);
}

TEST_CASE("a broken device is no target, and breaks while it is one") {
  LeaseTable table(twoDevices());
  REQUIRE(grant(table, kMoving, 1, {0}) == "");
  REQUIRE(addTarget(table, kMoving, 2, {1}) == "");
  CHECK(table.setBroken(1, "it fell off the bus"));
  CHECK(addTarget(table, kMoving, 2, {1}) == "");  // it has it already
  CHECK(table.problem(1) == "it fell off the bus");
  table.settle(kMoving, false);
  CHECK(contains(addTarget(table, kMoving, 3, {1}), "is broken: it fell off the bus"));
}

TEST_CASE("the next life of a server knows the epoch of a target") {
  LeaseTable table(twoDevices());
  REQUIRE(grant(table, kMoving, 1, {0}) == "");
  REQUIRE(addTarget(table, kMoving, 9, {1}) == "");
  LeaseTable next(twoDevices(), {{uuid(0), table.epoch(0)}, {uuid(1), table.epoch(1)}});
  CHECK(contains(grant(next, kMoving, 9, {1}), "not higher than 9"));
  CHECK(grant(next, kMoving, 10, {1}) == "");
}

TEST_CASE("a lease that is suspended, or takes turns, has no target") {
  LeaseTable table(twoDevices());
  REQUIRE(grant(table, kMoving, 1, {0}) == "");
  table.pause(kMoving);
  CHECK(contains(addTarget(table, kMoving, 2, {1}), "being suspended"));
  table.setSuspended(kMoving, {{0}, 0, 0, 0});
  CHECK(contains(addTarget(table, kMoving, 2, {1}), "resume it first"));
  table.unpause(kMoving);
  table.pauseToMove(kMoving);  // to other workers
  CHECK(addTarget(table, kMoving, 2, {1}) == "");
  LeaseTable crowded(twoDevices(), {}, 200);
  REQUIRE(grant(crowded, kMoving, 1, {0}) == "");
  CHECK(contains(addTarget(crowded, kMoving, 2, {1}), "take turns"));
}

TEST_CASE("a session takes in another account what it has in one, or nothing") {
  MemoryAccount from({10, 10}), to({10, 5});
  CHECK(to.takeAs(from, 1));  // it has nothing
  REQUIRE(from.take(1, 0, 4));
  REQUIRE(from.take(1, 1, 6));
  CHECK_FALSE(to.takeAs(from, 1));
  CHECK(to.freeBytes(0) == 10);
  CHECK(to.freeBytes(1) == 5);
  from.give(1, 1, 2);
  CHECK(to.takeAs(from, 1));
  CHECK(to.freeBytes(0) == 6);
  CHECK(to.freeBytes(1) == 1);
  to.forget(1);
  CHECK(to.freeBytes(1) == 5);
  MemoryAccount small({10});  // has fewer places
  CHECK_FALSE(small.takeAs(from, 1));
  CHECK(small.freeBytes(0) == 10);
}

TEST_CASE("what was counted for a lease is told while it is here, with the age of its oldest checkpoint") {
  LeaseTable table(twoDevices());
  LeaseTally tally(table);
  capnp::MallocMessageBuilder message;
  auto beat = message.initRoot<schema::Manager::BeatParams>();
  const auto report = [&](const std::map<Id, kj::Duration>& ages) {
    tally.report(ages, [&](unsigned count) { return beat.initCounts(count); });
    return beat.getCounts();
  };
  tally.add(kMoving, {1, 1, 1, 1});  // of a session whose lease has just ended
  CHECK(report({}).size() == 0);
  REQUIRE(grant(table, kMoving, 4, {0}, 3 * kGiB) == "");
  CHECK(report({}).size() == 0);
  tally.add(kMoving, {5, 2, 100, 7});
  tally.add(kMoving, {1, 0, 10, 0});
  auto told = report({{kMoving, 1500 * kj::MILLISECONDS}, {{9, 9}, 1 * kj::SECONDS}});
  REQUIRE(told.size() == 1);
  CHECK(schema::read(told[0].getId()) == kMoving);
  CHECK(told[0].getCalls() == 6);
  CHECK(told[0].getAwaited() == 2);
  CHECK(told[0].getToDeviceBytes() == 110);
  CHECK(told[0].getFromDeviceBytes() == 7);
  CHECK(told[0].getCheckpointAgeMs() == 1500);
  CHECK(report({})[0].getCheckpointAgeMs() == -1);
  CHECK(report({})[0].getCalls() == 6);
}

TEST_CASE("a lease with more devices than a session can have is refused") {
  LeaseTable table(twoDevices());
  CHECK(grant(table, kMoving, 4, {0, 1, 0, 1, 0, 1, 0, 1, 0}, kGiB) ==
        "it has 9 devices, and a session at most 8");
}

TEST_CASE("the next life of a server goes on with a lease that moves to other devices of it") {
  LeaseTable table(twoDevices());
  REQUIRE(grant(table, kMoving, 4, {0}) == "");
  REQUIRE(addTarget(table, kMoving, 6, {1}) == "");
  table.pauseToMove(kMoving);
  const auto stored = table.readoptable();
  REQUIRE(stored.size() == 1);
  LeaseTable next(twoDevices(), {{uuid(0), 4}, {uuid(1), 6}});
  REQUIRE_FALSE(next.readopt(stored[0], {}));
  Grant& lease = *next.admissible(kMoving);
  CHECK(indices(lease) == std::vector<size_t>{0});
  REQUIRE(lease.target);
  CHECK(lease.target->epoch == 6);
  CHECK(indices(*lease.target) == std::vector<size_t>{1});
  CHECK(next.reserved(0) == table.reserved(0));
  CHECK(next.reserved(1) == table.reserved(1));
  CHECK(next.readoptable() == stored);
  CHECK(addTarget(next, kMoving, 6, {1}) == "");  // the manager goes on with it
  next.settle(kMoving, true);
  CHECK(next.readopted() == std::vector<std::pair<Id, uint64_t>>{{kMoving, 6}});
  // Neither where it would have a device that is another's by now.
  LeaseTable taken(twoDevices(), {{uuid(0), 4}, {uuid(1), 6}});
  REQUIRE(grant(taken, {5, 5}, 7, {1}, twoDevices()[1].memoryBytes) == "");
  CHECK(taken.readopt(stored[0], {}));
  LeaseTable older(twoDevices(), {{uuid(0), 4}, {uuid(1), 5}});
  CHECK(older.readopt(stored[0], {}));
}

TEST_CASE("the next life of a server goes on with leases that stay there, and with no other") {
  LeaseTable table(twoDevices());
  const auto lives = [&](Id id) {
    const auto list = table.readoptable();
    return std::any_of(list.begin(), list.end(), [&](const StoredGrant& one) { return one.id == id; });
  };
  int changes = 0;
  table.onChange([&] { ++changes; });
  const auto changed = [&] { return std::exchange(changes, 0) != 0; };
  REQUIRE(grant(table, kMoving, 4, {0, 1}) == "");
  CHECK(lives(kMoving));
  CHECK(changed());
  const StoredGrant stored = table.readoptable()[0];
  CHECK_FALSE(stored.aside);
  // Its sessions are where they were, or in other workers; it runs.
  table.pauseToMove(kMoving);
  CHECK(table.readoptable() == std::vector{stored});
  table.unpause(kMoving);
  // Into files it goes as a whole: until it is there it is one that runs, at whatever moment.
  bool suspended = false;
  table.onChange([&] {
    ++changes;
    for (const StoredGrant& one : table.readoptable()) suspended = suspended || one.aside;
  });
  table.pauseToHold(kMoving);
  CHECK(table.readoptable() == std::vector{stored});
  table.setHeld(kMoving, {}, {});
  CHECK_FALSE(lives(kMoving));
  CHECK_FALSE(suspended);
  table.unpause(kMoving);
  CHECK(lives(kMoving));
  CHECK(changed());
  table.close(kMoving);
  CHECK_FALSE(lives(kMoving));
  CHECK(changed());
  // Unless others have memory of it: then it is not over there either.
  REQUIRE(table.readoptable({kMoving}).size() == 1);
  LeaseTable ending(twoDevices(), {{uuid(0), 4}, {uuid(1), 9}});
  REQUIRE_FALSE(ending.readopt(table.readoptable({kMoving})[0], {}));
  CHECK(ending.admissible(kMoving) == nullptr);
  CHECK(ending.reserved(0) == kGiB);
  CHECK(ending.limits(kMoving, 4) == std::vector<uint64_t>{kGiB, kGiB});
  CHECK(ending.limits(kMoving, 5).empty());

  LeaseTable next(twoDevices(), {{uuid(0), 4}, {uuid(1), 9}});
  REQUIRE_FALSE(next.readopt(stored, {{{7, 7}, 3}}));
  const Grant& lease = *next.admissible(kMoving);
  CHECK(lease.epoch == 4);
  CHECK(indices(lease) == std::vector<size_t>{0, 1});
  CHECK(lease.key == stored.key);
  CHECK(lease.holder == "tester");
  CHECK(lease.sessionEpochs.at({7, 7}) == 3);
  CHECK(next.reserved(0) == kGiB);
  CHECK(next.readopted() == std::vector<std::pair<Id, uint64_t>>{{kMoving, 4}});
  CHECK(next.readoptable() == std::vector{stored});
  CHECK(grant(next, {5, 5}, 4, {0}) != "");  // the epoch is one that was
  CHECK(grant(next, {5, 5}, 5, {0}) == "");
  // Not where that is not what the device had, nor beside what does not leave the room.
  LeaseTable older(twoDevices(), {{uuid(0), 3}, {uuid(1), 9}}), other({twoDevices()[0]}, {{uuid(0), 4}});
  CHECK(older.readopt(stored, {}));
  CHECK(other.readopt(stored, {}));
  StoredGrant large = stored;
  large.id = {6, 6};
  large.devices[0].second = twoDevices()[0].memoryBytes;
  CHECK(next.readopt(large, {}));
}

TEST_CASE("a lease that is suspended, or on its way, is that in the next life of its server") {
  LeaseTable table(twoDevices());
  const auto noted = [&] { return table.readoptable().at(0).aside; };
  std::optional<StoredAside> told;
  table.onChange([&] { told = noted(); });
  REQUIRE(grant(table, kMoving, 4, {0, 1}) == "");
  table.pause(kMoving);
  CHECK(told == StoredAside{.byTurns = false, .changing = true, .kept = {}, .movedBytes = 0});
  const StoredGrant going = table.readoptable()[0];
  table.setSuspended(kMoving, {.kept = {7, 0}, .movedBytes = 99});
  CHECK(told == StoredAside{.byTurns = false, .changing = false, .kept = {7, 0}, .movedBytes = 99});
  const StoredGrant suspended = table.readoptable()[0];
  REQUIRE_FALSE(table.reserveAgain(kMoving));
  CHECK(told == going.aside);  // before anything comes back
  table.unpause(kMoving);
  CHECK_FALSE(told);

  const std::map<std::string, uint64_t> epochs{{uuid(0), 4}, {uuid(1), 4}};
  LeaseTable next(twoDevices(), epochs), way(twoDevices(), epochs), wrong(twoDevices(), epochs);
  REQUIRE_FALSE(next.readopt(suspended, {}));
  CHECK(next.reserved(0) == 7);
  CHECK(next.suspended() == std::vector<std::pair<Id, std::vector<uint64_t>>>{{kMoving, {7, 0}}});
  CHECK(next.admissible(kMoving)->paused);
  CHECK(next.readoptable() == std::vector{suspended});
  REQUIRE_FALSE(way.readopt(going, {}));
  CHECK(way.reserved(0) == kGiB);
  CHECK(way.admissible(kMoving)->paused);
  CHECK(way.suspended().empty());
  CHECK(way.readoptable() == std::vector{going});
  StoredGrant damaged = suspended;
  damaged.aside->kept.pop_back();
  CHECK(wrong.readopt(damaged, {}));
}

TEST_CASE("leases that take turns do so in the next life of their server, or are suspended there") {
  LeaseTable table(twoDevices(), {}, 200);
  const uint64_t most = twoDevices()[0].memoryBytes - 3 * kGiB;
  REQUIRE(grant(table, {1, 1}, 4, {0}, most) == "");
  REQUIRE(grant(table, {2, 2}, 5, {0}, most) == "");
  REQUIRE(table.admissible({2, 2})->aside);
  const std::map<std::string, uint64_t> epochs{{uuid(0), 5}};
  LeaseTable next(twoDevices(), epochs, 200), other(twoDevices(), epochs);
  for (const StoredGrant& lease : table.readoptable()) {
    CHECK_FALSE(next.readopt(lease, {}));
    CHECK_FALSE(other.readopt(lease, {}));
  }
  CHECK(next.admissible({2, 2})->aside);
  CHECK(next.suspended().empty());
  CHECK(next.reserved(0) == table.reserved(0));
  CHECK(next.reserveAgain({2, 2}));
  CHECK_FALSE(other.admissible({2, 2})->aside);  // nobody would bring it back
  CHECK(other.suspended().size() == 1);
}
