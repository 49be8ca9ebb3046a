// Sessions that move to other workers of their server.
#include <set>
#include <utility>

#include "server/tests/migration_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("a session moves to another worker, with its account, and again") {
  MigrationBench bench;
  Opening first = bench.session(1);
  const pid_t old = bench.worker(first);
  CHECK(bench.order(first, 'm') == "taken, others have 0 MiB");
  auto order = bench.migrate(700);
  REQUIRE(bench.hear(first) == "moved 2");
  CHECK(bench.known() == 2);
  CHECK(bench.paused());
  Opening second;
  REQUIRE(bench.open(second, 1, 2).empty());
  const pid_t next = bench.worker(second);
  CHECK(next != old);
  CHECK(bench.order(first, 'L').empty());  // no last words
  const Migrated done = order.wait(bench.io.waitScope);
  CHECK(done.sessions == 1);
  CHECK(done.movedBytes == kGiB);
  CHECK(done.longestPauseMs == 11);
  CHECK_FALSE(bench.paused());
  CHECK(bench.epoch(1) == 2);
  CHECK(bench.leases.reserved(0) == kGiB);
  bench.until([&] { return !alive(old) && bench.known() == 1; });
  CHECK(bench.sessions.workers()[0].pid == next);
  CHECK(bench.sessions.living(kLease) == 1);
  CHECK(bench.endText().empty());

  CHECK(bench.order(second, 'm') == "refused, others have 0 MiB");
  CHECK(bench.order(second, 'g') == "given");
  CHECK(bench.order(second, 'm') == "taken, others have 0 MiB");
  CHECK(bench.order(second, 'e') == "e01");
  Opening third = bench.moved(second, 3);
  CHECK(bench.epoch(1) == 3);
  CHECK(bench.order(third, 'm') == "refused, others have 0 MiB");
  CHECK(contains(bench.order(third, 'q'), "client closed"));
  bench.until([&] { return bench.known() == 0; });
  Opening after = bench.session(2);
  CHECK(bench.order(after, 'm') == "taken, others have 0 MiB");  // it was given back
}

TEST_CASE("every worker of a session that moves is known to the server's next life while it lives") {
  MigrationBench bench;
  Opening one = bench.session(1);
  const pid_t old = bench.worker(one);
  std::vector<std::set<pid_t>> known;
  bench.sessions.onChange([&] {
    auto& pids = known.emplace_back();
    for (const auto& worker : bench.sessions.workers()) pids.insert(worker.pid);
  });
  Opening two = bench.moved(one, 2);
  const pid_t next = bench.worker(two);
  bench.until([&] { return known.back().size() == 1; });
  bench.sessions.onChange([] {});
  CHECK(known.front() == std::set{old, next});  // before it learns of the session
  CHECK(known.back() == std::set{next});
  bool gone = false;
  for (const auto& pids : known) {
    CHECK(pids.contains(next));
    gone = gone || !pids.contains(old);
    CHECK(pids.contains(old) != gone);
  }
}

TEST_CASE("what a next worker asks of the account is answered when the session is its own") {
  MigrationBench bench;
  Opening one = bench.session(1), other = bench.session(2);
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  Opening two;
  REQUIRE(bench.open(two, 1, 2).empty());
  bool answered = false;
  auto asked = two.order('m').then([&](std::string said) {
    answered = true;
    return said;
  });
  auto heard = asked.eagerlyEvaluate(nullptr);
  bench.pause(100);
  CHECK_FALSE(answered);
  CHECK(bench.order(one, 'L').empty());
  CHECK(heard.wait(bench.io.waitScope) == "taken, others have 0 MiB");
  REQUIRE(bench.hear(other) == "moved 2");
  CHECK(bench.order(other, 'm') == "refused, others have 600 MiB");
  other.order('S').eagerlyEvaluate(nullptr) = nullptr;
  CHECK(contains(bench.fails(order), "could not reach"));
}

TEST_CASE("all sessions of a lease move, one after the other, and none begins meanwhile") {
  MigrationBench bench;
  Opening one = bench.session(1), two = bench.session(2);
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  Opening late;
  CHECK(bench.open(late, 3) == "a session of the lease is moving");
  CHECK(late.suspended);
  CHECK(bench.known() == 3);
  Opening first, second;
  REQUIRE(bench.open(first, 1, 2).empty());
  CHECK(bench.order(one, 'L').empty());
  REQUIRE(bench.hear(two) == "moved 2");
  REQUIRE(bench.open(second, 2, 2).empty());
  CHECK(bench.order(two, 'L').empty());
  const Migrated done = order.wait(bench.io.waitScope);
  CHECK(done.sessions == 2);
  CHECK(done.movedBytes == 2 * kGiB);
  CHECK(bench.order(first, 'e') == "e01");
  CHECK(bench.order(second, 'e') == "e01");
  CHECK(bench.open(late, 3).empty());
}

