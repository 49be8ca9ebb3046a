// Sessions that move from one server to another, and those that do not.
#include "server/tests/departure_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("a session moves to another server, and its client with it") {
  Pair pair;
  Opening one = pair.session(1);
  const pid_t old = pair.a->worker(one);
  CHECK(pair.a->order(one, 'm') == "taken, others have 0 MiB");
  auto order = pair.migrate(700);
  REQUIRE(pair.a->hear(one) == "moved 2");
  CHECK(pair.a->known() == 1);
  CHECK(pair.b->known() == 1);
  CHECK(pair.b->sessions.living(kLease) == 0);
  CHECK(pair.b->sessions.arriving(kLease) == 1);
  CHECK(pair.a->paused());
  CHECK_FALSE(pair.b->paused());
  Opening two;
  REQUIRE(pair.come(two, 1).empty());
  const pid_t next = pair.b->worker(two);
  CHECK(next != old);
  CHECK(pair.b->sessions.living(kLease) == 1);
  CHECK(pair.b->sessions.arriving(kLease) == 0);
  CHECK(pair.a->order(one, 'L').empty());
  const Migrated done = order.wait(pair.io.waitScope);
  CHECK(pair.a->paused());  // what begins there now would end with the lease's revoke
  CHECK(done.sessions == 1);
  CHECK(done.movedBytes == kGiB);
  CHECK(done.longestPauseMs == 11);
  CHECK(pair.b->order(two, 'e') == "e10");  // the other server's lease
  CHECK(pair.b->order(two, 'm') == "taken, others have 0 MiB");
  CHECK(pair.a->endText() == "moved to server node2");
  CHECK(pair.b->endText().empty());
  CHECK(pair.b->epoch(1) == 2);
  pair.a->until([&] { return !alive(old); });
  Pair::isEmpty(*pair.a);
  CHECK(pair.migrate().wait(pair.io.waitScope).sessions == 0);
  pair.a->revoke();
  CHECK(pair.b->order(two, 'e') == "e10");
  CHECK(contains(pair.b->order(two, 'q'), "client closed"));
  Pair::isEmpty(*pair.b);
}

TEST_CASE("a session moves to workers of its program alone") {
  SideSettings both = sideSettings("node1"), there = sideSettings("node2");
  both.otherWorker = there.otherWorker = true;
  Pair pair(std::move(both), std::move(there));
  Opening one = pair.a->session(1, "test", "ucx", kOtherRows);
  auto order = pair.migrate();
  REQUIRE(pair.a->hear(one) == "moved 2");
  Opening stranger, two;
  CHECK(contains(pair.come(stranger, 1), "the session's client is of another gpupool"));
  two.rowsHash = kOtherRows;
  REQUIRE(pair.come(two, 1) == "");
  CHECK(pair.b->order(two, 'y') == "y5678");
  CHECK(pair.a->order(one, 'L').empty());
  CHECK(order.wait(pair.io.waitScope).sessions == 1);
  auto within = pair.b->migrate();
  REQUIRE(pair.b->hear(two) == "moved 3");
  Opening three;
  three.rowsHash = kOtherRows;
  REQUIRE(pair.come(three, 1, 3) == "");
  CHECK(pair.b->order(three, 'y') == "y5678");
  CHECK(pair.b->order(two, 'L').empty());
  CHECK(within.wait(pair.io.waitScope).sessions == 1);
}

TEST_CASE("no session of a lease moves to a server without the program of one of them") {
  SideSettings both = sideSettings("node1");
  both.otherWorker = true;
  Pair pair(std::move(both));
  Opening one = pair.session(1), other = pair.a->session(2, "old", "ucx", kOtherRows);
  pair.there.rows = {kRows};
  auto order = pair.migrate();
  CHECK(contains(pair.a->fails(order),
                 "server node2 has no worker program for it (call rows "
                 "0000000000005678 of gpupool 0.0.8)"));
  CHECK(pair.a->order(one, 'e') == "e01");
  pair.there.rows.clear();  // it does not say: the session asks there, and stays
  CHECK(contains(pair.a->order(one, 'q'), "client closed"));
  auto again = pair.migrate();
  CHECK(contains(pair.a->fails(again), "version mismatch: call rows 0000000000005678 of gpupool 0.0.8 here"));
  CHECK(pair.a->order(other, 'y') == "y5678");
  CHECK_FALSE(pair.a->paused());
}

