#pragma once
// A worker's shell in a forked child, since its watcher may end the process, and this test as its server.

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <set>
#include <span>
#include <string>

#include "base/descriptor_passing.h"
#include "schema/worker.capnp.h"
#include "server/worker_process.h"

#include "catch.h"

namespace gpupool::server::test {

// The server's end, and a child that runs `body` on the other.
struct Worker {
  int socket = -1;
  pid_t pid = -1;

  explicit Worker(const std::function<int(WorkerProcess&)>& body) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    socket = ends[0];
    pid = fork();
    if (pid == 0) {
      signal(SIGTERM, SIG_DFL);  // Catch2's handler is not the worker's
      close(ends[0]);
      for (int other : serverEnds()) close(other);  // or their workers would never see the end-of-file
      int status = 99;
      try {
        WorkerProcess process(ends[1], 7);
        status = body(process);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "worker: %s\n", error.what());
        status = 98;
      }
      _exit(status);
    }
    close(ends[1]);
    serverEnds().insert(socket);
  }
  ~Worker() {
    if (socket >= 0) hangUp();
    if (pid < 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  static std::set<int>& serverEnds() {
    static std::set<int> ends;
    return ends;
  }
  void hangUp() {
    serverEnds().erase(socket);
    close(socket);
    socket = -1;
  }
  // The exit status, or minus the signal.
  int wait() {
    int status = 0;
    waitpid(pid, &status, 0);
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  // What the next report is: "ready", "ended: <text>", ...
  std::string report() {
    capnp::word buffer[1024];
    const ssize_t bytes = recv(socket, buffer, sizeof buffer, 0);
    if (bytes <= 0) return "nothing";
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(buffer, bytes / sizeof(capnp::word)));
    const auto report = reader.getRoot<schema::WorkerReport>();
    if (report.getRowsHash() != 7) return "other rows";
    if (report.isReady()) return std::string("ready ") + report.getDriver().cStr();
    if (report.isEnded()) return std::string("ended: ") + report.getEnded().cStr();
    if (report.isFailed()) return std::string("failed: ") + report.getFailed().cStr();
    if (report.isRebuilt()) return std::string("rebuilt: ") + report.getRebuilt().cStr();
    if (report.isMoved()) {
      const auto moved = report.getMoved();
      return std::string("moved: ") + moved.getError().cStr() + " " + std::to_string(moved.getMovedBytes()) +
             " " + std::to_string(moved.getDrainMs()) + " " + std::to_string(moved.getPauseMs());
    }
    if (report.isSuspended()) return report.getSuspended().getSuspended() ? "suspended" : "not suspended";
    return "devices";
  }
  struct Memory {
    uint64_t ticket = 0, take = 0, give = 0;
    uint32_t place = 0;
  };
  Memory memory() {
    capnp::word buffer[1024];
    const ssize_t bytes = recv(socket, buffer, sizeof buffer, 0);
    REQUIRE(bytes > 0);
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(buffer, bytes / sizeof(capnp::word)));
    const auto report = reader.getRoot<schema::WorkerReport>();
    REQUIRE(report.isMemory());
    const auto request = report.getMemory();
    return {request.getTicket(), request.getTake(), request.getGive(), request.getPlace()};
  }
  void send(std::span<const std::byte> bytes, std::span<const int> descriptors = {}) {
    REQUIRE(sendWithDescriptors(socket, bytes, descriptors) == static_cast<ssize_t>(bytes.size()));
  }
  void send(capnp::MessageBuilder& message, std::span<const int> descriptors = {}) {
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = words.asBytes();
    send(std::as_bytes(std::span(bytes.begin(), bytes.size())), descriptors);
  }
  void send(capnp::MessageBuilder& message, int descriptor) { send(message, std::span(&descriptor, 1)); }
  void order(const char* stop) {
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().setStop(stop);
    send(message);
  }
};

}  // namespace gpupool::server::test
