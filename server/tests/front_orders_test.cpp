// A server and what its manager orders for leases that run: memory, suspensions, turns, moves.
#include "server/tests/front_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

// A lease with two sessions.
struct Two {
  explicit Two(uint64_t memory = 0) {
    two.session = {2, 3};
    bench.until([this] { return bench.seen.beats > 0; });
    bench.grant({1, 1}, 1, memory);
    REQUIRE(bench.open(one).empty());
    REQUIRE(bench.open(two).empty());
  }
  Bench bench;
  Opening one, two;
};

}  // namespace

TEST_CASE("sessions of one lease share its memory, and a worker that dies gives back what it had") {
  Two all(1000 << 20);
  auto& [bench, one, two] = all;
  // Each order takes 600 MiB.
  CHECK(one.order('m').wait(bench.io.waitScope) == "taken, others have 0 MiB");
  CHECK(two.order('m').wait(bench.io.waitScope) == "refused, others have 600 MiB");
  CHECK(one.order('m').wait(bench.io.waitScope) == "refused, others have 0 MiB");
  one.order('c').wait(bench.io.waitScope);
  bench.until([&] { return two.order('m').wait(bench.io.waitScope) == "taken, others have 0 MiB"; });
  CHECK(two.order('g').wait(bench.io.waitScope) == "given");
  CHECK(two.order('m').wait(bench.io.waitScope) == "taken, others have 0 MiB");
}

TEST_CASE("each beat says why the sessions of a lease could not be moved") {
  Two all;
  auto& [bench, one, two] = all;
  const auto told = [&] { return bench.seen.hindrances[{1, 1}]; };
  CHECK(one.order('H').wait(bench.io.waitScope) == "told");
  CHECK(two.order('H').wait(bench.io.waitScope) == "told");
  bench.until([&] { return told().size() == 2; });
  CHECK(told()[0] == "cannot be moved: its code is strange");
  CHECK(told()[1].starts_with("cannot be moved: xxxx"));
  CHECK(told()[1].size() < 200);
  CHECK(one.order('U').wait(bench.io.waitScope) == "told");
  CHECK(contains(two.order('q').wait(bench.io.waitScope), "client closed"));
  bench.until([&] { return bench.seen.hindrances.empty(); });
  CHECK(contains(one.order('q').wait(bench.io.waitScope), "client closed"));
  bench.until([&] { return bench.seen.hindrances.empty(); });
}

TEST_CASE("each beat says what the programs of a lease have done, also those that have ended") {
  Two all;
  auto& [bench, one, two] = all;
  const auto told = [&](uint64_t times) {
    const std::vector<uint64_t> all = {10 * times, 4 * times, 1000 * times, 500 * times};
    bench.until([&] { return bench.seen.counts[{1, 1}] == all; });
  };
  CHECK(one.order('N').wait(bench.io.waitScope) == "told");
  told(1);
  CHECK(bench.seen.checkpointAges[{1, 1}] == -1);
  CHECK(one.order('N').wait(bench.io.waitScope) == "told");
  CHECK(two.order('N').wait(bench.io.waitScope) == "told");
  told(3);
  CHECK(contains(one.order('q').wait(bench.io.waitScope), "client closed"));
  CHECK(two.order('N').wait(bench.io.waitScope) == "told");
  told(4);
}

TEST_CASE("a lease is suspended and resumed by the manager's order, and each beat says which are") {
  constexpr uint64_t kKept = uint64_t{3} << 20;
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1, 8 * kGiB);
  Opening one, refused, other;
  REQUIRE(bench.open(one).empty());
  CHECK(bench.suspend({1, 1}) == std::vector<uint64_t>{kKept});
  bench.until([&] { return !bench.seen.suspended.empty(); });
  CHECK(bench.seen.suspended == std::vector<std::pair<Id, std::vector<uint64_t>>>{{{1, 1}, {kKept}}});
  CHECK(bench.seen.activeLeases == std::vector<Id>{{1, 1}});
  refused.session = {2, 3};
  CHECK(bench.open(refused) == "the lease is suspended");
  CHECK(refused.suspended);

  bench.grant({1, 2}, 2, 7 * kGiB);
  other.lease = {1, 2};
  REQUIRE(bench.open(other).empty());
  CHECK(other.order('e').wait(bench.io.waitScope) == "e0");
  CHECK(contains(failure([&] { bench.resume({1, 1}); }), "the lease cannot be resumed: device 0 has"));
  bench.revoke({1, 2}, "over");
  bench.resume({1, 1});
  CHECK(one.order('s').wait(bench.io.waitScope) == "running 1");
  const int beats = bench.seen.beats;
  bench.until([&] { return bench.seen.beats > beats + 1; });
  CHECK(bench.seen.suspended.empty());
  CHECK(contains(failure([&] { bench.suspend({7, 7}); }), "is not known here"));
}