TEST_CASE("sessions move to another server one after the other, and on from there") {
  Pair pair;
  Opening one = pair.session(1), two = pair.session(2);
  auto order = pair.migrate();
  Opening first = pair.follow(one), second = pair.follow(two);
  CHECK(order.wait(pair.io.waitScope).sessions == 2);
  CHECK(pair.b->order(first, 'm') == "taken, others have 0 MiB");
  CHECK(pair.b->order(second, 'm') == "refused, others have 600 MiB");
  const Destination home = pair.a->listen();
  pair.a->until([&] { return !pair.a->paused(); });  // the lease is revoked there, and comes anew
  order = pair.b->migrate(1000, MoveTarget{1, home});
  CHECK(pair.b->hear(first) == "moved 3");
  Opening back;
  back.transport = "ucx";
  REQUIRE(pair.a->open(back, 1, 3) == "");
  CHECK(pair.a->order(back, 'e') == "e01");
  CHECK(pair.b->order(first, 'L').empty());
  CHECK(pair.b->hear(second) == "moved 3");
  pair.b->say(second, 'S');
  CHECK(contains(pair.b->fails(order), "could not reach"));
  CHECK(pair.b->order(second, 'm') == "taken, others have 0 MiB");
  CHECK(pair.a->order(back, 'm') == "taken, others have 0 MiB");
  CHECK(pair.a->sessions.living(kLease) == 1);
}

TEST_CASE("a session that stays may move to the other server later, with the same epoch") {
  Pair pair;
  Opening one = pair.session(1);
  for (const bool came : {false, true}) {
    auto order = pair.migrate();
    REQUIRE(pair.a->hear(one) == "moved 2");
    Opening two;
    if (came) {
      REQUIRE(pair.come(two, 1) == "");
      pair.b->worker(two);
    }
    pair.a->say(one, 'S');
    CHECK(contains(pair.a->fails(order), "could not reach the next worker"));
    CHECK(pair.a->order(one, 'e') == "e01");
    CHECK_FALSE(pair.a->paused());
    if (came) CHECK(contains(pair.b->order(two, 'q'), "client closed"));
  }
  auto order = pair.migrate();
  Opening three = pair.follow(one);
  CHECK(order.wait(pair.io.waitScope).sessions == 1);
  CHECK(pair.b->order(three, 'e') == "e10");
}

TEST_CASE("a next try displaces what waits for a session since the one before") {
  Pair pair;
  Opening one = pair.session(1);
  Opening ghost;  // a server that does not go away, and says nothing
  ghost.arrives = true;
  ghost.transport = "ucx";
  REQUIRE(pair.b->open(ghost, 1, 2) == "");
  pair.b->until([&] { return pair.b->sessions.arriving(kLease) == 1; });
  const pid_t waiting = pair.b->sessions.workers()[0].pid;
  auto order = pair.migrate();
  Opening two = pair.follow(one);
  CHECK(order.wait(pair.io.waitScope).sessions == 1);
  CHECK_FALSE(alive(waiting));
  CHECK(pair.b->known() == 1);
  CHECK(pair.b->endText().empty());
}

TEST_CASE("a session over shared memory goes to the other server over the network") {
  Pair pair;
  Opening one = pair.a->session(1);
  REQUIRE(pair.a->sessions.facts(pair.a->sessions.numbers(kLease).at(0))->transport == "shm");
  pair.a->leases.admissible(kLease)->protectMs = 30'000;  // and would seem to be, there
  auto order = pair.migrate();
  CHECK(contains(pair.a->fails(order), "is not protected, for it began over shared memory"));
  pair.a->leases.admissible(kLease)->protectMs = 0;
  order = pair.migrate();
  Opening there = pair.follow(one);
  CHECK(order.wait(pair.io.waitScope).sessions == 1);
  CHECK(pair.b->order(there, 'e') == "e10");
}

