// gpupool-server as a process: its death and its signals.
#include <signal.h>
#include <sys/wait.h>

#include "schema/protocol.h"
#include "server/front/front.h"
#include "server/tests/support.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

struct ServerProcess {
  Folder folder;
  pid_t pid = -1;

  explicit ServerProcess(const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {SERVER_PROGRAM, "--manager", "unix:" + folder.path + "/manager.sock",
                                      "--name",       kServer,     "--state",
                                      folder.path,    "--local",   local(),
                                      "--driver",     FAKE_DRIVER, "--worker",
                                      FAKE_WORKER,    "--warm",    "1"};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<char*> list;
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
class Granter final : public schema::Manager::Server {
 public:
  explicit Granter(bool& granted) : granted_(granted) {}

 protected:
  kj::Promise<void> login(LoginContext context) override {  // no token is needed
    context.getResults().setProtocol(schema::poolProtocol());
    return kj::READY_NOW;
  }
  kj::Promise<void> join(JoinContext context) override {
    auto control = context.getParams().getControl();
    context.getResults().setBeatMs(50);
    auto request = control.grantRequest();
    fillLease(request.initLease(), {1, 1}, 1, {0, 1});
    kept_ = request.send().ignoreResult().then([this] { granted_ = true; }).eagerlyEvaluate(nullptr);
    return kj::READY_NOW;
  }
  kj::Promise<void> beat(BeatContext context) override {
    context.getResults().setKnown(true);
    return kj::READY_NOW;
  }
  kj::Promise<void> leave(LeaveContext) override { return kj::READY_NOW; }

 private:
  bool& granted_;
  kj::Promise<void> kept_ = nullptr;
};

struct Bench : kj::TaskSet::ErrorHandler {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  bool granted = false;
  ServerProcess process;
  LocalListener listener{*io.lowLevelProvider, process.folder.path + "/manager.sock"};
  capnp::TwoPartyServer manager{kj::heap<Granter>(granted)};
  kj::TaskSet tasks{*this};
  Opening opening;

  Bench() {
    tasks.add(manager.listen(listener.receiver()));
    until([&] { return granted; });
    auto address = io.provider->getNetwork().parseAddress("unix:" + process.local()).wait(io.waitScope);
    opening.run(address->connect().wait(io.waitScope)).wait(io.waitScope);
    REQUIRE(opening.error == "");
  }
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }
  void taskFailed(kj::Exception&&) override {}
};

}  // namespace

TEST_CASE("when the server is killed its workers end within two seconds and tell their clients") {
  Bench bench;
  const pid_t session = std::stoi(bench.opening.order('p').wait(bench.io.waitScope));
  const auto workers = children(bench.process.pid);
  CHECK(workers.size() >= 1);
  const auto began = std::chrono::steady_clock::now();
  kill(bench.process.pid, SIGKILL);
  bench.process.wait();
  CHECK(contains(bench.opening.hear().wait(bench.io.waitScope), "stop: the GPU server"));
  bench.until([&] {
    for (pid_t pid : workers)
      if (alive(pid)) return false;
    return !alive(session);
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  CHECK(took.count() < 2.0);
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
