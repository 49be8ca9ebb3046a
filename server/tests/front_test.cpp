// A server and its manager: joining, beats, leases, sessions, other servers of the host.
#include "server/tests/front_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("a server joins, beats, and takes leave without a trace") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 2 && bench.seen.warm == 1; });
  CHECK(bench.seen.joins == 1);
  CHECK(bench.seen.name == kServer);
  CHECK(bench.seen.local == bench.localPath());
  CHECK(bench.seen.host.empty());
  CHECK(bench.seen.devices == 2);
  CHECK(bench.seen.rows == kRows);
  CHECK(bench.seen.problems == std::vector<std::string>{"", ""});
  CHECK(bench.seen.activeLeases.empty());
  REQUIRE(std::filesystem::exists(bench.localPath()));
  bench.front->stop().wait(bench.io.waitScope);
  bench.front = nullptr;
  CHECK(bench.seen.leaves == 1);
  CHECK_FALSE(std::filesystem::exists(bench.localPath()));
  CHECK(children().empty());
}

TEST_CASE("a device that broke is told to the manager, and no lease on it is accepted") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening opening;
  REQUIRE(bench.open(opening).empty());
  CHECK(contains(opening.order('l').wait(bench.io.waitScope), "killed by signal 6"));
  bench.until([&] { return !bench.seen.problems.empty() && !bench.seen.problems[0].empty(); });
  CHECK(bench.seen.problems[0] == "CUDA_ERROR_FAKE (999); repair or reset it, and restart gpupool-server");
  CHECK(bench.seen.problems[1].empty());
  KJ_IF_MAYBE (error, kj::runCatchingExceptions([&] { bench.grant({1, 2}, 2); }))
    CHECK(contains(error->getDescription().cStr(), "device 0 is broken: CUDA_ERROR_FAKE"));
  else
    FAIL("a lease on a broken device was accepted");
}

TEST_CASE("what NVML says goes to the manager, and a GPU with an Xid of its own is leased no more") {
  Folder nvml;
  Environment state("FAKE_NVML_STATE", nvml.path + "/state");
  const auto says = [&](const std::string& text) {
    std::ofstream(nvml.path + "/new") << text;
    std::filesystem::rename(nvml.path + "/new", nvml.path + "/state");
  };
  says("load 37");
  Bench bench(true, false, [](ServerOptions& options) { options.nvml = FAKE_NVML; });
  bench.until([&] { return bench.seen.samples.size() == 2 && bench.seen.samples[1].gpuPercent == 37; });
  CHECK(bench.seen.problems == std::vector<std::string>(2));
  says("load 37 xid 79");
  bench.until([&] { return !bench.seen.problems[1].empty(); });
  CHECK(bench.seen.problems[1] ==
        "Xid 79: the GPU has fallen off the bus; repair or reset it, and restart gpupool-server");
  CHECK(bench.seen.problems[0].empty());
  auto request = bench.control().grantRequest();
  fillLease(request.initLease(), {1, 1}, 1, {1});
  CHECK(contains(failure([&] { request.send().ignoreResult().wait(bench.io.waitScope); }),
                 "is broken: Xid 79"));
  bench.grant({1, 2}, 2);
}

TEST_CASE("which GPUs NVLink joins is told once NVML has said it, and not again while nothing changes") {
  Folder nvml;
  Environment state("FAKE_NVML_STATE", nvml.path + "/state");
  std::ofstream(nvml.path + "/state") << "joined 2";
  Bench bench(true, false, [](ServerOptions& options) {
    options.nvml = FAKE_NVML;
    options.fabric = "none";  // this machine's adapters change when they like
  });
  bench.until([&] { return bench.seen.nvlinks == std::vector<uint64_t>{0b10, 0b01}; });
  const int told = bench.seen.fabricsTold, beats = bench.seen.beats;
  bench.until([&] { return bench.seen.beats >= beats + 5; });
  CHECK(bench.seen.fabricsTold == told);
}