TEST_CASE("a session whose user has named shared memory stays") {
  Pair pair;
  Opening one;
  one.transportNamed = true;
  REQUIRE(pair.a->open(one, 1) == "");
  pair.a->until([&] { return pair.a->sessions.living(kLease) == 1; });
  CHECK(
      pair.a->sessions.hindrances()[kLease].at(0) ==
      "cannot be moved to another server: its program was started with --transport shm, which shares memory "
      "with this server");
  auto order = pair.migrate();
  CHECK(contains(pair.a->fails(order), "was started with --transport shm"));
  CHECK(pair.a->order(one, 'e') == "e01");
}

TEST_CASE("why the session does not move is said, and it runs on") {
  Pair pair;
  Opening one = pair.session(2);
  auto order = pair.a->migrate(1000, MoveTarget{7, {"node2", "", 0}});
  CHECK(contains(pair.a->fails(order), "server node2 takes no network sessions"));
  order = pair.a->migrate(1000, MoveTarget{7, {"node3", pair.there.host, pair.there.port}});
  CHECK(contains(pair.a->fails(order),
                 "whoever answers at server node3's address does not know this lease's key"));
  order = pair.a->migrate(1000, MoveTarget{7, {"node2", "127.0.0.1", 1}});
  CHECK(contains(pair.a->fails(order), "server node2 at 127.0.0.1:1"));
  pair.b->leases.pause(kLease);
  order = pair.migrate();
  CHECK(contains(pair.a->fails(order), "the lease is suspended"));
  pair.b->leases.unpause(kLease);
  pair.b->admission.stop();
  order = pair.migrate();
  CHECK(contains(pair.a->fails(order), "shutting down"));
  CHECK(pair.a->order(one, 'e') == "e01");
  CHECK_FALSE(pair.a->paused());
  CHECK(pair.b->known() == 0);
  pair.b->revoke();
  order = pair.migrate();
  pair.a->fails(order);
  CHECK(pair.a->order(one, 'e') == "e01");
}

TEST_CASE("a server that does not answer does not hold up a move for ever") {
  SideSettings impatient = sideSettings("node1");
  impatient.migration = [](Migration::Settings& settings) { settings.arrivalBound = 300 * kj::MILLISECONDS; };
  Pair pair(std::move(impatient));
  auto mute = pair.io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(pair.io.waitScope)->listen();
  Opening one = pair.session(1);
  auto order =
      pair.a->migrate(1000, MoveTarget{7, {"node2", "127.0.0.1", static_cast<uint16_t>(mute->getPort())}});
  CHECK(contains(pair.a->fails(order), "does not answer"));
  CHECK(pair.a->order(one, 'e') == "e01");
}

TEST_CASE("a worker that is stopped when its session is to go is ended, and who has ordered it hears which") {
  SideSettings settings = sideSettings("node1");
  settings.bounds.reads = 600 * kj::MILLISECONDS;
  Pair pair(std::move(settings));
  Opening one = pair.session(1);
  REQUIRE(kill(pair.a->worker(one), SIGSTOP) == 0);
  auto order = pair.migrate();
  const std::string why = pair.a->fails(order);
  CHECK(contains(why, "test (process "));
  CHECK(contains(why, "is stopped or hangs: it has read nothing for"));
  pair.a->until([&] { return pair.a->sessions.living(kLease) == 0; });
  CHECK(contains(pair.a->endText(), "the session's worker was stopped or hung"));
}

TEST_CASE("a session that cannot go, or cannot be rebuilt there, runs on where it was") {
  for (const char how : {'1', '4', '5'}) {
    Pair pair;
    Opening one = pair.session(1);
    CHECK(pair.a->order(one, 'm') == "taken, others have 0 MiB");
    pair.a->misbehave(one, how);
    auto order = pair.migrate();
    CHECK(contains(pair.a->fails(order), how == '1'   ? "a stream capture is open"
                                         : how == '4' ? "the next worker is gone"
                                                      : "could not rebuild the session"));
    CHECK(pair.a->order(one, 'm') == "refused, others have 0 MiB");
    CHECK_FALSE(pair.a->paused());
    CHECK(pair.b->endText().empty());
    Pair::isEmpty(*pair.b);
  }
}

