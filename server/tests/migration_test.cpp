// Sessions that move to other workers of their server.
#include <set>

#include "server/tests/session_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

SideSettings moving(std::function<void(Migration::Settings&)> adjust) {
  SideSettings settings;
  if (adjust) settings.migration = std::move(adjust);
  return settings;
}

// A lease on both devices.
struct Bench : SessionBench {
  explicit Bench(std::function<void(Migration::Settings&)> adjust = {})
      : SessionBench(moving(std::move(adjust))) {
    REQUIRE(grant(kLease, 1, kGiB) == "");
  }
  ~Bench() {
    stop();
    CHECK(children().empty());
  }
  // The whole course; the session's new connection.
  Opening moved(Opening& old, uint64_t epoch) {
    auto order = migrate();
    CHECK(hear(old) == "moved " + std::to_string(epoch));
    Opening after;
    REQUIRE(open(after, old.session.low, epoch).empty());
    CHECK(this->order(old, 'L').empty());
    CHECK(order.wait(io.waitScope).sessions == 1);
    return after;
  }
};

}  // namespace

TEST_CASE("a session moves to another worker, with its account, and again") {
  Bench bench;
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
  Bench bench;
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
  Bench bench;
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
  Bench bench;
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
  Bench bench;
  CHECK(bench.migrate().wait(bench.io.waitScope).sessions == 0);
  CHECK_FALSE(bench.paused());
}

TEST_CASE("a session that refuses stays where it was, those before it have moved, and it may move later") {
  Bench bench;
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

TEST_CASE("where the next worker dies or cannot rebuild the session, it stays") {
  for (const char how : {'4', '5'}) {
    Bench bench;
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
  Bench bench;
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
  Bench bench;
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
    Bench bench;
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
  Bench bench;
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
    Bench bench;
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
    Bench bench([](Migration::Settings& settings) { settings.bound = 500 * kj::MILLISECONDS; });
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

TEST_CASE("only the client of a session that moves, with its epoch, is let in, and once") {
  Bench bench;
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

TEST_CASE("a session that says it has moved without its client has not") {
  Bench bench;
  Opening one = bench.session(1);
  auto order = bench.migrate();
  REQUIRE(bench.hear(one) == "moved 2");
  one.stream->write("L", 1).wait(bench.io.waitScope);
  CHECK(contains(bench.fails(order), "answered nonsense"));
  bench.until([&] { return bench.known() == 0; });
}

TEST_CASE("a revoke ends both workers of a session that moves, and the order fails") {
  for (const bool sent : {false, true}) {
    Bench bench;
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
  Bench bench;
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
    Bench bench;
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

TEST_CASE("a suspended lease does not move, and orders for one lease take turns") {
  Bench bench;
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

TEST_CASE("a lease whose move nobody waits for moves all the same") {
  Bench bench;
  Opening one = bench.session(1), two;
  bench.migrate() = nullptr;
  REQUIRE(bench.hear(one) == "moved 2");
  REQUIRE(bench.open(two, 1, 2).empty());
  CHECK(bench.order(one, 'L').empty());
  bench.until([&] { return !bench.paused(); });
  CHECK(bench.order(two, 'e') == "e01");
}

TEST_CASE("without another worker the session stays") {
  Bench bench([](Migration::Settings& settings) { settings.workerBound = 300 * kj::MILLISECONDS; });
  bench.until([&] { return bench.pool.warm() == 1; });
  Environment mute("GPUPOOL_FAKE_WORKER", "mute");
  Opening one = bench.session(1);
  auto order = bench.migrate();
  CHECK(contains(bench.fails(order), "no worker became ready in 300 ms"));
  CHECK(bench.order(one, 'e') == "e01");
  CHECK_FALSE(bench.paused());
}

TEST_CASE("where nothing may move, that is said") {
  Bench bench([](Migration::Settings& settings) { settings.refusal = "nothing moves here"; });
  auto order = bench.migrate();
  CHECK(bench.fails(order) == "nothing moves here");
  CHECK_FALSE(bench.paused());
}

TEST_CASE("without a copier the session stays, and the worker that was taken for it ends") {
  Bench bench([](Migration::Settings& settings) {
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
    Bench bench([&](Migration::Settings& settings) { settings.disturb = disturb; });
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