TEST_CASE("a granted lease admits sessions until it is revoked, and its memory is free then") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  Opening early, opening, late;
  CHECK(contains(bench.open(early), "is not known"));
  bench.grant({1, 1}, 1, 8 * kGiB);
  REQUIRE(bench.open(opening).empty());
  const pid_t pid = std::stoi(opening.order('p').wait(bench.io.waitScope));
  bench.until([&] { return bench.seen.activeLeases == std::vector<Id>{{1, 1}}; });
  CHECK(contains(failure([&] { bench.grant({1, 2}, 2); }), "bytes free"));

  auto listed = bench.control().sessionsRequest().send().wait(bench.io.waitScope);
  REQUIRE(listed.getSessions().size() == 1);
  CHECK(listed.getSessions()[0].getWorkerPid() == static_cast<uint32_t>(pid));
  CHECK_FALSE(listed.getSessions()[0].getEnded());

  bench.revoke({1, 1}, "drained");
  CHECK_FALSE(alive(pid));
  CHECK(opening.hear().wait(bench.io.waitScope) == "stop: the lease has ended: drained");
  late.session = {2, 3};
  CHECK(contains(bench.open(late), "is not known"));
  bench.grant({1, 2}, 2, 8 * kGiB);
  bench.revoke({1, 1}, "again");  // idempotent
  auto history = bench.control().sessionsRequest().send().wait(bench.io.waitScope);
  REQUIRE(history.getSessions().size() == 1);
  CHECK(history.getSessions()[0].getEnded());
  CHECK(history.getSessions()[0].getText() == "the lease has ended: drained");
}

TEST_CASE("network sessions come over tcp") {
  Bench bench(true, true);
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.host == "127.0.0.1");
  REQUIRE(bench.seen.port != 0);
  bench.grant({1, 1}, 1);
  Opening opening;
  opening.transport = "ucx";
  opening.run(bench.connect("127.0.0.1:" + std::to_string(bench.seen.port))).wait(bench.io.waitScope);
  REQUIRE(opening.error.empty());
  CHECK(opening.order('e').wait(bench.io.waitScope) == "e0");
}

TEST_CASE("while the manager is away sessions run on, and the server comes back with its leases") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening first, second;
  REQUIRE(bench.open(first).empty());
  const Id incarnation = bench.seen.incarnation;

  bench.seen.control = nullptr;
  bench.manager = nullptr;
  bench.timer.afterDelay(300 * kj::MILLISECONDS).wait(bench.io.waitScope);
  CHECK(first.order('e').wait(bench.io.waitScope) == "e0");
  second.session = {2, 3};
  CHECK(bench.open(second).empty());  // admitted without the manager

  bench.seen.activeLeases.clear();
  bench.startManager();
  bench.until([&] { return bench.seen.joins == 2 && !bench.seen.activeLeases.empty(); });
  CHECK(bench.seen.incarnation == incarnation);
  CHECK(bench.seen.activeLeases == std::vector<Id>{{1, 1}});
  bench.revoke({1, 1}, "over");
  CHECK(first.hear().wait(bench.io.waitScope) == "stop: the lease has ended: over");
}

TEST_CASE("a server that starts before its manager finds it") {
  Bench bench(false);
  bench.timer.afterDelay(300 * kj::MILLISECONDS).wait(bench.io.waitScope);
  bench.startManager();
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.joins == 1);
}

TEST_CASE("a manager that forgot the server is joined again; one that is silent is left") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.seen.known = false;
  bench.until([&] { return bench.seen.joins == 2; });
  bench.seen.mute = true;
  bench.timer.afterDelay(150 * kj::MILLISECONDS).wait(bench.io.waitScope);
  bench.seen.mute = false;
  bench.until([&] { return bench.seen.joins == 3; });
}

