// The orders to move a lease's sessions to other workers and to write them into files: what the pool makes of
// them, and that it keeps nothing of them. To other devices: pool_targets_test.cpp.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

struct Moves : Suspends {
  Moves() { lease(1, 40 * kGiB); }
  void migrate(uint64_t id, uint32_t drainMs = 30'000) { pool->migrate(kAdmin, {id, id}, drainMs, {}, now); }
  std::string refused(uint64_t id) {
    return thrown([&] { migrate(id); });
  }
  void serverMoves() {
    const auto order = events.migrates.back();
    pool->migrateDone(order.id, order.number, {2, 10 * kGiB, 700}, now);
  }
  void checkpoint(uint64_t id, const std::string& folder = "monday") {
    pool->checkpoint(kAdmin, {id, id}, 4000, folder, now);
  }
  std::string notWritten() { return events.writeFailures[{1, 1}]; }
  bool moved() { return events.moved.contains({1, 1}); }
  std::string notMoved() { return events.moveFailures[{1, 1}]; }
};

}  // namespace

TEST_CASE_METHOD(Moves, "an order to move is the server's, and changes nothing of the lease") {
  const uint64_t free = freeBytes();
  const std::string before = store->range("lease/").at(0).value;
  migrate(1, 4000);
  REQUIRE(events.migrates.size() == 1);
  CHECK(events.migrates[0].drainMs == 4000);
  migrate(1);  // joins it
  CHECK(events.migrates.size() == 1);
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == free);
  beat(1, {{1, 1}});
  serverMoves();
  CHECK(events.moved[{1, 1}].sessions == 2);
  CHECK(events.moved[{1, 1}].longestPauseMs == 700);
  CHECK(state(1) == LeaseState::active);
  CHECK(store->range("lease/").at(0).value == before);
  migrate(1);
  CHECK(events.migrates.size() == 2);
  pool->migrateFailed({1, 1}, events.migrates[0].number, "late", true, now);  // of the first order
  CHECK(notMoved().empty());
  pool->migrateFailed({1, 1}, events.migrates[1].number, "a capture is open", true, now);
  CHECK(notMoved() == "server a: a capture is open");
  CHECK(record(1).change == Change::none);
}

TEST_CASE_METHOD(Moves, "what cannot be moved is refused with the reason") {
  SECTION("suspended") {
    suspended(1);
    CHECK(contains(refused(1), "it is suspended, and has to be resumed first"));
  }
  SECTION("waiting") {
    pool->request(kAdmin, request(2, 60'000), now);
    CHECK(contains(refused(2), "cannot be moved: it waits for its devices still"));
  }
  SECTION("unknown") { CHECK(contains(refused(9), "there is no lease")); }
  SECTION("granting") {
    pool->request(kAdmin, request(2, 0, kGiB), now);
    CHECK(contains(refused(2), "cannot be moved: it is granting"));
  }
  SECTION("another tenant's") {
    const Principal other{Principal::Role::user, "other"};
    CHECK(contains(thrown([&] { pool->migrate(other, {1, 1}, 0, {}, now); }), "another tenant's"));
  }
  SECTION("its server is away") {
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(refused(1), "cannot be moved: server a: not connected"));
  }
  SECTION("being suspended, and being resumed") {
    suspend(1);
    CHECK(contains(refused(1), "is being suspended at this moment"));
    serverSuspends();
    resume(1);
    CHECK(contains(refused(1), "is being resumed at this moment"));
  }
  CHECK(events.migrates.empty());
}

TEST_CASE_METHOD(Moves, "while a lease is being moved it is not suspended, and it runs") {
  migrate(1);
  CHECK(contains(refusal(1, false), "is being moved at this moment"));
  resume(1);
  CHECK(isRunning(1));
  serverMoves();
  suspend(1);
  CHECK(events.suspends.size() == 1);
}

TEST_CASE_METHOD(Moves, "whoever waits for a move is answered") {
  migrate(1);
  SECTION("when the connection ends") {
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(notMoved(), "lost the connection to server a"));
  }
  SECTION("when the server joins anew") {
    pool->join(kAdmin, server("a", 1), {}, now);
    CHECK(contains(notMoved(), "lost the connection to server a"));
  }
  SECTION("when the lease ends") {
    pool->release(kAdmin, {1, 1}, now);
    CHECK(contains(notMoved(), "the lease has ended"));
  }
  serverMoves();  // late
  CHECK_FALSE(moved());
}

