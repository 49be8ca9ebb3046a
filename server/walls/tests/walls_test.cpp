// What a worker that has been taken over can reach: hostile_worker, started as the server starts workers,
// once without walls, so that each attempt is seen to be a real one, and once behind them.
#include "server/walls/walls.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <kj/async-io.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>

#include "catch.h"
#include "server/front/spawner_parent.h"
#include "server/front/worker_child.h"
#include "server/walls/calls.h"

using namespace gpupool::server;
namespace fs = std::filesystem;

namespace {

alignas(16) char secret[16] = "nobody knows me";
constexpr uid_t kOrdinary = 65534;
constexpr UserRange kUsers{1'920'000'000, 1'920'000'015};

// A process with `secret` that waits for its end: the server, or a neighbour behind walls of its own.
class Victim {
 public:
  Victim(uid_t user, bool walled) {
    int ready[2];
    KJ_SYSCALL(pipe2(ready, O_CLOEXEC));
    KJ_SYSCALL(pid_ = fork());
    if (pid_ == 0) live(user, walled, ready[1]);
    close(ready[1]);
    char byte = 0;
    const bool began = read(ready[0], &byte, 1) == 1;
    close(ready[0]);
    REQUIRE(began);
  }
  ~Victim() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  [[noreturn]] static void live(uid_t user, bool walled, int ready) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (user != 0 && (setgid(user) != 0 || setuid(user) != 0)) _exit(1);
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    try {
      if (walled) walls::raise({walls::Mode::automatic, false, "", ""});
    } catch (const std::exception& error) {
      std::fprintf(stderr, "a neighbour: %s\n", error.what());
      _exit(1);
    }
    if (write(ready, "", 1) != 1) _exit(1);
    for (;;) pause();
  }
  pid_t pid_ = -1;
};

int listening(int family, const sockaddr* address, socklen_t bytes) {
  const int made = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  KJ_SYSCALL(bind(made, address, bytes));
  KJ_SYSCALL(listen(made, 16));
  return made;
}

struct Attempt {
  std::string wall, what;
  bool through;
};

class Bench {
 public:
  // users: workers have user ids of those, the neighbour has the last one.
  explicit Bench(uid_t user, std::optional<UserRange> users = {})
      : user_(user), server_(user, false), neighbour_(users ? users->last : user, true) {
    if (users) parent_ = std::make_unique<SpawnerParent>(SPAWNER, *users);
    char name[] = "/tmp/gpupool-walls-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    folder_ = name;
    for (const char* tenant : {"own", "other"}) {
      fs::create_directories(folder_ + "/cache/" + tenant);
      std::ofstream(folder_ + "/cache/" + tenant + "/image") << "code";
    }
    std::ofstream(folder_ + "/token") << "servers: secret\n";
    std::ofstream(folder_ + "/blank") << "full";
    listen();
    memory_ = "/dev/shm/gpupool-walls-" + std::to_string(port_);
    std::ofstream(memory_) << "tensors";
    chmod(memory_.c_str(), 0600);
    const uid_t neighbour = users ? users->last : user_;
    KJ_SYSCALL(chown(memory_.c_str(), neighbour, static_cast<gid_t>(-1)));
    if (user_ != 0) {
      KJ_SYSCALL(chown(folder_.c_str(), user_, user_));
      for (const auto& entry : fs::recursive_directory_iterator(folder_))
        KJ_SYSCALL(chown(entry.path().c_str(), user_, user_));
    }
    chmod((folder_ + "/token").c_str(), 0600);
    if (!users) return;
    chmod(folder_.c_str(), 0711);
    chmod((folder_ + "/cache").c_str(), 0711);
    for (const char* name : {"/cache/own", "/cache/other"}) {  // as WorkerStarts makes them
      KJ_SYSCALL(chown((folder_ + name).c_str(), 0, users->group()));
      chmod((folder_ + name).c_str(), 0770);
    }
  }
  ~Bench() {
    for (int socket : sockets_) close(socket);
    unlink(memory_.c_str());
    fs::remove_all(folder_);
  }

  // What the hostile worker reports of its attempts, and which walls it has.
  std::vector<Attempt> run(walls::Mode mode, std::vector<std::string>* standing = nullptr) {
    const std::vector<std::string> arguments{walls::nameOf(mode),
                                             folder_,
                                             std::to_string(server_.pid()),
                                             std::to_string(neighbour_.pid()),
                                             std::to_string(reinterpret_cast<uintptr_t>(secret)),
                                             std::to_string(port_),
                                             std::to_string(user_)};
    auto worker =
        WorkerChild::start(io_.unixEventPort, HOSTILE_WORKER, arguments, parent_ ? *parent_ : ownChildren());
    std::string table;
    for (;;) {
      auto maybe = worker->receive().wait(io_.waitScope);
      KJ_IF_MAYBE (message, maybe) {
        const auto report = (*message)->get();
        if (report.isFailed()) FAIL(report.getFailed().cStr());
        if (report.isReady() && standing != nullptr)
          for (auto wall : report.getWalls()) standing->push_back(wall.cStr());
        if (report.isEnded()) table = report.getEnded().cStr();
      } else {
        break;
      }
    }
    INFO(worker->exited().wait(io_.waitScope).text);
    REQUIRE(!table.empty());
    return parse(table);
  }