TEST_CASE("a manager that dies during a revoke does not stop it") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1, 8 * kGiB);
  Opening opening;
  REQUIRE(bench.open(opening).empty());
  const pid_t pid = std::stoi(opening.order('p').wait(bench.io.waitScope));
  kill(pid, SIGSTOP);  // it will not obey, so that the revoke takes its time
  {
    auto request = bench.control().revokeRequest();
    schema::write(Id{1, 1}, request.initId());
    auto call = request.send().ignoreResult().eagerlyEvaluate(nullptr);
    bench.timer.afterDelay(100 * kj::MILLISECONDS).wait(bench.io.waitScope);
  }
  bench.seen.control = nullptr;
  bench.manager = nullptr;
  bench.until([&] { return !alive(pid); });
  bench.startManager();
  bench.until([&] { return bench.seen.joins == 2; });
  bench.grant({1, 2}, 2, 8 * kGiB);
}

TEST_CASE("a shutting-down server tells its sessions") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening opening;
  REQUIRE(bench.open(opening).empty());
  bench.front->stop().wait(bench.io.waitScope);
  CHECK(opening.hear().wait(bench.io.waitScope) == "stop: the GPU server is shutting down");
  bench.front = nullptr;
  CHECK(children().empty());
}

TEST_CASE("a second server does not take the first one's socket; a dead one's is replaced") {
  Bench bench;
  CHECK(contains(failure([&] { LocalListener(*bench.io.lowLevelProvider, bench.localPath()); }),
                 "another server answers"));
  const std::string stale = bench.folder.path + "/stale.sock";
  {
    LocalListener listener(*bench.io.lowLevelProvider, stale);
    std::ofstream(bench.folder.path + "/file") << "data";
    REQUIRE(link(stale.c_str(), (stale + ".kept").c_str()) == 0);
  }
  REQUIRE(std::filesystem::exists(stale + ".kept"));
  LocalListener again(*bench.io.lowLevelProvider, stale + ".kept");
  CHECK(contains(failure([&] { LocalListener(*bench.io.lowLevelProvider, bench.folder.path + "/file"); }),
                 "is not a socket"));
}

TEST_CASE("a dead server's socket that a child of it still has for a moment is replaced") {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  Folder folder;
  const std::string path = folder.path + "/local.sock";
  const int child = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  REQUIRE(bind(child, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(listen(child, 8) == 0);
  std::thread dies([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    close(child);
  });
  CHECK_NOTHROW(LocalListener(*io.lowLevelProvider, path));
  dies.join();
}

TEST_CASE("a GPU that another server of the host holds is left out, and its holder is named") {
  Folder locks;
  DeviceLock other(locks.path, uuid(0));
  REQUIRE(other.take({"elsewhere", "/run/other/server-elsewhere", getpid(), processStartTicks(getpid())}));
  const auto there = [&](ServerOptions& options) { options.deviceLocks = locks.path; };
  Bench bench(true, false, there);
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.devices == 1);
  REQUIRE(bench.seen.leftOut.size() == 1);
  CHECK(contains(bench.seen.leftOut[0], ("GPU 0 (" + uuidText(uuid(0)) + ")").c_str()));
  CHECK(contains(bench.seen.leftOut[0],
                 ("held by gpupool-server elsewhere (process " + std::to_string(getpid()) + ")").c_str()));
  // The other one is ours, as long as we live.
  DeviceLock mine(locks.path, uuid(1));
  CHECK_FALSE(mine.take({"third", "x", getpid(), 1}));
  CHECK(mine.holder().server == kServer);
  bench.front->stop().wait(bench.io.waitScope);
  CHECK(mine.take({"third", "x", getpid(), 1}));
}

TEST_CASE("a server without a GPU of its own says who has them") {
  Folder locks;
  DeviceLock one(locks.path, uuid(0)), two(locks.path, uuid(1));
  const LockOwner other{"elsewhere", "/run/other/server-elsewhere", getpid(), processStartTicks(getpid())};
  REQUIRE(one.take(other));
  REQUIRE(two.take(other));
  const std::string said = failure([&] {
    Bench bench(true, false, [&](ServerOptions& options) {
      options.deviceLocks = locks.path;
      options.driverWait = std::chrono::milliseconds(1);
    });
  });
  CHECK(contains(said, "no GPU is left for this server: GPU 0"));
}

TEST_CASE("--devices offers a subset, and says which of it there is not") {
  Bench bench(true, false,
              [&](ServerOptions& options) { options.devices = uuidText(uuid(1)) + "," + uuidText(uuid(9)); });
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.devices == 1);
  REQUIRE(bench.seen.leftOut.size() == 1);
  CHECK(contains(bench.seen.leftOut[0], "is not on this machine"));
  CHECK(contains(failure([&] { bench.grant({1, 1}, 1); }), "no device of the uuid"));
}

