// Sessions that come from another server, from the side of that server and of their clients.
#include <fstream>

#include "server/tests/admission_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

Opening arrival(uint64_t epoch = 2) {
  Opening opening;
  opening.arrives = true;
  opening.epoch = epoch;
  opening.transport = "ucx";
  return opening;
}

Opening client(uint64_t epoch = 2) {
  Opening opening;
  opening.epoch = epoch;
  opening.transport = "ucx";
  return opening;
}

struct ArrivalBench : AdmissionBench {
  using AdmissionBench::AdmissionBench;
  void arrives(Opening& opening) {
    REQUIRE(open(opening) == "");
    eventually(timer, [&] { return sessions.arriving({1, 1}) == 1; }).wait(io.waitScope);
  }
  // The worker that leaves it says that it may be rebuilt, and hears that it is.
  void rebuilt(Opening& opening) { REQUIRE(opening.order('g').wait(io.waitScope) == "y"); }
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }
};

}  // namespace

TEST_CASE("a session that comes from another server waits for its client, and is there with it") {
  ArrivalBench bench;
  Opening coming = arrival(), with = client();
  CHECK(contains(bench.open(with), "not known here"));
  bench.arrives(coming);
  CHECK(coming.serverProved);
  CHECK(bench.sessions.living() == 0);
  REQUIRE(bench.sessions.workers().size() == 1);
  CHECK(bench.sessions.workers()[0].devices == std::vector<std::string>{uuid(1)});
  bench.rebuilt(coming);
  REQUIRE(bench.open(with) == "");
  CHECK(with.order('e').wait(bench.io.waitScope) == "e1");
  CHECK(bench.sessions.living() == 1);
  CHECK(bench.sessions.arriving({1, 1}) == 0);
  Opening again = client(), third = client(3), back = arrival(3), old = client(1);
  CHECK(contains(bench.open(again), "opened before with epoch 2"));
  CHECK(contains(bench.open(third), "the session does not move"));
  CHECK(contains(bench.open(back), "the session is here already, as epoch 2"));
  CHECK(contains(bench.open(old), "opened before with epoch 2"));
}

TEST_CASE("a client may come before the session is rebuilt") {
  ArrivalBench bench;
  Opening coming = arrival(), with = client();
  bench.arrives(coming);
  REQUIRE(bench.open(with) == "");
  bench.rebuilt(coming);
  CHECK(with.order('e').wait(bench.io.waitScope) == "e1");
}

TEST_CASE("a client with another epoch, transport or key is none of a session that comes") {
  ArrivalBench bench;
  Opening coming = arrival(4), early = client(3), late = client(5), shared = client(4), stranger = client(4),
          fresh = client(1), good = client(4);
  coming.transportNamed = true;
  bench.arrives(coming);
  bench.rebuilt(coming);
  CHECK(contains(bench.open(early), "opened before with epoch 3"));
  CHECK(bench.open(late) == "the session moves as epoch 4, not as epoch 5");
  shared.transport = "shm";
  CHECK(bench.open(shared) == "the session's transport is ucx, not shm");
  stranger.key = std::string(32, 'x');
  CHECK(contains(bench.open(stranger), "proof of the session key is wrong"));
  CHECK(contains(bench.open(fresh), "opened before with epoch 3"));
  CHECK(bench.open(good) == "");
}

TEST_CASE("a client may share memory with the server to which its session comes") {
  ArrivalBench bench;
  Opening coming = arrival(4), shared = client(4);
  bench.arrives(coming);
  bench.rebuilt(coming);
  shared.transport = "shm";
  CHECK(bench.open(shared) == "");
}

