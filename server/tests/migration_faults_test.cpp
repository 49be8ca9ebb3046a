// Sessions that move to other workers of their server: where one of those concerned dies, stays, does not
// answer, or is to end.
#include "server/tests/migration_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("where the next worker dies or cannot rebuild the session, it stays") {
  for (const char how : {'4', '5'}) {
    MigrationBench bench;
    Opening one = bench.session(1);
    bench.misbehave(one, how);
    auto order = bench.migrate();
    CHECK(contains(bench.fails(order), how == '4' ? "the next worker is gone" : "could not rebuild"));
    CHECK(bench.order(one, 'e') == "e01");
    CHECK(bench.known() == 1);
    CHECK(bench.epoch(1) == 1);
    Opening two = bench.moved(one, 2);
    CHECK(bench.order(two, 'e') == "e01");
  }
}

TEST_CASE("a client that stays keeps its old worker, and may move as that epoch later") {
  MigrationBench bench;
  Opening one = bench.session(1);
  const pid_t old = bench.worker(one);
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  Opening two;
  REQUIRE(bench.open(two, 1, 2).empty());
  const pid_t next = bench.worker(two);
  one.stream->write("S", 1).wait(bench.io.waitScope);
  CHECK(contains(bench.fails(order), "could not reach the next worker"));
  CHECK_FALSE(alive(next));  // before the order is over: what it had of the device is free
  CHECK(bench.worker(one) == old);
  CHECK(bench.known() == 1);
  CHECK(bench.epoch(1) == 1);
  Opening late;
  CHECK(contains(bench.open(late, 1, 2), "the session does not move"));
  Opening three = bench.moved(one, 2);
  CHECK(bench.order(three, 'e') == "e01");
}

TEST_CASE("a client that was told to come and does not come stays") {
  MigrationBench bench;
  Opening one = bench.session(1);
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  one.stream->write("S", 1).wait(bench.io.waitScope);
  CHECK(contains(bench.fails(order), "could not reach the next worker"));
  Opening three = bench.moved(one, 2);
  CHECK(bench.order(three, 'e') == "e01");
}

TEST_CASE("an old worker that dies before its client was sent on ends the session") {
  for (const char how : {'3', 'c'}) {
    MigrationBench bench;
    Opening one = bench.session(1);
    if (how == '3') bench.misbehave(one, how);
    auto order = bench.migrate();
    if (how == 'c') {
      REQUIRE(bench.hear(one) == "moved 2");
      one.stream->write("c", 1).wait(bench.io.waitScope);
    }
    CHECK(order.wait(bench.io.waitScope).sessions == 0);
    CHECK(contains(bench.hear(one), "killed by signal 6"));
    CHECK(contains(bench.endText(), "killed by signal 6"));
    bench.until([&] { return bench.known() == 0; });
    Opening late;
    CHECK(contains(bench.open(late, 1, 2), "is not known here, or has ended"));
    CHECK_FALSE(bench.paused());
    Opening other = bench.session(2);
    CHECK(bench.order(other, 'm') == "taken, others have 0 MiB");
  }
}

TEST_CASE("an old worker that dies after its client was sent on leaves the session to the next one") {
  MigrationBench bench;
  Opening one = bench.session(1);
  CHECK(bench.order(one, 'm') == "taken, others have 0 MiB");
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  Opening two;
  REQUIRE(bench.open(two, 1, 2).empty());
  const pid_t next = bench.worker(two);
  one.stream->write("c", 1).wait(bench.io.waitScope);
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  CHECK(bench.order(two, 'm') == "refused, others have 0 MiB");
  CHECK(bench.worker(two) == next);
  CHECK(bench.known() == 1);
  CHECK(bench.endText().empty());
  // Had the client stayed with the old one, it would learn now what has become of it.
  CHECK(contains(bench.order(two, 'q'), "client closed"));
  CHECK(contains(bench.hear(one), "killed by signal 6"));
}

TEST_CASE("a next worker that dies with its client ends the session if that had left, and only then") {
  for (const char client : {'L', 'S'}) {
    MigrationBench bench;
    Opening one = bench.session(1);
    auto order = bench.migrate();
    REQUIRE(bench.hear(one) == "moved 2");
    Opening two;
    REQUIRE(bench.open(two, 1, 2).empty());
    const pid_t next = bench.worker(two);
    two.stream->write("c", 1).wait(bench.io.waitScope);
    bench.until([&] { return !alive(next) && bench.known() == 1; });
    one.stream->write(&client, 1).wait(bench.io.waitScope);
    if (client == 'L') {
      CHECK(order.wait(bench.io.waitScope).sessions == 1);
      CHECK(contains(bench.hear(two), "killed by signal 6"));
      CHECK(contains(bench.endText(), "killed by signal 6"));
      CHECK(bench.sessions.living(kLease) == 0);
    } else {
      CHECK(contains(bench.fails(order), "could not reach the next worker"));
      CHECK(bench.order(one, 'e') == "e01");
    }
  }
}

