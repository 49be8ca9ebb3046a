// gpupool-spawner, asked as the server asks it, and as the server must not be able to. Most of it takes root.
#include <fcntl.h>
#include <kj/debug.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>

#include "base/descriptor_passing.h"
#include "base/options.h"
#include "catch.h"
#include "server/front/spawner_parent.h"
#include "server/front/user_lock.h"
#include "server/spawner/become_worker.h"

using namespace gpupool;
using namespace gpupool::server;

namespace {

constexpr UserRange kUsers{1'910'000'000, 1'910'000'015};

struct Folder {
  Folder() {
    char name[] = "/tmp/gpupool-spawner-XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// What a second server is told; "": it may have the range. In another process, as the lock wants it.
std::string secondServer(const std::string& folder, const UserRange& users) {
  int ends[2];
  KJ_SYSCALL(pipe2(ends, O_CLOEXEC));
  const pid_t pid = fork();
  if (pid == 0) {
    std::string said;
    try {
      const UserLock lock(folder, users);
    } catch (const options::OptionError& error) {
      said = error.what();
    }
    _exit(write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string said(1024, '\0');
  said.resize(static_cast<size_t>(std::max<ssize_t>(read(ends[0], said.data(), said.size()), 0)));
  close(ends[0]);
  int status = -1;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  REQUIRE(status == 0);
  return said;
}

bool isRoot() { return geteuid() == 0; }

int shell() {
  static const kj::AutoCloseFd file(open("/bin/sh", O_PATH | O_CLOEXEC));
  return file;
}

// A shell as a worker: what it writes to its control socket.
struct Started {
  WorkerParent::Process process;
  kj::AutoCloseFd ours;

  std::string said() const {
    char text[4096];
    const ssize_t bytes = read(ours, text, sizeof text);
    return {text, static_cast<size_t>(std::max<ssize_t>(bytes, 0))};
  }
};

Started start(WorkerParent& parent, const std::string& command) {
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
  const kj::AutoCloseFd theirs(ends[1]);
  return {parent.start(shell(), {"/bin/sh", "-c", command}, {"GIVEN=yes"}, theirs), kj::AutoCloseFd(ends[0])};
}

bool gone(int process) {
  pollfd ended{process, POLLIN, 0};
  return poll(&ended, 1, 0) == 1;
}

// Reaped when it is gone, within 20 s; -2: it is not.
int statusOf(WorkerParent& parent, const Started& one) {
  for (int tries = 0; tries < 20'000; ++tries) {
    if (const int status = parent.reap(one.process.pid); status >= 0) return status;
    usleep(1000);
  }
  return -2;
}

// Under that user id, until it is killed.
class Bystander {
 public:
  explicit Bystander(uid_t user) {
    int ready[2];
    KJ_SYSCALL(pipe2(ready, O_CLOEXEC));
    KJ_SYSCALL(pid_ = fork());
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (setresgid(user, user, user) != 0 || setresuid(user, user, user) != 0 || write(ready[1], "", 1) != 1)
        _exit(1);
      for (;;) pause();
    }
    close(ready[1]);
    char byte = 0;
    REQUIRE(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    KJ_SYSCALL(process_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  }
  ~Bystander() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(process_);
  }
  pid_t pid() const { return pid_; }
  int process() const { return process_; }
  bool lives() const { return !gone(process_); }

 private:
  pid_t pid_ = -1;
  int process_ = -1;
};

// The spawner without the class that asks it.
class Raw {
 public:
  Raw() {
    int ends[2];
    KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
    socket_ = kj::AutoCloseFd(ends[0]);
    const kj::AutoCloseFd theirs(ends[1]);
    KJ_SYSCALL(pid_ = fork());
    if (pid_ == 0) {
      dup2(theirs, kSpawnerSocket);
      if (theirs.get() == kSpawnerSocket) fcntl(theirs, F_SETFD, 0);
      execl(SPAWNER, SPAWNER, "--users", kUsers.text().c_str(), nullptr);
      _exit(127);
    }
    REQUIRE(hear().error == 0);
  }
  ~Raw() {
    socket_ = nullptr;
    waitpid(pid_, nullptr, 0);
  }
  SpawnerAnswer ask(std::span<const std::byte> bytes, const std::vector<int>& descriptors = {}) {
    REQUIRE(sendWithDescriptors(socket_, bytes, descriptors) == static_cast<ssize_t>(bytes.size()));
    return hear();
  }
  SpawnerAnswer ask(const SpawnerRequest& request, const std::vector<int>& descriptors = {}) {
    return ask(std::as_bytes(std::span(&request, 1)), descriptors);
  }

 private:
  SpawnerAnswer hear() {
    SpawnerAnswer answer;
    const auto received = receiveWithDescriptors(socket_, std::as_writable_bytes(std::span(&answer, 1)));
    for (const int one : received.descriptors) close(one);
    REQUIRE(received.bytes == sizeof answer);
    return answer;
  }
  pid_t pid_ = -1;
  kj::AutoCloseFd socket_;
};

kj::AutoCloseFd memory(std::string_view bytes) {
  kj::AutoCloseFd file(memfd_create("texts", MFD_CLOEXEC));
  REQUIRE(write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  return file;
}

}  // namespace

TEST_CASE("a range of user ids") {
  const auto range = parseUserRange("2000000000-2000001023");
  REQUIRE(range);
  CHECK(range->count() == 1024);
  CHECK(range->group() == 2'000'000'000);
  CHECK(range->text() == "2000000000-2000001023");
  CHECK(parseUserRange("65536-65536"));
  for (const char* wrong :
       {"", "5", "0-5", "65535-65540", "70000-69999", "70000-", "-70000", "70000-70001 ", "70000-x",
        "65536-200000", "2000000000-4294967295", "70000-99999999999", "+70000-70001"})
    CHECK_FALSE(parseUserRange(wrong));
}

TEST_CASE("without the right to change user ids the spawner does not start") {
  if (!isRoot()) {
    CHECK_THROWS(SpawnerParent(SPAWNER, kUsers));
    return;
  }
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    if (setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0) try {
        SpawnerParent(SPAWNER, kUsers);
      } catch (const kj::Exception&) {
        refused = true;
      }
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("each worker has a user of its own, the workers' group, and no capability") {
  if (!isRoot()) return;
  SpawnerParent parent(SPAWNER, kUsers);
  const std::string command =
      "echo $(id -u) $(id -g) $(grep -h '^Cap[PEA]' /proc/self/status | cut -f 2 | sort -u) $(umask) $GIVEN "
      ">&3; read x <&3";
  std::vector<std::string> users;
  std::vector<Started> workers;
  for (int i = 0; i < 3; ++i) {
    workers.push_back(start(parent, command));
    std::istringstream words(workers.back().said());
    std::string user, group, capabilities, mask, given, more;
    words >> user >> group >> capabilities >> mask >> given >> more;
    CHECK(kUsers.has(static_cast<uid_t>(std::stoul(user))));
    CHECK(group == std::to_string(kUsers.group()));
    CHECK(capabilities == "0000000000000000");
    CHECK(mask == "0007");
    CHECK(given == "yes");
    CHECK(more.empty());
    CHECK(std::find(users.begin(), users.end(), user) == users.end());
    users.push_back(user);
  }
  for (const Started& worker : workers) {
    CHECK(parent.reap(worker.process.pid) == -1);  // it runs
    parent.kill(worker.process.pid);
    const int status = statusOf(parent, worker);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGKILL);
  }
  const Started last = start(parent, "exit 5");
  const int status = statusOf(parent, last);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 5);
}

TEST_CASE("a user id is given again when nothing runs under it, and more than there are is refused") {
  if (!isRoot()) return;
  SpawnerParent parent(SPAWNER, {kUsers.first, kUsers.first});
  {
    // What it leaves behind is in another session and process group.
    const Started worker = start(parent, "setsid sh -c 'echo $$ >&3; exec sleep 1000' & read x <&3");
    const auto left = static_cast<pid_t>(std::stol(worker.said()));
    const int sleeping = static_cast<int>(syscall(SYS_pidfd_open, left, 0));
    REQUIRE(sleeping >= 0);
    const kj::AutoCloseFd closing(sleeping);
    CHECK_THROWS_WITH(start(parent, "true"),
                      Catch::Matchers::Contains("every user id of --worker-users is in use"));
    parent.kill(worker.process.pid);
    CHECK(statusOf(parent, worker) >= 0);
    CHECK_FALSE(gone(sleeping));
    const Started next = start(parent, "true");
    CHECK(gone(sleeping));
    CHECK(statusOf(parent, next) == 0);
  }
}

TEST_CASE("the workers end with the spawner, and the spawner with the server's end of the socket") {
  if (!isRoot()) return;
  kj::AutoCloseFd process;
  {
    SpawnerParent parent(SPAWNER, kUsers);
    Started worker = start(parent, "echo up >&3; sleep 1000");
    CHECK(worker.said() == "up\n");
    process = kj::mv(worker.process.descriptor);
    CHECK_FALSE(gone(process));
  }
  for (int tries = 0; tries < 20'000 && !gone(process); ++tries) usleep(1000);
  CHECK(gone(process));
}

TEST_CASE("a worker that is to outlive the spawner does, and keeps its user id under the next one") {
  if (!isRoot()) return;
  const UserRange own{kUsers.first + 8, kUsers.first + 11};  // no other test has had these
  Started worker;
  {
    SpawnerParent parent(SPAWNER, own);
    worker = start(parent, "trap '' HUP; echo up >&3; exec sleep 1000");
    CHECK(worker.said() == "up\n");
    parent.outlive(worker.process.pid);
  }
  CHECK_FALSE(gone(worker.process.descriptor));
  SpawnerParent next(SPAWNER, own);
  next.spare(worker.process.descriptor);
  for (int i = 0; i < 3; ++i) {  // the first id is the worker's
    const Started another = start(next, "id -u >&3");
    CHECK(another.said() == std::to_string(own.first + 1 + static_cast<unsigned>(i)) + "\n");
    CHECK(statusOf(next, another) == 0);
  }
  CHECK_FALSE(gone(worker.process.descriptor));
  // From here on it is one of the next one's.
  next.adopt(worker.process.pid, kj::AutoCloseFd(fcntl(worker.process.descriptor, F_DUPFD_CLOEXEC, 0)));
  next.kill(worker.process.pid);
  pollfd end{worker.process.descriptor, POLLIN, 0};
  CHECK(poll(&end, 1, 20'000) == 1);
  CHECK(next.reap(worker.process.pid) == -1);
}

TEST_CASE("it signals workers, and nobody else") {
  if (!isRoot()) return;
  SpawnerParent parent(SPAWNER, kUsers);
  const Bystander ordinary(65'534), neighbour(kUsers.last + 1), earlier(kUsers.last);
  Raw raw;
  for (const Bystander* one : {&ordinary, &neighbour, &earlier}) {
    SpawnerRequest request;
    request.operation = SpawnerOperation::kill;
    request.pid = one->pid();
    CHECK(raw.ask(request).error == ESRCH);  // it has not started it
    request.operation = SpawnerOperation::reap;
    CHECK(raw.ask(request).error == ESRCH);
    request.operation = SpawnerOperation::killEarlier;
    request.pid = 0;
    CHECK(raw.ask(request, {one->process()}).error == (one == &earlier ? 0 : EPERM));
  }
  for (int tries = 0; tries < 20'000 && earlier.lives(); ++tries) usleep(1000);
  CHECK_FALSE(earlier.lives());
  CHECK(ordinary.lives());
  CHECK(neighbour.lives());
  for (const pid_t everybody : {-1, 0, 1}) {
    SpawnerRequest request;
    request.operation = SpawnerOperation::kill;
    request.pid = everybody;
    CHECK(raw.ask(request).error == ESRCH);
  }
}

TEST_CASE("a request that is none is refused, and the next one answered") {
  if (!isRoot()) return;
  Raw raw;
  SpawnerRequest request;
  const std::byte few[3]{};
  CHECK(raw.ask(few).error == EPROTO);
  std::byte many[sizeof request + 8]{};
  std::memcpy(many, &request, sizeof request);
  CHECK(raw.ask(many).error == EPROTO);
  CHECK(raw.ask(request).error == EPROTO);  // no operation
  request.magic = 1;
  request.operation = SpawnerOperation::kill;
  CHECK(raw.ask(request).error == EPROTO);
  request.magic = kSpawnerMagic;
  request.operation = SpawnerOperation::killEarlier;
  CHECK(raw.ask(request).error == EPROTO);
  const kj::AutoCloseFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK(raw.ask(request, {null}).error == EPERM);  // no process

  request.operation = SpawnerOperation::start;
  request.arguments = 1;
  CHECK(raw.ask(request, {shell(), null}).error == EPROTO);
  CHECK(raw.ask(request, {shell(), null, null}).error == EPROTO);  // an empty file
  using namespace std::string_view_literals;
  const auto texts = [&](std::string_view bytes, uint32_t arguments, uint32_t variables) {
    const kj::AutoCloseFd file = memory(bytes);
    request.arguments = arguments;
    request.variables = variables;
    return raw.ask(request, {shell(), null, file}).error;
  };
  CHECK(texts("/bin/sh"sv, 1, 0) == EPROTO);        // without its zero byte
  CHECK(texts("/bin/sh\0"sv, 0, 1) == EPROTO);      // no program
  CHECK(texts("/bin/sh\0"sv, 2, 0) == EPROTO);      // fewer than were said
  CHECK(texts("/bin/sh\0-c\0"sv, 1, 0) == EPROTO);  // more
  CHECK(texts("/bin/sh\0"sv, 1, 1) == EPROTO);
  CHECK(texts("/bin/sh\0"sv, 0xffff'ffff, 1) == EPROTO);
  CHECK(texts("/bin/sh\0-c\0true\0A=B\0"sv, 3, 1) == 0);
}

TEST_CASE("a range of user ids belongs to one server of the machine") {
  const Folder folder;
  {
    const UserLock mine(folder.path, {2'000'000'010, 2'000'000'019});
    CHECK(secondServer(folder.path, {2'000'000'000, 2'000'000'009}).empty());
    CHECK(secondServer(folder.path, {2'000'000'020, kLastWorkerUser}).empty());
    for (const UserRange& range :
         {UserRange{2'000'000'000, 2'000'000'010}, UserRange{2'000'000'019, 2'000'000'019},
          UserRange{2'000'000'000, 2'000'000'100}, UserRange{2'000'000'010, 2'000'000'019}})
      CHECK(secondServer(folder.path, range) ==
            "--worker-users " + range.text() +
                ": another gpupool-server of this machine has 2000000010-2000000019 (process " +
                std::to_string(getpid()) +
                ") of these user ids, and each would end the other's workers: name a range that no other "
                "server "
                "has");
  }
  CHECK(secondServer(folder.path, {2'000'000'010, 2'000'000'019}).empty());
}

TEST_CASE("without its lock a range of user ids is not taken") {
  const Folder folder;
  CHECK_THROWS_WITH(UserLock(folder.path + "/none", kUsers), Catch::Matchers::Contains("see --device-locks"));
  REQUIRE(mkfifo((folder.path + "/gpupool-worker-users.lock").c_str(), 0666) == 0);
  CHECK_THROWS_WITH(UserLock(folder.path, kUsers), Catch::Matchers::Contains("is no ordinary file"));
}
