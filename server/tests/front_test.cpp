// A whole server in this process's event loop, and a manager that does what the test says.
#include "server/front/front.h"

#include <capnp/rpc-twoparty.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstring>
#include <thread>

#include "base/process_name.h"
#include "schema/convert.h"
#include "schema/device_sample.h"
#include "schema/protocol.h"
#include "server/front/device_lock.h"
#include "server/tests/support.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

std::vector<uint64_t> amounts(capnp::List<uint64_t>::Reader list) {
  std::vector<uint64_t> amounts;
  for (const uint64_t amount : list) amounts.push_back(amount);
  return amounts;
}

// What the manager saw, and how it answers.
struct Seen {
  int joins = 0, beats = 0, leaves = 0;
  Id incarnation;
  std::string name, local, host;
  uint16_t port = 0;
  size_t devices = 0;
  std::vector<std::string> leftOut, walls, missingWalls;
  std::vector<uint64_t> epochs;
  std::vector<std::vector<Id>> running;
  uint64_t rows = 0;
  std::vector<Id> activeLeases;
  std::vector<std::pair<Id, std::vector<uint64_t>>> suspended;
  uint32_t overcommitPercent = 0;
  std::map<Id, schema::TurnPlace> turns;
  std::map<Id, std::vector<std::string>> hindrances;
  std::vector<std::string> problems;
  std::vector<DeviceSample> samples;
  uint32_t warm = 0;
  bool known = true;
  bool mute = false;  // beats are never answered
  kj::Maybe<schema::ServerControl::Client> control;
};

class FakeManager final : public schema::Manager::Server {
 public:
  explicit FakeManager(Seen& seen) : seen_(seen) {}

 protected:
  kj::Promise<void> login(LoginContext context) override {  // no token is needed
    context.getResults().setProtocol(schema::poolProtocol());
    return kj::READY_NOW;
  }
  kj::Promise<void> join(JoinContext context) override {
    const auto info = context.getParams().getInfo();
    ++seen_.joins;
    seen_.incarnation = schema::read(info.getIncarnation());
    seen_.name = info.getName().cStr();
    seen_.local = info.getLocalPath().cStr();
    seen_.host = info.getHost().cStr();
    seen_.port = info.getPort();
    seen_.devices = info.getDevices().size();
    seen_.overcommitPercent = info.getOvercommitPercent();
    seen_.leftOut.clear();
    for (auto note : info.getLeftOut()) seen_.leftOut.push_back(note.cStr());
    seen_.walls.clear();
    for (auto wall : info.getWalls()) seen_.walls.push_back(wall.cStr());
    seen_.missingWalls.clear();
    for (auto wall : info.getMissingWalls()) seen_.missingWalls.push_back(wall.cStr());
    seen_.epochs.clear();
    seen_.running.clear();
    for (auto report : context.getParams().getReports()) {
      seen_.epochs.push_back(report.getHighestEpoch());
      auto& ids = seen_.running.emplace_back();
      for (auto id : report.getRunning()) ids.push_back(schema::read(id));
    }
    seen_.rows = info.getRowsHash();
    seen_.control = context.getParams().getControl();
    seen_.known = true;
    context.getResults().setBeatMs(30);
    return kj::READY_NOW;
  }
  kj::Promise<void> beat(BeatContext context) override {
    const auto params = context.getParams();
    ++seen_.beats;
    if (seen_.mute) return kj::NEVER_DONE;
    seen_.activeLeases.clear();
    for (auto id : params.getActiveLeases()) seen_.activeLeases.push_back(schema::read(id));
    seen_.suspended.clear();
    for (auto lease : params.getSuspended())
      seen_.suspended.emplace_back(schema::read(lease.getId()), amounts(lease.getKept()));
    seen_.turns.clear();
    for (auto turn : params.getTurns()) seen_.turns[schema::read(turn.getId())] = turn.getPlace();
    seen_.hindrances.clear();
    for (auto lease : params.getHindrances())
      for (auto reason : lease.getReasons())
        seen_.hindrances[schema::read(lease.getId())].push_back(reason.cStr());
    seen_.problems.clear();
    for (auto problem : params.getProblems()) seen_.problems.push_back(problem.cStr());
    seen_.samples.clear();
    for (auto sample : params.getSamples()) seen_.samples.push_back(schema::read(sample));
    seen_.warm = params.getWarmWorkers();
    context.getResults().setKnown(seen_.known);
    return kj::READY_NOW;
  }
  kj::Promise<void> leave(LeaveContext) override {
    ++seen_.leaves;
    return kj::READY_NOW;
  }

 private:
  Seen& seen_;
};

// The manager's socket; destroying it closes every connection.
struct Manager : kj::TaskSet::ErrorHandler {
  Manager(kj::AsyncIoContext& io, const std::string& path, Seen& seen)
      : path(path), listener(*io.lowLevelProvider, path), server(kj::heap<FakeManager>(seen)), tasks(*this) {
    tasks.add(server.listen(listener.receiver()));
  }
  void taskFailed(kj::Exception&&) override {}
  std::string path;
  LocalListener listener;
  capnp::TwoPartyServer server;
  kj::TaskSet tasks;
};