TEST_CASE("a lease without sessions has nothing that moves") {
  MigrationBench bench;
  CHECK(bench.migrate().wait(bench.io.waitScope).sessions == 0);
  CHECK_FALSE(bench.paused());
}

TEST_CASE("a session that refuses stays where it was, those before it have moved, and it may move later") {
  MigrationBench bench;
  Opening one = bench.session(1), two = bench.session(2);
  const pid_t stays = bench.worker(two);
  bench.misbehave(two, '1');
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  Opening first;
  REQUIRE(bench.open(first, 1, 2).empty());
  CHECK(bench.order(one, 'L').empty());
  const std::string said = bench.fails(order);
  CHECK(contains(said, "test (process "));
  CHECK(contains(said, "a stream capture is open"));
  CHECK_FALSE(bench.paused());
  CHECK(bench.worker(two) == stays);
  CHECK(bench.order(first, 'e') == "e01");
  bench.until([&] { return bench.known() == 2; });
  CHECK(bench.endText().empty());
  auto again = bench.migrate();
  CHECK(bench.hear(two) == "moved 2");
  Opening second;
  REQUIRE(bench.open(second, 2, 2).empty());
  two.order('L').wait(bench.io.waitScope);
  CHECK(bench.hear(first) == "moved 3");
  bench.order(first, 'c');
  CHECK(again.wait(bench.io.waitScope).sessions == 1);  // the other one is gone
}

TEST_CASE("only the client of a session that moves, with its epoch, is let in, and once") {
  MigrationBench bench;
  Opening one = bench.session(1);
  Opening early, unknown, zero;
  CHECK(contains(bench.open(early, 1, 2), "the session does not move"));
  CHECK(contains(bench.open(unknown, 9, 2), "is not known here, or has ended"));
  CHECK_FALSE(bench.open(zero, 9, 0).empty());
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  Opening wrong, stranger, transport, good, again;
  CHECK(bench.open(wrong, 1, 3) == "the session moves as epoch 2, not as epoch 3");
  stranger.key = std::string(32, 'x');
  CHECK(contains(bench.open(stranger, 1, 2), "proof of the session key is wrong"));
  transport.transport = "ucx";
  CHECK(bench.open(transport, 1, 2) == "the session's transport is shm, not ucx");
  CHECK(bench.open(good, 1, 2).empty());
  CHECK(contains(bench.open(again, 1, 2), "opened before with epoch 2"));
  CHECK(contains(bench.open(again, 1, 3), "moves as epoch 2, not as epoch 3"));
  CHECK(bench.order(one, 'L').empty());
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  CHECK(bench.order(good, 'e') == "e01");
  CHECK(contains(bench.open(again, 1, 3), "the session does not move"));
}

TEST_CASE("a suspended lease does not move, and orders for one lease take turns") {
  MigrationBench bench;
  Opening one = bench.session(1);
  bench.suspension.suspend(kLease, 1000).wait(bench.io.waitScope);
  auto refused = bench.migrate();
  CHECK(bench.fails(refused) == "the lease is suspended: resume it first");
  bench.suspension.resume(kLease).wait(bench.io.waitScope);
  bench.suspension.putAside(kLease, 1000).wait(bench.io.waitScope);
  refused = bench.migrate();
  CHECK(contains(bench.fails(refused), "waits for its turn"));
  bench.suspension.bringBack(kLease).wait(bench.io.waitScope);

  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  bool suspended = false;
  auto later = bench.suspension.suspend(kLease, 1000)
                   .then([&](const Suspended&) { suspended = true; })
                   .eagerlyEvaluate(nullptr);
  Opening two;
  REQUIRE(bench.open(two, 1, 2).empty());
  CHECK(bench.order(two, 's') == "running 0");
  CHECK_FALSE(suspended);
  CHECK(bench.order(one, 'L').empty());
  order.wait(bench.io.waitScope);
  later.wait(bench.io.waitScope);
  CHECK(bench.order(two, 's') == "suspended 1");
  auto unknown = bench.migration.migrate({7, 7}, 1);
  CHECK(contains(bench.fails(unknown), "is not known here"));
}

