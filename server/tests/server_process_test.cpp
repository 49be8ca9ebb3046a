// gpupool-server as a process: its death and its signals.
#include <signal.h>
#include <sys/wait.h>

#include "schema/convert.h"
#include "schema/protocol.h"
#include "server/front/front.h"
#include "server/tests/support.h"

#include "catch.h"
#include "pace.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

struct ServerProcess {
  std::shared_ptr<Folder> kept;
  Folder& folder;
  pid_t pid = -1;

  explicit ServerProcess(const std::vector<std::string>& more = {},
                         std::shared_ptr<Folder> at = std::make_shared<Folder>())
      : kept(std::move(at)), folder(*kept) {
    std::vector<std::string> words = {SERVER_PROGRAM,
                                      "--manager",
                                      "unix:" + folder.path + "/manager.sock",
                                      "--name",
                                      kServer,
                                      "--state",
                                      folder.path,
                                      "--local",
                                      local(),
                                      "--driver",
                                      FAKE_DRIVER,
                                      "--worker",
                                      FAKE_WORKER,
                                      "--warm",
                                      "1",
                                      "--device-locks",
                                      folder.path,
                                      "--walls",
                                      "off"};  // the worker is none
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> list;
    list.reserve(words.size() + 1);
    for (auto& word : words) list.push_back(word.data());
    list.push_back(nullptr);
    pid = fork();
    if (pid == 0) {
      execv(SERVER_PROGRAM, list.data());
      _exit(127);
    }
  }
  ~ServerProcess() {
    if (pid < 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  std::string local() const { return folder.path + "/server.sock"; }
  int wait() {
    int status = 0;
    waitpid(pid, &status, 0);
    pid = -1;
    return status;
  }
};

// As a manager would: grants, and keeps the connection.
struct Told {
  bool granted = false;
  std::string refusal;
  std::vector<std::string> problems;
  std::vector<uint64_t> epochs;
  std::vector<std::vector<Id>> running;
  std::vector<std::pair<Id, uint64_t>> readopted;
  unsigned joins = 0;
  uint64_t epoch = 1;                    // of the next grant
  bool revoke = false, revoked = false;  // of lease 1
};

class Granter final : public schema::Manager::Server {
 public:
  explicit Granter(Told& told) : told_(told) {}

 protected:
  kj::Promise<void> login(LoginContext context) override {  // no token is needed
    context.getResults().setProtocol(schema::poolProtocol());
    return kj::READY_NOW;
  }
  kj::Promise<void> join(JoinContext context) override {
    auto control = context.getParams().getControl();
    context.getResults().setBeatMs(50);
    read(context.getParams());
    auto request = control.grantRequest();
    fillLease(request.initLease(), {1, told_.epoch}, told_.epoch, {0, 1});
    kept_ = request.send()
                .ignoreResult()
                .then([this] { told_.granted = true; },
                      [this](kj::Exception&& error) { told_.refusal = error.getDescription().cStr(); })
                .eagerlyEvaluate(nullptr);
    if (!told_.revoke) return kj::READY_NOW;
    auto revoke = control.revokeRequest();
    schema::write(Id{1, 1}, revoke.initId());
    revoked_ = revoke.send().ignoreResult().then([this] { told_.revoked = true; }).eagerlyEvaluate(nullptr);
    return kj::READY_NOW;
  }
  void read(schema::Manager::JoinParams::Reader join) {
    told_.problems.clear();
    for (auto device : join.getInfo().getDevices()) told_.problems.push_back(device.getProblem().cStr());
    told_.epochs.clear();
    told_.running.clear();
    told_.readopted.clear();
    for (auto one : join.getReadopted())
      told_.readopted.emplace_back(schema::read(one.getId()), one.getDeviceEpoch());
    ++told_.joins;
    for (auto report : join.getReports()) {
      told_.epochs.push_back(report.getHighestEpoch());
      auto& ids = told_.running.emplace_back();
      for (auto id : report.getRunning()) ids.push_back(schema::read(id));
    }
  }
  kj::Promise<void> beat(BeatContext context) override {
    told_.problems.clear();
    for (auto problem : context.getParams().getProblems()) told_.problems.push_back(problem.cStr());
    context.getResults().setKnown(true);
    return kj::READY_NOW;
  }
  kj::Promise<void> leave(LeaveContext) override { return kj::READY_NOW; }

 private:
  Told& told_;
  kj::Promise<void> kept_ = nullptr, revoked_ = nullptr;
};

struct Bench : kj::TaskSet::ErrorHandler {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  Told told;
  ServerProcess process;
  LocalListener listener{*io.lowLevelProvider, process.folder.path + "/manager.sock"};
  capnp::TwoPartyServer manager{kj::heap<Granter>(told)};
  kj::TaskSet tasks{*this};
  Opening opening;

  explicit Bench(const std::vector<std::string>& more = {}) : process(more) {
    tasks.add(manager.listen(listener.receiver()));
    until([&] { return told.granted; });
    auto address = io.provider->getNetwork().parseAddress("unix:" + process.local()).wait(io.waitScope);
    opening.run(address->connect().wait(io.waitScope)).wait(io.waitScope);
    REQUIRE(opening.error.empty());
  }
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }
  void taskFailed(kj::Exception&&) override {}
};

}  // namespace

