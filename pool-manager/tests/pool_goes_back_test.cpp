// A lease that runs and goes back into a checkpoint that was written while it ran: the manager asks its
// server, which knows whether anything was sent since, and stores nothing.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

struct GoesBack : Suspends {
  GoesBack() {
    lease(1, 0);
    restore();
    REQUIRE(events.resumes.size() == 1);
    CHECK(events.resumes.back().here);
    CHECK(events.resumes.back().folder == "monday");
  }
  void restore(const MoveTarget& to = {}) { pool->resume(kAdmin, {1, 1}, 0, now, "monday", to); }
  void serverRefuses(bool refused = true) {
    const auto order = events.resumes.back();
    pool->resumeFailed(order.id, order.number, "the program has gone on", refused, now);
  }
};

}  // namespace

TEST_CASE_METHOD(GoesBack, "a lease that runs goes back, and is what it was") {
  CHECK(state(1) == LeaseState::active);
  CHECK(pool->places(kAdmin, {1, 1}).size() == 1);
  CHECK_FALSE(isRunning(1));
  SECTION("meanwhile nothing else begins") {
    CHECK(contains(thrown([&] { restore(); }), "is being restored at this moment"));
    CHECK(contains(refusal(1, false), "is being restored at this moment"));
    CHECK(contains(thrown([&] { pool->migrate(kAdmin, {1, 1}, 1000, {}, now); }), "is being restored"));
  }
  serverResumes();
  CHECK(isRunning(1));
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == 0);
  restore();
  CHECK(events.resumes.size() == 2);
}

TEST_CASE_METHOD(GoesBack, "where its server refuses it runs on, and may be asked for again") {
  SECTION("it refuses") {
    serverRefuses();
    CHECK(contains(notResumed(1), "server a: the program has gone on"));
  }
  SECTION("it does not answer") {
    serverRefuses(false);
    CHECK(contains(notResumed(1), "server a: "));
  }
  SECTION("it goes away") {
    pool->left("a", {1, 0}, false, now);
    CHECK(contains(notResumed(1), "lost the connection to server a"));
    joinAndBeat(server("a", 1));
  }
  CHECK(state(1) == LeaseState::active);
  CHECK(freeBytes() == 0);
  CHECK_FALSE(isRunning(1));
  restore();
  serverResumes();
  CHECK(isRunning(1));
}

// Its sessions had left, and their next workers could not be made.
TEST_CASE_METHOD(GoesBack, "where it stays in the files, a beat says so") {
  const HeldLease held{{7, 7}, "monday", "a"};
  const auto beats = [&] { beat(1, {{1, 1}}, {{{1, 1}, {0}, held}}); };
  beats();  // under way
  CHECK(state(1) == LeaseState::active);
  serverRefuses();
  beats();
  CHECK(state(1) == LeaseState::held);
  CHECK(stored(1) == LeaseState::held);
  CHECK(record(1).hold->held.folder == "monday");
}

TEST_CASE_METHOD(Suspends, "a lease that runs is restored where it is alone") {
  lease(1, 0);
  const MoveTarget other{"b", {}, false};
  CHECK(contains(thrown([&] { pool->resume(kAdmin, {1, 1}, 0, now, "monday", other); }),
                 "cannot be restored elsewhere: it runs"));
  CHECK(events.resumes.empty());
}