 private:
  void listen() {
    sockaddr_in inet{};
    inet.sin_family = AF_INET;
    inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sockets_.push_back(listening(AF_INET, reinterpret_cast<const sockaddr*>(&inet), sizeof inet));
    socklen_t bytes = sizeof inet;
    KJ_SYSCALL(getsockname(sockets_[0], reinterpret_cast<sockaddr*>(&inet), &bytes));
    port_ = ntohs(inet.sin_port);
    sockaddr_un local{};
    local.sun_family = AF_UNIX;
    std::snprintf(local.sun_path, sizeof local.sun_path, "%s/server.sock", folder_.c_str());
    sockets_.push_back(listening(AF_UNIX, reinterpret_cast<const sockaddr*>(&local), sizeof local));
    sockaddr_un abstract{};
    abstract.sun_family = AF_UNIX;
    const int length =
        std::snprintf(abstract.sun_path + 1, sizeof abstract.sun_path - 1, "gpupool-%d", port_);
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
    sockets_.push_back(listening(AF_UNIX, reinterpret_cast<const sockaddr*>(&abstract), bytes));
  }

  static std::vector<Attempt> parse(const std::string& table) {
    std::vector<Attempt> attempts;
    std::istringstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      const size_t first = line.find('|'), last = line.rfind('|');
      attempts.push_back({line.substr(0, first), line.substr(first + 1, last - first - 1),
                          line.substr(last + 1) == "through"});
    }
    return attempts;
  }

  std::unique_ptr<SpawnerParent> parent_;
  kj::AsyncIoContext io_ = kj::setupAsyncIo();
  uid_t user_;
  Victim server_, neighbour_;
  std::string folder_, memory_;
  int port_ = 0;
  std::vector<int> sockets_;
};

bool contains(const std::vector<std::string>& list, const std::string& one) {
  return std::find(list.begin(), list.end(), one) != list.end();
}

void compare(uid_t user) {
  Bench bench(user);
  const auto open = bench.run(walls::Mode::off);
  std::vector<std::string> standing;
  const auto walled = bench.run(walls::Mode::automatic, &standing);
  REQUIRE(open.size() == walled.size());
  CHECK(standing == walls::ofThisMachine(walls::Mode::automatic, user == geteuid() ? 0 : user).standing);
  std::printf("%-12s %-52s %-8s %s\n", "WALL",
              user == 0 ? "A WORKER OF ROOT" : "A WORKER OF AN ORDINARY USER", "WITHOUT", "WITH");
  size_t real = 0;
  for (size_t i = 0; i < walled.size(); ++i) {
    const Attempt& now = walled[i];
    std::printf("%-12s %-52s %-8s %s\n", now.wall.c_str(), now.what.c_str(),
                open[i].through ? "through" : "refused", now.through ? "through" : "refused");
    INFO(now.what);
    if (open[i].through) ++real;
    if (now.wall.empty()) CHECK(now.through);  // what it is for
    if (now.wall == "start" || contains(standing, now.wall)) CHECK_FALSE(now.through);
  }
  // Some systems refuse some of them to everybody.
  CHECK(real * 3 >= walled.size() * 2);
}

}  // namespace

TEST_CASE("a hostile worker reaches nothing but its own") { compare(geteuid() == 0 ? 0 : geteuid()); }

TEST_CASE("a hostile worker of an ordinary user reaches nothing but its own") {
  if (geteuid() == 0) compare(kOrdinary);
}

TEST_CASE(
    "a hostile worker with a user of its own reaches nothing of other users, and less behind the other "
    "walls") {
  if (geteuid() != 0) return;
  Bench bench(0, kUsers);
  std::vector<std::string> standing;
  size_t refused = 0;
  for (const Attempt& one : bench.run(walls::Mode::off)) {
    const auto says = [&](const char* words) { return one.what.find(words) != one.what.npos; };
    // Who a socket's signals go to may be named by everybody; whether they may be sent is asked when they
    // are.
    const bool others = (says(" the server") || says(" a neighbour") || says("token")) &&
                        !says("socket signal") && !says("ioctl signal");
    INFO(one.what);
    if (others) CHECK_FALSE(one.through);
    if (others) ++refused;
    if (one.wall.empty()) CHECK(one.through);
  }
  CHECK(refused >= 30);
  for (const Attempt& one : bench.run(walls::Mode::automatic, &standing)) {
    INFO(one.what);
    if (one.wall.empty()) CHECK(one.through);
    if (one.wall == "start" || one.wall == walls::kOwnUser || contains(standing, one.wall))
      CHECK_FALSE(one.through);
  }
  CHECK(standing == walls::ofThisMachine(walls::Mode::automatic, kUsers.last).standing);
}

TEST_CASE("where the kernel has no landlock, it is missing, and required walls are refused") {
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    walls::permitCalls(false);  // landlock's calls are not on the list: ENOSYS, as of an older kernel; and
                                // no process may be made
    const auto state = walls::ofThisMachine(walls::Mode::automatic);
    bool right = !contains(state.standing, "landlock") && contains(state.standing, "seccomp") &&
                 state.missing.size() == 2 &&
                 state.missing[0].starts_with("landlock: this kernel has none") &&
                 state.missing[1].starts_with("devices: this kernel or container lets this process make no ");
    try {
      walls::raise({walls::Mode::required, false, "", ""});
      right = false;
    } catch (const std::exception& error) {
      right = right && std::string(error.what()).starts_with("--walls required, and missing is landlock: ");
    }
    _exit(right ? 0 : 1);
  }
  int status = 1;
  KJ_SYSCALL(waitpid(child, &status, 0));
  CHECK(status == 0);
}

TEST_CASE("walls have names, and what is missing has a reason") {
  CHECK_FALSE(walls::modeNamed("on"));
  for (const char* name : {"off", "auto", "required", "log"})
    CHECK(walls::nameOf(*walls::modeNamed(name)) == name);
  const auto none = walls::ofThisMachine(walls::Mode::off);
  CHECK(none.standing.empty());
  CHECK(none.missing == std::vector<std::string>{"all: --walls is off"});
}
