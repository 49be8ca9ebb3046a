#pragma once
// The tool's programs against a manager and a server in this process, whose event loop turns while they run.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "catch.h"
#include "fake_server.h"
#include "pool-manager/service.h"
#include "serve_at.h"
#include "support.h"

namespace gpupool::test {

using namespace gpupool::pool;

struct Program {
  pid_t pid = -1;
  int output = -1;  // stdout and stderr
  std::string text;
  int status = -1;
  bool ended = false;

  void read() {
    char part[4096];
    for (ssize_t size; (size = ::read(output, part, sizeof part)) > 0;)
      text.append(part, static_cast<size_t>(size));
  }
  bool poll() {
    read();
    if (!ended && ::waitpid(pid, &status, WNOHANG) == pid) ended = true;
    if (ended) read();
    return ended;
  }
  int exitStatus() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }
  int signal() const { return WIFSIGNALED(status) ? WTERMSIG(status) : 0; }
  ~Program() {
    if (!ended && pid > 0) ::kill(pid, SIGKILL), ::waitpid(pid, nullptr, 0);
    if (output >= 0) ::close(output);
  }
};

struct ToolFixture {
  ToolFixture()
      : io(kj::setupAsyncIo()), store(makeMemoryStore()), address("unix:" + folder.path + "/manager.sock") {
    startManager();
    server = kj::heap<FakeServer>(io, "a", 1, folder.path + "/server");
    server->join(address);
    server->joined().wait(io.waitScope);
    ::mkdir((folder.path + "/lib").c_str(), 0700);
    std::ofstream(folder.path + "/lib/libcuda.so.1") << "not looked at";
    environment = {"PATH=/usr/bin:/bin",
                   "GPUPOOL_STATE=" + folder.path,
                   "GPUPOOL_LIBRARY_DIR=" + folder.path + "/lib",
                   "GPUPOOL_TTL=15s",  // a busy machine renews late
                   "LD_LIBRARY_PATH=/before",
                   "HOME=" + folder.path,
                   "LC_ALL=C"};
  }

  void startManager() {
    PoolTimes times;
    times.beatMs = 100;
    ServiceLimits limits;
    limits.tick = 10 * kj::MILLISECONDS;
    service = kj::heap<Service>(io.provider->getTimer(), *store, times, limits, bootTimeMs);
    housekeeping = serveAt(io, *service, folder.path + "/manager.sock");
  }
  void stopManager() {
    housekeeping = nullptr;
    service = nullptr;
  }

  [[noreturn]] void become(const std::vector<std::string>& words) {
    std::vector<char*> arguments, variables;
    for (const auto& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    for (const auto& entry : environment) variables.push_back(const_cast<char*>(entry.c_str()));
    arguments.push_back(nullptr);
    variables.push_back(nullptr);
    ::signal(SIGPIPE, SIG_DFL);  // KJ ignores it
    ::execve(arguments[0], arguments.data(), variables.data());
    ::_exit(99);
  }
  void start(Program& program, const std::vector<std::string>& words) {
    int pipe[2];
    REQUIRE(::pipe2(pipe, O_CLOEXEC) == 0);
    program.pid = ::fork();
    if (program.pid == 0) {
      ::dup2(pipe[1], 1);
      ::dup2(pipe[1], 2);
      become(words);
    }
    ::close(pipe[1]);
    program.output = pipe[0];
    ::fcntl(pipe[0], F_SETFL, O_NONBLOCK);
  }
  void pause(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }
  bool until(const std::function<bool()>& condition, int ms = 8000) {
    for (; ms > 0; ms -= 5) {
      if (condition()) return true;
      pause(5);
    }
    return condition();
  }
  void finish(Program& program) {
    REQUIRE(until([&] { return program.poll(); }));
  }
  // `gpupool run WORDS` to its end.
  void run(Program& program, std::vector<std::string> words) {
    words.insert(words.begin(), {TOOL, "run"});
    start(program, words);
    finish(program);
  }
  bool free() { return server->leases.empty() && service->pool().leases().empty(); }
  // The manager has taken the lease back when the wrapper returns; the server hears of it a moment later.
  bool soonFree() {
    return until([&] { return free(); });
  }
  // What `gpupool WORDS` prints; it ends with that status.
  std::string tool(int status, const std::vector<std::string>& words) {
    std::vector<std::string> all = {TOOL};
    all.insert(all.end(), words.begin(), words.end());
    Program program;
    start(program, all);
    REQUIRE(until([&] { return program.poll(); }, 20'000));
    INFO(program.text);
    CHECK(program.exitStatus() == status);
    return program.text;
  }
  std::string said(const std::vector<std::string>& words) { return tool(0, words); }
  // The server comes back, and leases so much of its memory.
  void overcommit(uint32_t percent) {
    server->disconnect();
    server->facts.incarnation = Id::random();
    server->facts.overcommitPercent = percent;
    server->join(address);
    server->joined().wait(io.waitScope);
  }
  // The pid that `application sleep` printed.
  pid_t sleeper(Program& program) {
    REQUIRE(until([&] {
      program.poll();
      return contains(program.text, "ready ") && program.text.back() == '\n';
    }));
    return static_cast<pid_t>(std::stol(program.text.substr(program.text.find("ready ") + 6)));
  }

  Folder folder;
  kj::AsyncIoContext io;
  std::unique_ptr<Store> store;
  std::string address;
  kj::Own<Service> service;
  kj::Promise<void> housekeeping = nullptr;
  kj::Own<FakeServer> server;
  std::vector<std::string> environment;
};

}  // namespace gpupool::test