TEST_CASE("no context is made ahead on a device whose suspended lease wants all of it again") {
  Bench bench(true, false, [](ServerOptions& options) {
    options.warm = 0;
    options.warmContexts = true;
    options.devices = uuidText(uuid(0));
  });
  bench.until([&] { return bench.seen.warm == 1; });
  bench.grant({1, 1}, 1, 8 * kGiB);
  Opening one;
  REQUIRE(bench.open(one).empty());
  bench.until([&] { return bench.seen.warm == 0; });
  bench.suspend({1, 1});
  bench.timer.afterDelay(800 * kj::MILLISECONDS).wait(bench.io.waitScope);  // contextCheck, twice
  CHECK(bench.seen.warm == 0);
  bench.resume({1, 1});
  CHECK(one.order('s').wait(bench.io.waitScope) == "running 1");
  one.order('q').wait(bench.io.waitScope);
  bench.until([&] { return bench.seen.warm == 1; });
}

TEST_CASE("a server with no memory for it suspends nothing, and names the option") {
  Bench bench(true, false, [](ServerOptions& options) { options.suspendMemory = "0"; });
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  CHECK(contains(failure([&] { bench.suspend({1, 1}); }),
                 "--suspend-memory (suspend_memory in server.yaml) is 0"));
}

TEST_CASE("with overcommit leases take turns, and the manager hears how") {
  using Places = std::map<Id, schema::TurnPlace>;
  constexpr auto kResident = schema::TurnPlace::RESIDENT;
  Bench bench(true, false, [](ServerOptions& options) {
    options.overcommit = "1.5";
    options.suspendMemory = "8GiB";
    options.turnTime = std::chrono::milliseconds(300);
  });
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.overcommitPercent == 150);
  bench.grant({1, 1}, 1, 5 * kGiB);
  bench.grant({1, 2}, 2, 5 * kGiB);
  Opening one, two;
  REQUIRE(bench.open(one).empty());
  bench.until(
      [&] { return bench.seen.turns == Places{{{1, 1}, kResident}, {{1, 2}, schema::TurnPlace::ASIDE}}; });
  two.lease = {1, 2};
  CHECK(bench.open(two) == "the lease waits for its turn");
  CHECK(two.suspended);
  bench.until([&] { return bench.seen.turns[{1, 2}] == kResident; });
  REQUIRE(bench.open(two).empty());
  bench.until(
      [&] { return bench.seen.turns == Places{{{1, 1}, kResident}, {{1, 2}, schema::TurnPlace::WAITING}}; });
  CHECK(bench.seen.suspended.empty());
  CHECK(bench.suspend({1, 1}).size() == 1);
  bench.until([&] { return bench.seen.turns == Places{{{1, 2}, kResident}}; });
  CHECK(bench.seen.suspended.size() == 1);
  bench.resume({1, 1});
  bench.until([&] { return bench.seen.turns.size() == 2 && bench.seen.suspended.empty(); });
  bench.front->stop().wait(bench.io.waitScope);
  bench.front = nullptr;
  CHECK(children().empty());
}

TEST_CASE("without overcommit nobody takes turns, and no worker is asked what it does") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.overcommitPercent == 100);
  bench.grant({1, 1}, 1);
  Opening one;
  REQUIRE(bench.open(one).empty());
  CHECK(one.order('Q').wait(bench.io.waitScope) == "unwanted");
  const int beats = bench.seen.beats;
  bench.until([&] { return bench.seen.beats > beats + 1; });
  CHECK(bench.seen.turns.empty());
}

TEST_CASE("a server without the memory for its overcommit does not start, and names the amounts") {
  const auto start = [](const std::string& memory, const std::string& folder) {
    return failure([&] {
      Bench bench(true, false, [&](ServerOptions& options) {
        options.overcommit = "2.0";
        options.suspendMemory = memory;
        options.suspendFolder = folder;
      });
    });
  };
  CHECK(contains(start("1GiB", ""),
                 "--overcommit 2.0 leases 32.0 GiB on GPUs with 16.0 GiB, and "
                 "--suspend-memory is 1.0 GiB, which does not hold the rest: raise "
                 "--suspend-memory, or name a --suspend-folder"));
  CHECK(start("1GiB", "/tmp").empty());
  CHECK(start("16GiB", "").empty());
}