TEST_CASE(
    "a worker that does not answer the order to go is ended, and says nothing to a client that may be gone") {
  SideSettings impatient = sideSettings("node1");
  impatient.migration = [](Migration::Settings& settings) { settings.bound = 300 * kj::MILLISECONDS; };
  for (const bool came : {false, true}) {
    Pair pair(impatient);
    Opening one = pair.session(1), two;
    auto order = pair.migrate(10);
    REQUIRE(pair.a->hear(one) == "moved 2");
    if (came) {
      REQUIRE(pair.come(two, 1) == "");
      pair.b->worker(two);
    }
    CHECK(order.wait(pair.io.waitScope).sessions == 0);
    CHECK(contains(pair.a->endText(), "did not answer the order to be moved"));
    CHECK(contains(pair.a->endText(), "server node2, where its client may be"));
    if (came) {
      CHECK(pair.b->order(two, 'e') == "e10");
    } else {
      CHECK(contains(pair.a->hear(one), "did not answer the order to be moved"));
      Pair::isEmpty(*pair.b);
    }
  }
}

TEST_CASE("a worker to which no session comes ends after a while") {
  SideSettings impatient = sideSettings("node2");
  impatient.bounds.arrivingClient = 200 * kj::MILLISECONDS;
  {
    Pair pair(sideSettings("node1"), impatient);
    Opening one = pair.session(1);
    auto order = pair.migrate();
    REQUIRE(pair.a->hear(one) == "moved 2");
    pair.b->until([&] { return pair.b->known() == 0; });
    pair.a->say(one, 'S');
    CHECK(contains(pair.a->fails(order), "could not reach"));
    CHECK(pair.b->endText().empty());
  }
  impatient.bounds.arrivingClient = 1 * kj::HOURS;
  impatient.bounds.arrival = 200 * kj::MILLISECONDS;
  Pair pair(sideSettings("node1"), impatient);
  Opening ghost;
  ghost.arrives = true;
  ghost.transport = "ucx";
  REQUIRE(pair.b->open(ghost, 1, 2) == "");
  pair.b->until([&] { return pair.b->sessions.arriving(kLease) == 1; });
  pair.b->until([&] { return pair.b->known() == 0; });
}

TEST_CASE("a revoke on either side ends what that side has") {
  for (const bool came : {false, true}) {
    Pair pair;
    Opening one = pair.session(1), two;
    auto order = pair.migrate();
    REQUIRE(pair.a->hear(one) == "moved 2");
    if (came) {
      REQUIRE(pair.come(two, 1) == "");
      pair.b->worker(two);
    }
    pair.b->revoke("over there");
    CHECK(pair.b->known() == 0);
    CHECK(pair.b->leases.reserved(0) == 0);
    if (came) CHECK(contains(pair.b->hear(two), "over there"));
    CHECK(pair.b->endText() == (came ? "over there" : ""));
    pair.a->revoke("over here");
    CHECK(contains(pair.a->hear(one), "over here"));
    CHECK(pair.a->known() == 0);
    CHECK(pair.a->fails(order) == "the lease ended while its sessions moved");
  }
}

TEST_CASE("no session of the target's lease is suspended or settled while one comes") {
  SideSettings impatient = sideSettings("node2");
  impatient.suspension = [](Suspension::Settings& settings) { settings.beginBound = 200 * kj::MILLISECONDS; };
  Pair pair(sideSettings("node1"), impatient);
  Opening one = pair.session(1);
  auto order = pair.migrate();
  REQUIRE(pair.a->hear(one) == "moved 2");
  CHECK(contains(failure([&] { pair.b->suspension.suspend(kLease, 1).wait(pair.io.waitScope); }),
                 "a session of the lease is beginning"));
  CHECK(pair.b->admission.opening(kLease));
  Opening two;
  REQUIRE(pair.come(two, 1) == "");
  pair.b->worker(two);
  CHECK(pair.a->order(one, 'L').empty());
  order.wait(pair.io.waitScope);
  pair.b->suspension.suspend(kLease, 1000).wait(pair.io.waitScope);
  CHECK(pair.b->order(two, 's') == "suspended 1");
}