TEST_CASE("a server says which walls stand around its workers, and which do not") {
  {
    Bench without;
    without.until([&] { return without.seen.joins == 1; });
    CHECK(without.seen.walls.empty());
    CHECK(without.seen.missingWalls == std::vector<std::string>{"all: --walls is off"});
  }
  const auto expected = walls::ofThisMachine(walls::Mode::automatic);
  {
    Bench with(true, false, [](ServerOptions& options) { options.walls = "auto"; });
    with.until([&] { return with.seen.joins == 1; });
    auto standing = expected.standing, missing = expected.missing;
    // The fake driver's GPUs are no real ones, and it does not say that they are software.
    if (std::erase(standing, walls::kOwnDevices) != 0)
      missing.insert(missing.begin(), "devices: the node of device 0, 0000:00:00.0, is not known");
    CHECK(with.seen.walls == standing);
    if (!expected.standing.empty()) missing.emplace_back("user: --worker-users is not set");
    CHECK(with.seen.missingWalls == missing);
  }
}

TEST_CASE("a server's next life knows the epochs it has granted") {
  Folder state;
  const auto there = [&](ServerOptions& options) { options.state = state.path; };
  {
    Bench bench(true, false, there);
    bench.until([&] { return bench.seen.beats > 0; });
    CHECK(bench.seen.epochs == std::vector<uint64_t>{0, 0});
    bench.grant({1, 1}, 41);
  }
  Bench bench(true, false, there);
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.epochs == std::vector<uint64_t>{41, 0});
  CHECK(contains(failure([&] { bench.grant({1, 2}, 41); }), "not higher than 41"));
  bench.grant({1, 2}, 42);
}

TEST_CASE("worker programs come and go without a restart, and the manager is told") {
  Folder programs;
  Bench bench(true, false, [&](ServerOptions& options) { options.workers = programs.path; });
  bench.until([&] { return bench.seen.beats > 0; });
  CHECK(bench.seen.workers == std::vector<uint64_t>{kRows});
  bench.grant({1, 1}, 1);
  Opening running, late, current;
  running.rowsHash = late.rowsHash = kOtherRows;
  late.session = {2, 4}, current.session = {2, 5};
  CHECK(contains(bench.open(running), "version mismatch"));

  const std::string program = makeOtherWorker(programs.path, FAKE_WORKER);
  bench.front->lookAgain();
  bench.until([&] { return bench.seen.workers == std::vector<uint64_t>{kRows, kOtherRows}; });
  REQUIRE(bench.open(running).empty());
  CHECK(running.order('y').wait(bench.io.waitScope) == "y5678");

  std::filesystem::remove(program);
  bench.front->lookAgain();
  bench.front->lookAgain();
  bench.until([&] { return bench.seen.workers == std::vector<uint64_t>{kRows}; });
  CHECK(contains(bench.open(late), "version mismatch"));
  CHECK(running.order('y').wait(bench.io.waitScope) == "y5678");
  REQUIRE(bench.open(current).empty());
  CHECK(bench.seen.joins == 1);
  CHECK(bench.seen.workersTold == 3);  // not with every beat
}