TEST_CASE_METHOD(Moves, "a manager that ends meanwhile knows nothing of it") {
  migrate(1);
  restart();
  joinAndBeat(server("a", 1), {{1, 1}});
  CHECK(state(1) == LeaseState::active);
  CHECK(record(1).change == Change::none);
  serverMoves();
  CHECK_FALSE(moved());
  suspend(1);
  CHECK(events.suspends.size() == 1);
}

TEST_CASE_METHOD(Moves,
                 "an order to write a lease into files is the server's, and changes nothing of the lease") {
  const std::string before = store->range("lease/").at(0).value;
  checkpoint(1);
  REQUIRE(events.checkpoints.size() == 1);
  CHECK(events.checkpoints[0].server == "a");
  CHECK(events.checkpoints[0].drainMs == 4000);
  CHECK(events.checkpoints[0].folder == "monday");
  beat(1, {{1, 1}});
  CHECK(contains(thrown([&] { checkpoint(1, "tuesday"); }), "is being written into files at this moment"));
  CHECK(contains(refused(1), "is being written into files at this moment"));
  CHECK(contains(refusal(1, false), "is being written into files at this moment"));
  resume(1);
  CHECK(isRunning(1));
  pool->checkpointDone({1, 1}, events.checkpoints[0].number, {2, 10 * kGiB, 700, "/srv/monday"}, now);
  CHECK(events.written[{1, 1}].sessions == 2);
  CHECK(events.written[{1, 1}].folder == "/srv/monday");
  CHECK(events.written[{1, 1}].server == "a");
  CHECK(state(1) == LeaseState::active);
  CHECK(store->range("lease/").at(0).value == before);
  checkpoint(1);
  pool->checkpointFailed({1, 1}, events.checkpoints[0].number, "late", now);  // of the first order
  CHECK(notWritten().empty());
  pool->checkpointFailed({1, 1}, events.checkpoints[1].number, "the disk is full", now);
  CHECK(notWritten() == "server a: the disk is full");
  CHECK(record(1).change == Change::none);
  migrate(1);
  CHECK(contains(thrown([&] { checkpoint(1); }), "is being moved at this moment"));
}

TEST_CASE_METHOD(Moves, "whoever waits for a lease to be written is answered") {
  checkpoint(1);
  SECTION("when the connection ends") {
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(notWritten(), "lost the connection to server a; whether the checkpoint is written"));
  }
  SECTION("when the server joins anew") {
    pool->join(kAdmin, server("a", 1), {}, now);
    CHECK(contains(notWritten(), "lost the connection to server a"));
  }
  SECTION("when the lease ends") {
    pool->release(kAdmin, {1, 1}, now);
    CHECK(contains(notWritten(), "the lease has ended"));
  }
  pool->checkpointDone({1, 1}, events.checkpoints[0].number, {}, now);  // late
  CHECK(events.written.empty());
}

TEST_CASE_METHOD(Moves, "what cannot be written into files is refused with the reason") {
  const auto refusedToWrite = [&](uint64_t id) { return thrown([&] { checkpoint(id); }); };
  SECTION("suspended") {
    suspended(1);
    CHECK(contains(refusedToWrite(1), "it is suspended, and has to be resumed first"));
  }
  SECTION("unknown") { CHECK(contains(refusedToWrite(9), "there is no lease")); }
  SECTION("another tenant's") {
    const Principal other{Principal::Role::user, "other"};
    CHECK(contains(thrown([&] { pool->checkpoint(other, {1, 1}, 0, "x", now); }), "another tenant's"));
  }
  SECTION("its server is away") {
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(refusedToWrite(1), "cannot be written into files: server a: not connected"));
  }
  CHECK(events.checkpoints.empty());
}