TEST_CASE("a server that stops leaves neither suspended workers nor the copier behind") {
  Bench bench(true, false, [](ServerOptions& options) {
    options.suspendMemory = "1GiB";
    options.suspendMemoryAhead = options::Bytes{1 << 20};
  });
  bench.until([&] { return bench.seen.beats > 0; });
  bench.until([] { return children().size() == 2; });  // the waiting worker, and the copier ahead of time
  bench.grant({1, 1}, 1);
  Opening one;
  REQUIRE(bench.open(one).empty());
  bench.suspend({1, 1});
  bench.front->stop().wait(bench.io.waitScope);
  CHECK(one.hear().wait(bench.io.waitScope) == "stop: the GPU server is shutting down");
  bench.front = nullptr;
  CHECK(children().empty());
}

TEST_CASE("with GPUPOOL_DISTURB a worker may have its session suspended and resumed") {
  Environment disturb("GPUPOOL_DISTURB", "suspend:42");
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening one;
  REQUIRE(bench.open(one).empty());
  std::ifstream file("/proc/" + one.order('p').wait(bench.io.waitScope) + "/cmdline");
  std::string words(std::istreambuf_iterator<char>(file), {});
  std::replace(words.begin(), words.end(), '\0', ' ');
  CHECK(contains(words, "--disturb 42"));
  one.order('t').wait(bench.io.waitScope);
  std::string state;
  for (int attempt = 0; attempt < 1000 && state != "running 1"; ++attempt) {
    bench.timer.afterDelay(10 * kj::MILLISECONDS).wait(bench.io.waitScope);
    state = one.order('s').wait(bench.io.waitScope);
  }
  CHECK(state == "running 1");
  Environment nonsense("GPUPOOL_DISTURB", "often");
  CHECK_THROWS_WITH(kj::heap<Front>(bench.io, ServerOptions{}),
                    "GPUPOOL_DISTURB: 'often' is none of suspend:NUMBER, move:NUMBER, stream:NUMBER, "
                    "files:NUMBER, kill:NUMBER, begin:NUMBER and server:NUMBER");
}

TEST_CASE("with GPUPOOL_DISTURB a worker may have its session moved") {
  const std::string kind = GENERATE("move", "stream");  // the latter without a copier
  Environment disturb("GPUPOOL_DISTURB", kind + ":42");
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening one, two;
  REQUIRE(bench.open(one).empty());
  std::ifstream file("/proc/" + one.order('p').wait(bench.io.waitScope) + "/cmdline");
  std::string words(std::istreambuf_iterator<char>(file), {});
  std::replace(words.begin(), words.end(), '\0', ' ');
  CHECK(contains(words, ("--disturb-" + kind + "s 42").c_str()));
  CHECK(one.order('t').wait(bench.io.waitScope) == "done");
  CHECK(one.hear().wait(bench.io.waitScope) == "moved 2");
  two.epoch = 2;
  if (kind == "stream") two.transport = "ucx";  // where the worker shares no memory with it
  REQUIRE(bench.open(two).empty());
  CHECK(one.order('L').wait(bench.io.waitScope).empty());
  CHECK(two.order('e').wait(bench.io.waitScope) == "e0");
  Environment nonsense("GPUPOOL_DISTURB", "move:");
  CHECK_THROWS_WITH(kj::heap<Front>(bench.io, ServerOptions{}),
                    "GPUPOOL_DISTURB: 'move:' is none of suspend:NUMBER, move:NUMBER, stream:NUMBER, "
                    "files:NUMBER, kill:NUMBER, begin:NUMBER and server:NUMBER");
}

TEST_CASE("with GPUPOOL_DISTURB a worker may have its lease held in files, where that can be") {
  Environment disturb("GPUPOOL_DISTURB", "files:42");
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening one;
  REQUIRE(bench.open(one).empty());
  std::ifstream file("/proc/" + one.order('p').wait(bench.io.waitScope) + "/cmdline");
  std::string words(std::istreambuf_iterator<char>(file), {});
  std::replace(words.begin(), words.end(), '\0', ' ');
  CHECK(contains(words, "--disturb-moves 42"));
  CHECK(one.order('t').wait(bench.io.waitScope) ==
        "done");  // refused: there is no folder, and it is over shm
  CHECK(one.order('e').wait(bench.io.waitScope) == "e0");
}