struct Bench {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  Folder folder;
  Seen seen;
  kj::Own<Manager> manager;
  kj::Own<Front> front;

  explicit Bench(bool withManager = true, bool network = false,
                 const std::function<void(ServerOptions&)>& adjust = {}) {
    if (withManager) startManager();
    ServerOptions options;
    options.manager = "unix:" + managerPath();
    options.name = kServer;
    options.state = folder.path;
    options.local = localPath();
    if (network) options.listen = "127.0.0.1:0";
    options.driver = FAKE_DRIVER;
    options.worker = FAKE_WORKER;
    options.warm = 1;
    options.warmContexts = false;
    options.stopTime = std::chrono::milliseconds(300);
    options.deviceLocks = folder.path;
    options.walls = "off";  // the worker is none
    if (adjust) adjust(options);
    options.complete();
    front = kj::heap<Front>(io, options);
    front->start().wait(io.waitScope);
  }
  ~Bench() {
    if (front.get() != nullptr) front->stop().wait(io.waitScope);
  }
  std::string managerPath() const { return folder.path + "/manager.sock"; }
  std::string localPath() const { return folder.path + "/server.sock"; }
  void startManager() { manager = kj::heap<Manager>(io, managerPath(), seen); }
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }

  schema::ServerControl::Client control() {
    KJ_IF_MAYBE (client, seen.control) {
      return *client;
    }
    KJ_FAIL_REQUIRE("no server joined");
  }
  void grant(Id id, uint64_t epoch, uint64_t memory = kGiB) {
    auto request = control().grantRequest();
    fillLease(request.initLease(), id, epoch, {0}, memory);
    request.send().ignoreResult().wait(io.waitScope);
  }
  void revoke(Id id, const std::string& reason) {
    auto request = control().revokeRequest();
    schema::write(id, request.initId());
    request.setReason(reason);
    request.send().ignoreResult().wait(io.waitScope);
  }
  std::vector<uint64_t> suspend(Id id) {
    auto request = control().suspendRequest();
    schema::write(id, request.initId());
    request.setDrainMs(1000);
    auto response = request.send().wait(io.waitScope);
    CHECK(response.getResult().getMoveMs() == (response.getResult().getMovedBytes() == 0 ? 0 : 7));
    return amounts(response.getResult().getKept());
  }
  void resume(Id id) {
    auto request = control().resumeRequest();
    schema::write(id, request.initId());
    request.send().ignoreResult().wait(io.waitScope);
  }
  kj::Own<kj::AsyncIoStream> connect(const std::string& address) {
    auto parsed = io.provider->getNetwork().parseAddress(address).wait(io.waitScope);
    return parsed->connect().wait(io.waitScope);
  }
  std::string open(Opening& opening) {
    opening.run(connect("unix:" + localPath())).wait(io.waitScope);
    return opening.error;
  }
};

}  // namespace

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
    CHECK(with.seen.walls == expected.standing);
    CHECK(with.seen.missingWalls == expected.missing);
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

TEST_CASE("sessions of one lease share its memory, and a worker that dies gives back what it had") {
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1, 1000 << 20);
  Opening one, two;
  two.session = {2, 3};
  REQUIRE(bench.open(one).empty());
  REQUIRE(bench.open(two).empty());
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
  Bench bench;
  bench.until([&] { return bench.seen.beats > 0; });
  bench.grant({1, 1}, 1);
  Opening one, two;
  two.session = {2, 3};
  REQUIRE(bench.open(one).empty());
  REQUIRE(bench.open(two).empty());
  const auto told = [&] { return bench.seen.hindrances[{1, 1}]; };
  // They share memory with the server, which is said once.
  const std::string shared =
      "cannot be moved to another server: it shares memory with this one (transport shm)";
  bench.until([&] { return told() == std::vector{shared}; });
  CHECK(one.order('H').wait(bench.io.waitScope) == "told");
  CHECK(two.order('H').wait(bench.io.waitScope) == "told");
  bench.until([&] { return told().size() == 3; });
  CHECK(told()[0] == "cannot be moved: its code is strange");
  CHECK(told()[1].starts_with("cannot be moved: xxxx"));
  CHECK(told()[1].size() < 200);
  CHECK(one.order('U').wait(bench.io.waitScope) == "told");
  CHECK(contains(two.order('q').wait(bench.io.waitScope), "client closed"));
  bench.until([&] { return told() == std::vector{shared}; });
  CHECK(contains(one.order('q').wait(bench.io.waitScope), "client closed"));
  bench.until([&] { return bench.seen.hindrances.empty(); });
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
                    "files:NUMBER and kill:NUMBER");
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
  REQUIRE(bench.open(two).empty());
  CHECK(one.order('L').wait(bench.io.waitScope).empty());
  CHECK(two.order('e').wait(bench.io.waitScope) == "e0");
  Environment nonsense("GPUPOOL_DISTURB", "move:");
  CHECK_THROWS_WITH(kj::heap<Front>(bench.io, ServerOptions{}),
                    "GPUPOOL_DISTURB: 'move:' is none of suspend:NUMBER, move:NUMBER, stream:NUMBER, "
                    "files:NUMBER and kill:NUMBER");
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