TEST_CASE(
    "an old worker that does not answer is ended, and with it the session unless its client was sent on") {
  for (const bool sent : {false, true}) {
    MigrationBench bench([](Migration::Settings& settings) { settings.bound = 500 * kj::MILLISECONDS; });
    Opening one = bench.session(1), two;
    if (!sent) bench.misbehave(one, '2');
    auto order = bench.migrate(10);
    if (sent) {
      REQUIRE(bench.hear(one) == "moved 2");
      REQUIRE(bench.open(two, 1, 2).empty());
    }
    CHECK(order.wait(bench.io.waitScope).sessions == (sent ? 1 : 0));
    if (sent) {
      CHECK(bench.order(two, 'e') == "e01");
      CHECK(bench.endText().empty());
    } else {
      CHECK(contains(bench.hear(one), "did not answer the order to be moved"));
      CHECK(bench.endText() == "the session's worker did not answer the order to be moved");
    }
    bench.until([&] { return bench.known() == (sent ? 1 : 0); });
  }
}

// In the bound of an order it would have another five minutes.
TEST_CASE(
    "an old worker that is stopped is ended as soon as it reads nothing, before the order or behind it") {
  for (const bool heard : {false, true}) {
    SideSettings settings;
    settings.bounds.reads = 600 * kj::MILLISECONDS;
    MigrationBench bench(settings);
    Opening one = bench.session(1);
    const pid_t old = bench.worker(one);
    if (heard) bench.misbehave(one, '2');  // it reads the order, and does not answer
    if (!heard) REQUIRE(kill(old, SIGSTOP) == 0);
    auto order = bench.migrate(10);
    if (heard) {
      bench.timer.afterDelay(200 * kj::MILLISECONDS).wait(bench.io.waitScope);
      REQUIRE(kill(old, SIGSTOP) == 0);
    }
    CHECK(contains(bench.fails(order), "is stopped or hangs: it has read nothing for"));
    bench.until([&] { return bench.known() == 0; });
    CHECK(contains(bench.endText(), "the session's worker was stopped or hung"));
    CHECK_FALSE(bench.paused());
  }
}

TEST_CASE("a session that says it has moved without its client has not") {
  MigrationBench bench;
  Opening one = bench.session(1);
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  one.stream->write("L", 1).wait(bench.io.waitScope);
  CHECK(contains(bench.fails(order), "answered nonsense"));
  bench.until([&] { return bench.known() == 0; });
}

TEST_CASE("a revoke ends both workers of a session that moves, and the order fails") {
  for (const bool sent : {false, true}) {
    MigrationBench bench;
    Opening one = bench.session(1), two;
    auto order = bench.migrate();
    REQUIRE(bench.hear(one) == "moved 2");
    if (sent) {
      REQUIRE(bench.open(two, 1, 2).empty());
      bench.worker(two);
    }
    std::vector<pid_t> workers;
    for (const auto& worker : bench.sessions.workers()) workers.push_back(worker.pid);
    CHECK(workers.size() == 2);
    bench.leases.close(kLease);
    bench.sessions.end(kLease, "revoked").wait(bench.io.waitScope);
    for (const pid_t worker : workers) CHECK_FALSE(alive(worker));
    CHECK(bench.known() == 0);
    bench.leases.remove(kLease);
    CHECK(bench.fails(order) == "the lease ended while its sessions moved");
    CHECK(contains(bench.hear(one), "revoked"));
    if (sent) CHECK(contains(bench.hear(two), "revoked"));
    CHECK(bench.endText() == "revoked");
  }
}

// The other way round the session's worker would see the next one end, and not know why.
TEST_CASE("a revoke does not end the next worker of a session before the one that it leaves") {
  MigrationBench bench;
  Opening one = bench.session(1);
  const pid_t old = bench.worker(one);
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  pid_t next = 0;
  for (const auto& worker : bench.sessions.workers())
    if (worker.pid != old) next = worker.pid;
  REQUIRE(kill(old, SIGSTOP) == 0);  // until its time to stop is over
  bench.leases.close(kLease);
  auto ended = bench.sessions.end(kLease, "revoked").eagerlyEvaluate(nullptr);
  bool nextLived = true;
  bench.until([&] {
    const bool lives = alive(next);
    if (alive(old)) nextLived = nextLived && lives;
    return !alive(old);
  });
  CHECK(nextLived);
  ended.wait(bench.io.waitScope);
  CHECK_FALSE(alive(next));
  CHECK(bench.known() == 0);
  bench.leases.remove(kLease);
  CHECK(bench.fails(order) == "the lease ended while its sessions moved");
  CHECK(bench.endText() == "revoked");
}

TEST_CASE("a server that stops ends both workers of a session that moves, and moves no other") {
  for (const bool sent : {false, true}) {
    MigrationBench bench;
    Opening one = bench.session(1), other = bench.session(2), two;
    auto order = bench.migrate();
    REQUIRE(bench.hear(one) == "moved 2");
    if (sent) REQUIRE(bench.open(two, 1, 2).empty());
    bench.admission.stop();
    bench.migration.stop();
    bench.sessions.endAll("the GPU server is shutting down").wait(bench.io.waitScope);
    CHECK(bench.known() == 0);
    CHECK(contains(bench.fails(order), "the server is shutting down"));
    CHECK(contains(bench.hear(other), "the GPU server is shutting down"));
  }
}