TEST_CASE("the manager has a lease's sessions moved, and its next life knows both workers") {
  Bench bench(true, false, [](ServerOptions& options) { options.suspendMemory = "1GiB"; });
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening one, two;
  REQUIRE(bench.open(one).empty());
  auto request = bench.control().migrateRequest();
  schema::write(Id{1, 1}, request.initId());
  request.setDrainMs(1000);
  auto order = request.send();
  REQUIRE(one.hear().wait(bench.io.waitScope) == "moved 2");
  two.epoch = 2;
  REQUIRE(bench.open(two).empty());
  const pid_t next = std::stoi(two.order('p').wait(bench.io.waitScope));
  StateFile stored(bench.folder.path + "/server-" + kServer + ".state", [] {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string line;
    std::getline(file, line);
    return line;
  }());
  CHECK(stored.read().workers.size() == 2);
  CHECK(one.order('L').wait(bench.io.waitScope).empty());
  auto response = order.wait(bench.io.waitScope);
  CHECK(response.getResult().getSessions() == 1);
  CHECK(response.getResult().getMovedBytes() == kGiB);
  CHECK(response.getResult().getLongestPauseMs() == 11);
  bench.until([&] { return stored.read().workers.size() == 1; });
  CHECK(stored.read().workers[0].pid == next);
  auto unknown = bench.control().migrateRequest();
  schema::write(Id{7, 7}, unknown.initId());
  CHECK(contains(failure([&] { unknown.send().wait(bench.io.waitScope); }), "is not known here"));
}

TEST_CASE("a server without memory to suspend to moves nothing, and says so") {
  Bench bench(true, false, [](ServerOptions& options) { options.suspendMemory = "0"; });
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  auto request = bench.control().migrateRequest();
  schema::write(Id{1, 1}, request.initId());
  CHECK(contains(failure([&] { request.send().wait(bench.io.waitScope); }),
                 "server node1 moves no session: its option --suspend-memory"));
}

TEST_CASE("the manager has a lease moved to other devices of the server, and settles that") {
  Bench bench(true, false, [](ServerOptions& options) { options.suspendMemory = "1GiB"; });
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening one, two, other;
  REQUIRE(bench.open(one).empty());
  const auto addTarget = [&](uint64_t epoch) {
    auto request = bench.control().addTargetRequest();
    fillLease(request.initTarget(), {1, 1}, epoch, {1});
    return failure([&] { request.send().ignoreResult().wait(bench.io.waitScope); });
  };
  const auto settle = [&](bool moved) {
    auto request = bench.control().settleRequest();
    schema::write(Id{1, 1}, request.initId());
    request.setMoved(moved);
    return failure([&] { request.send().ignoreResult().wait(bench.io.waitScope); });
  };
  const auto order = [&](const char* server) {
    auto request = bench.control().migrateRequest();
    schema::write(Id{1, 1}, request.initId());
    request.setDrainMs(1000);
    fillLease(request.initTarget(), {1, 1}, 5, {1});
    request.getTarget().initServer().setName(server);
    return request.send();
  };
  auto early = order(kServer);
  CHECK(contains(failure([&] { early.wait(bench.io.waitScope); }), "were not reserved for it"));
  CHECK(
      contains(addTarget(1), "the server refuses the lease other devices: its epoch 1 is not higher than 1"));
  CHECK(addTarget(5) == "");
  CHECK(addTarget(5) == "");
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string bootId;
  std::getline(boot, bootId);
  StateFile stored(bench.folder.path + "/server-" + kServer + ".state", bootId);
  CHECK(stored.read().epochs == std::map<std::string, uint64_t>{{uuid(0), 1}, {uuid(1), 5}});
  auto away = order("node9");
  CHECK(contains(failure([&] { away.wait(bench.io.waitScope); }), "server node9 takes no network sessions"));
  auto moved = order(kServer);
  REQUIRE(one.hear().wait(bench.io.waitScope) == "moved 2");
  two.epoch = 2;
  REQUIRE(bench.open(two).empty());
  CHECK(two.order('e').wait(bench.io.waitScope) == "e1");
  CHECK(one.order('L').wait(bench.io.waitScope).empty());
  CHECK(moved.wait(bench.io.waitScope).getResult().getSessions() == 1);
  CHECK(contains(settle(false), "still on the devices that it was to have"));
  CHECK(settle(true) == "");
  CHECK(settle(true) == "");
  // The worker is known to the server's next life by the device that it has now.
  REQUIRE(stored.read().workers.size() == 1);
  CHECK(stored.read().workers[0].devices == std::vector<std::string>{uuid(1)});
  bench.until([&] { return bench.seen.activeLeases == std::vector<Id>{{1, 1}}; });
  bench.grant({1, 2}, 6, 0);  // all of the device that it had
  other.session = {2, 9};
  REQUIRE(bench.open(other).empty());
  CHECK(other.order('e').wait(bench.io.waitScope) == "e1");
}