TEST_CASE("a lease that is aside moves in its turn, and is refused where none comes in time") {
  size_t woken = 0;
  std::function<void()> turn;
  bool comes = false;
  MigrationBench bench([&](Migration::Settings& settings) {
    settings.wake = [&](const Id& lease) {
      CHECK(lease == kLease);
      ++woken;
      if (std::exchange(comes, false)) turn();
    };
    settings.turnBound = 400 * kj::MILLISECONDS;
  });
  Opening one = bench.session(1), two;
  bench.suspension.putAside(kLease, 1000).wait(bench.io.waitScope);
  auto order = bench.migrate();
  CHECK(contains(bench.fails(order), "waits for its turn"));
  CHECK(woken > 1);
  CHECK(bench.order(one, 's') == "suspended 1");

  kj::Promise<void> back = nullptr;
  turn = [&] { back = bench.suspension.bringBack(kLease).eagerlyEvaluate(nullptr); };
  comes = true;
  bench.migrate() = nullptr;  // nobody waits for the answer
  REQUIRE(bench.hear(one) == "moved 2");
  REQUIRE(bench.open(two, 1, 2).empty());
  CHECK(bench.order(one, 'L').empty());
  bench.until([&] { return !bench.paused(); });
  CHECK(bench.order(two, 's') == "running 0");
}

TEST_CASE("a lease whose move nobody waits for moves all the same") {
  MigrationBench bench;
  Opening one = bench.session(1), two;
  bench.migrate() = nullptr;
  REQUIRE(bench.hear(one) == "moved 2");
  REQUIRE(bench.open(two, 1, 2).empty());
  CHECK(bench.order(one, 'L').empty());
  bench.until([&] { return !bench.paused(); });
  CHECK(bench.order(two, 'e') == "e01");
}

TEST_CASE("without another worker the session stays") {
  MigrationBench bench([](Migration::Settings& settings) { settings.workerBound = 300 * kj::MILLISECONDS; });
  bench.until([&] { return bench.pool.warm() == 1; });
  Environment mute("GPUPOOL_FAKE_WORKER", "mute");
  Opening one = bench.session(1);
  auto order = bench.migrate();
  CHECK(contains(bench.fails(order), "no worker became ready in 300 ms"));
  CHECK(bench.order(one, 'e') == "e01");
  CHECK_FALSE(bench.paused());
}

TEST_CASE("where nothing may move, that is said") {
  MigrationBench bench([](Migration::Settings& settings) { settings.refusal = "nothing moves here"; });
  auto order = bench.migrate();
  CHECK(bench.fails(order) == "nothing moves here");
  CHECK_FALSE(bench.paused());
}

TEST_CASE("without a copier the session stays, and the worker that was taken for it ends") {
  MigrationBench bench([](Migration::Settings& settings) {
    settings.copier = []() -> kj::Promise<kj::AutoCloseFd> { return KJ_EXCEPTION(FAILED, "no copier"); };
  });
  Opening one = bench.session(1);
  auto order = bench.migrate();
  CHECK(contains(bench.fails(order), "no copier"));
  CHECK(bench.order(one, 'e') == "e01");
  CHECK(bench.known() == 1);
  bench.until([&] { return children().size() == 1 + bench.pool.warm(); });
}

TEST_CASE("a session that asks to be disturbed moves where that is asked for, else not") {
  for (const bool disturb : {true, false}) {
    MigrationBench bench([&](Migration::Settings& settings) { settings.disturb = disturb; });
    Opening one = bench.session(1), other = bench.session(2), two;
    CHECK(bench.order(one, 't') == "done");
    if (!disturb) {
      bench.pause(100);
      CHECK(bench.known() == 2);
      continue;
    }
    REQUIRE(bench.hear(one) == "moved 2");
    REQUIRE(bench.open(two, 1, 2).empty());
    CHECK(bench.order(one, 'L').empty());
    CHECK(bench.order(two, 'e') == "e01");
    CHECK(bench.order(other, 'e') == "e01");  // it alone
    bench.misbehave(two, '1');
    CHECK(bench.order(two, 't') == "done");  // refused, and that is no error
    bench.until([&] { return bench.known() == 2; });
    CHECK(bench.order(two, 'e') == "e01");
  }
}