TEST_CASE("when the server is killed its workers end within two seconds and tell their clients") {
  Bench bench({"--restart-time", "0"});
  const pid_t session = std::stoi(bench.opening.order('p').wait(bench.io.waitScope));
  const auto workers = children(bench.process.pid);
  CHECK_FALSE(workers.empty());
  const auto began = std::chrono::steady_clock::now();
  kill(bench.process.pid, SIGKILL);
  bench.process.wait();
  CHECK(contains(bench.opening.hear().wait(bench.io.waitScope),
                 "stop: the GPU server died: its process was killed"));
  bench.until([&] {
    for (pid_t pid : workers)
      if (alive(pid)) return false;
    return !alive(session);
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  CHECK(took.count() < 2.0 * gpupool::test::busy());
}

TEST_CASE("a killed server that comes back offers no device whose old worker still runs") {
  Bench bench;
  const pid_t session = std::stoi(bench.opening.order('p').wait(bench.io.waitScope));
  kill(session, SIGSTOP);  // it cannot end itself
  kill(bench.process.pid, SIGKILL);
  bench.process.wait();
  bench.told = {};
  bench.told.epoch = 2;
  bench.told.revoke = true;
  ServerProcess second({"--stop-time", "3s"}, bench.process.kept);
  bench.until([&] { return !bench.told.refusal.empty() || bench.told.granted; });
  CHECK(alive(session));
  CHECK_FALSE(bench.told.revoked);
  CHECK(bench.told.epochs == std::vector<uint64_t>{1, 1});
  CHECK(bench.told.running == std::vector<std::vector<Id>>{{{1, 1}}, {{1, 1}}});
  CHECK(contains(bench.told.refusal, ("worker " + std::to_string(session)).c_str()));
  CHECK(contains(bench.told.refusal, "still runs"));
  // Killed at last, and only then its lease is revoked and the devices are free.
  bench.until([&] { return bench.told.revoked; });
  CHECK_FALSE(alive(session));
  bench.until([&] { return bench.told.problems == std::vector<std::string>{"", ""}; });
  CHECK_FALSE(alive(session));
}

TEST_CASE("a killed server that comes back goes on with its sessions, as often as that happens") {
  Bench bench;
  auto& opening = bench.opening;
  const auto ask = [&](char order) { return opening.order(order).wait(bench.io.waitScope); };
  const std::string session = ask('p');
  CHECK(ask('m') == "taken, others have 0 MiB");
  std::optional<ServerProcess> next;
  for (uint64_t life = 2; life < 5; ++life) {
    ServerProcess& before = next ? *next : bench.process;
    kill(before.pid, life == 4 ? SIGUSR2 : SIGKILL);
    before.wait();
    CHECK(ask('p') == session);       // without a server
    auto asked = opening.order('m');  // of whichever server answers
    bench.told = {};
    bench.told.epoch = life;
    next.emplace(std::vector<std::string>{}, bench.process.kept);
    bench.until([&] { return bench.told.joins != 0; });
    REQUIRE(bench.told.readopted.size() == life - 1);  // and those without a session that were granted since
    CHECK(bench.told.readopted[0] == std::pair(Id{1, 1}, uint64_t{1}));
    CHECK(bench.told.running == std::vector<std::vector<Id>>{{{1, 1}}, {{1, 1}}});
    CHECK(asked.wait(bench.io.waitScope) == "refused, others have 0 MiB");  // it has 600 of 1024 MiB
    bench.until(
        [&] { return bench.told.granted && bench.told.problems == std::vector<std::string>{"", ""}; });
  }
  CHECK(ask('g') == "given");
  CHECK(ask('m') == "taken, others have 0 MiB");
  kill(next->pid, SIGTERM);
  CHECK(opening.hear().wait(bench.io.waitScope) == "stop: the GPU server is shutting down");
  CHECK(next->wait() == 0);
  CHECK_FALSE(alive(std::stoi(session)));
  CHECK_FALSE(std::filesystem::exists(bench.process.folder.path + "/server-" + kServer + ".doors"));
}

TEST_CASE("what sessions share goes on with them, as often as their server is killed") {
  Bench bench;
  const auto begin = [&](uint64_t number) {
    auto session = kj::heap<Opening>();
    session->session = {2, number};
    auto address = bench.io.provider->getNetwork().parseAddress("unix:" + bench.process.local());
    auto connection = address.wait(bench.io.waitScope)->connect().wait(bench.io.waitScope);
    session->run(kj::mv(connection)).wait(bench.io.waitScope);
    REQUIRE(session->error == "");
    return session;
  };
  const auto said = [&](Opening& session, const std::string& order) {
    session.stream->write(order.data(), order.size()).wait(bench.io.waitScope);
    return session.hear().wait(bench.io.waitScope);
  };
  std::optional<ServerProcess> next;
  uint64_t life = 1;
  const auto killServer = [&] {
    ServerProcess& before = next ? *next : bench.process;
    kill(before.pid, SIGKILL);
    before.wait();
    bench.told = {};
    bench.told.epoch = ++life;
    next.emplace(std::vector<std::string>{}, bench.process.kept);
    bench.until([&] { return bench.told.granted; });
  };
  Opening& owner = bench.opening;
  auto guest = begin(3);
  REQUIRE(said(owner, "m") == "taken, others have 0 MiB");
  const std::string token = said(owner, "O");
  REQUIRE(said(*guest, "I" + token) == "opened at 0");
  killServer();
  // What is asked before all have said what they share waits until they have.
  const pid_t slow = static_cast<pid_t>(std::stoi(said(owner, "p")));
  kill(slow, SIGSTOP);
  const std::string order = "I" + token;
  kill(next->pid, SIGKILL);
  next->wait();
  guest->stream->write(order.data(), order.size()).wait(bench.io.waitScope);
  bench.told = {};
  bench.told.epoch = ++life;
  next.emplace(std::vector<std::string>{}, bench.process.kept);
  bench.timer.afterDelay(300 * kj::MILLISECONDS).wait(bench.io.waitScope);
  kill(slow, SIGCONT);
  CHECK(guest->hear().wait(bench.io.waitScope) == "opened at 0");
  bench.until([&] { return bench.told.granted; });
  auto late = begin(4);
  CHECK(said(*late, "I" + token) == "opened at 0");  // what was offered two lives ago
  CHECK(said(*late, "X") == "told");
  CHECK(said(*late, "m") == "refused, others have 600 MiB");
  // Its owner dies: it is the lease's still, for as long as the guest has it.
  kill(static_cast<pid_t>(std::stoi(said(owner, "p"))), SIGKILL);
  CHECK(contains(owner.hear().wait(bench.io.waitScope), "the worker has ended"));  // no child of that server
  CHECK(said(*late, "I" + token) == "refused 1");
  CHECK(said(*late, "m") == "refused, others have 600 MiB");
  killServer();
  CHECK(said(*late, "m") == "refused, others have 600 MiB");
  CHECK(said(*guest, "q") != "");  // and with it both that it has opened
  std::string now;
  bench.until([&] { return (now = said(*late, "m")) != "refused, others have 600 MiB"; });
  CHECK(now == "taken, others have 0 MiB");
}

TEST_CASE("SIGTERM ends the sessions and the workers and leaves no file") {
  Bench bench;
  const pid_t session = std::stoi(bench.opening.order('p').wait(bench.io.waitScope));
  kill(bench.process.pid, SIGTERM);
  CHECK(bench.opening.hear().wait(bench.io.waitScope) == "stop: the GPU server is shutting down");
  bench.until([&] {
    siginfo_t info{};
    waitid(P_PID, bench.process.pid, &info, WEXITED | WNOHANG | WNOWAIT);
    return info.si_pid != 0;
  });
  CHECK(bench.process.wait() == 0);
  CHECK_FALSE(alive(session));
  CHECK_FALSE(std::filesystem::exists(bench.process.local()));
}

TEST_CASE("SIGTERM ends a server whose inventory never comes") {
  ServerProcess process({"--driver", "/nonexistent/libcuda.so.1"});
  usleep(300 * 1000);
  CHECK(alive(process.pid));
  kill(process.pid, SIGTERM);
  CHECK(process.wait() == 0);
}

TEST_CASE("wrong options end the server with what is wrong") {
  ServerProcess process({"--warm", "many"});
  const int status = process.wait();
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 2);
}