TEST_CASE("why a session does not come here is said before a worker is taken") {
  ArrivalBench bench([](Admission::Settings& settings) { settings.sessionsPerLease = 2; });
  bench.until([&] { return bench.pool->warm() == 1; });
  Opening key = arrival(), lease = arrival(), shared = arrival(), first = arrival(1), none = arrival(0),
          rows = arrival(), paused = arrival(), crowded = arrival();
  key.key = std::string(32, 'x');
  CHECK(contains(bench.open(key), "proof of the session key is wrong"));
  CHECK_FALSE(key.serverProved);
  lease.lease = {7, 7};
  CHECK(contains(bench.open(lease), "is not known on server node1"));
  CHECK(lease.unknownLease);
  shared.transport = "shm";
  CHECK(contains(bench.open(shared), "the session shares memory with its server (transport shm)"));
  CHECK(contains(bench.open(first), "an epoch of 2 at least"));
  CHECK(contains(bench.open(none), "an epoch of 2 at least"));
  rows.rowsHash = 0xabc;
  CHECK(contains(bench.open(rows), "version mismatch"));
  bench.leases.pause({1, 1});
  CHECK(bench.open(paused) == "the lease is suspended");
  CHECK(paused.suspended);
  bench.leases.unpause({1, 1});
  Opening one, two;
  two.session = {2, 3};
  crowded.session = {2, 4};
  REQUIRE(bench.open(one) == "");
  REQUIRE(bench.open(two) == "");
  CHECK(contains(bench.open(crowded), "has 2 sessions already"));
  CHECK(bench.sessions.arriving({1, 1}) == 0);
  CHECK(bench.sessions.workers().size() == 2);
  Opening here = arrival(2);
  bench.leases.admissible({1, 1})->sessionEpochs[{2, 2}] = 5;
  CHECK(contains(bench.open(here), "opened before with epoch 5"));
}

TEST_CASE("a session that comes counts as one of its lease's") {
  ArrivalBench bench([](Admission::Settings& settings) { settings.sessionsPerLease = 1; });
  Opening coming = arrival(), other;
  bench.arrives(coming);
  other.session = {2, 9};
  CHECK(contains(bench.open(other), "has 1 sessions already"));
  Opening again = arrival();  // it takes the place of the first
  REQUIRE(bench.open(again) == "");
}

TEST_CASE("a session that comes twice comes as it was sent last, unless its client is there") {
  ArrivalBench bench;
  Opening first = arrival(), second = arrival(), third = arrival(3), with = client(3);
  bench.arrives(first);
  const pid_t displaced = bench.sessions.workers()[0].pid;
  REQUIRE(bench.open(second) == "");
  CHECK_FALSE(alive(displaced));  // before the second has a worker
  CHECK(first.hear().wait(bench.io.waitScope).empty());
  REQUIRE(bench.open(third) == "");
  bench.until([&] { return bench.sessions.arriving({1, 1}) == 1; });
  CHECK(bench.sessions.workers().size() == 1);
  bench.rebuilt(third);
  REQUIRE(bench.open(with) == "");
  CHECK(with.order('e').wait(bench.io.waitScope) == "e1");
  Opening late = arrival(4);
  CHECK(contains(bench.open(late), "is here already"));
  CHECK(with.order('e').wait(bench.io.waitScope) == "e1");
}

TEST_CASE("of two that wait for a worker at once one session comes") {
  Folder folder;
  Environment slow("GPUPOOL_FAKE_WORKER", folder.path + "/go");
  ArrivalBench bench;
  Opening first = arrival(), second = arrival();
  auto one = first.run(bench.connect()).eagerlyEvaluate(nullptr);
  auto two = second.run(bench.connect()).eagerlyEvaluate(nullptr);
  bench.until([&] { return bench.admission->opening({1, 1}); });
  std::ofstream(folder.path + "/go").close();
  one.wait(bench.io.waitScope);
  two.wait(bench.io.waitScope);
  CHECK((first.error.empty() || second.error.empty()));
  bench.until([&] { return bench.sessions.arriving({1, 1}) == 1 && bench.sessions.workers().size() == 1; });
}

TEST_CASE("a revoke ends a worker that waits for a session, and one that is being looked for") {
  ArrivalBench bench;
  Opening coming = arrival();
  bench.arrives(coming);
  bench.rebuilt(coming);
  bench.leases.close({1, 1});
  bench.sessions.end({1, 1}, "revoked").wait(bench.io.waitScope);
  CHECK(bench.sessions.workers().empty());
  CHECK(coming.hear().wait(bench.io.waitScope).empty());
  Opening with = client();
  CHECK(contains(bench.open(with), "is not known on server"));
}

TEST_CASE("a session that does not come leaves nothing, and may come again with the same epoch") {
  ArrivalBench bench;
  for (int time = 0; time < 2; ++time) {
    Opening coming = arrival();
    bench.arrives(coming);
    if (time == 1) bench.rebuilt(coming);
    coming.stream = nullptr;
    bench.until([&] { return bench.sessions.workers().empty(); });
    CHECK(bench.sessions.arriving({1, 1}) == 0);
  }
  Opening coming = arrival(), with = client();
  bench.arrives(coming);
  bench.rebuilt(coming);
  CHECK(bench.open(with) == "");
  CHECK(with.order('m').wait(bench.io.waitScope) == "taken, others have 0 MiB");
}
