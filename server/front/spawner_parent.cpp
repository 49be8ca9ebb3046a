#include "server/front/spawner_parent.h"

#include <fcntl.h>
#include <grp.h>
#include <kj/debug.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/capabilities.h"
#include "base/descriptor_passing.h"
#include "base/log.h"
#include "base/options.h"
#include "server/spawner/become_worker.h"

namespace gpupool::server {
namespace {

constexpr timeval kAnswerBound{10, 0};  // an answer takes a millisecond

kj::AutoCloseFd inMemory(const std::vector<std::string>& words, const std::vector<std::string>& variables) {
  std::string bytes;
  for (const auto* list : {&words, &variables})
    for (const std::string& text : *list) bytes.append(text.c_str(), text.size() + 1);
  int made;
  KJ_SYSCALL(made = memfd_create("worker", MFD_CLOEXEC));
  kj::AutoCloseFd file(made);
  ssize_t written;
  KJ_SYSCALL(written = pwrite(file, bytes.data(), bytes.size(), 0));
  KJ_REQUIRE(static_cast<size_t>(written) == bytes.size(), "no memory for a worker's arguments");
  return file;
}

// The workers' group becomes one of this process's: what it makes for them can be theirs.
void joinGroup(gid_t group) {
  std::vector<gid_t> groups = supplementaryGroups();
  if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  if (setgroups(groups.size(), groups.data()) == 0) return;
  throw options::OptionError(
      "--worker-users: this process may not change user ids: it needs the capabilities CAP_SETUID, "
      "CAP_SETGID and CAP_KILL (as root, or AmbientCapabilities= of its systemd unit)");
}

}  // namespace

std::unique_ptr<SpawnerParent> SpawnerParent::begin(const UserRange& users, const std::string& locks) {
  joinGroup(users.group());
  std::optional<UserLock> lock(std::in_place, locks, users);
  const auto beside = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "gpupool-spawner";
  std::unique_ptr<SpawnerParent> parent;
  try {
    parent = std::make_unique<SpawnerParent>(beside, users);
  } catch (const kj::Exception& error) {
    throw options::OptionError(std::string("--worker-users: ") + error.getDescription().cStr());
  }
  parent->lock_ = std::move(lock);
  KJ_ASSERT(keepCapabilities({}), "this process cannot give up its capabilities", strerror(errno));
  return parent;
}

SpawnerParent::SpawnerParent(const std::string& program, const UserRange& users) {
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  socket_ = kj::AutoCloseFd(ends[0]);
  kj::AutoCloseFd theirs(ends[1]);
  KJ_SYSCALL(setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &kAnswerBound, sizeof kAnswerBound));
  std::vector<std::string> words{program, "--users", users.text()};
  auto arguments = pointers(words);
  char* noVariables[] = {nullptr};
  KJ_SYSCALL(pid_ = fork());
  if (pid_ == 0) {
    if (theirs.get() == kSpawnerSocket)
      fcntl(theirs, F_SETFD, 0);
    else
      dup2(theirs, kSpawnerSocket);
    execve(arguments[0], arguments.data(), noVariables);
    _exit(kNotExecuted);
  }
  theirs = nullptr;  // the spawner's alone: its end is heard
  try {
    process_ = openProcess(pid_);
    const SpawnerAnswer ready = hear().words;
    KJ_REQUIRE(ready.error == 0, "gpupool-spawner cannot work", strerror(ready.error));
  } catch (const kj::Exception&) {
    ::kill(pid_, SIGKILL);
    const int status = waitFor(pid_);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNotExecuted)
      KJ_FAIL_REQUIRE("gpupool-spawner could not be executed", program);
    throw;
  }
}

SpawnerParent::~SpawnerParent() noexcept(false) {
  socket_ = nullptr;  // it ends then
  pollfd gone{process_, POLLIN, 0};
  if (poll(&gone, 1, static_cast<int>(kAnswerBound.tv_sec) * 1000) != 1) ::kill(pid_, SIGKILL);
  waitFor(pid_);
}

SpawnerParent::Answered SpawnerParent::hear() {
  Answered answered;
  const auto received =
      receiveWithDescriptors(socket_, std::as_writable_bytes(std::span(&answered.words, 1)), MSG_TRUNC);
  for (const int one : received.descriptors) answered.descriptor = kj::AutoCloseFd(one);
  KJ_REQUIRE(received.bytes == sizeof answered.words, "gpupool-spawner has ended, or does not answer");
  return answered;
}

SpawnerParent::Answered SpawnerParent::ask(const SpawnerRequest& request,
                                           const std::vector<int>& descriptors) {
  try {
    const ssize_t sent =
        sendWithDescriptors(socket_, std::as_bytes(std::span(&request, 1)), descriptors, MSG_DONTWAIT);
    KJ_REQUIRE(sent == sizeof request, "gpupool-spawner has ended, or does not answer", strerror(errno));
    return hear();
  } catch (const kj::Exception&) {
    // A later answer would be taken for the next one's; and without it no worker can be killed. Its workers
    // end with it, and this server (ended).
    ::kill(pid_, SIGKILL);
    throw;
  }
}

WorkerParent::Process SpawnerParent::start(int program, const std::vector<std::string>& words,
                                           const std::vector<std::string>& variables, int control) {
  const kj::AutoCloseFd texts = inMemory(words, variables);
  SpawnerRequest request;
  request.operation = SpawnerOperation::start;
  request.arguments = static_cast<uint32_t>(words.size());
  request.variables = static_cast<uint32_t>(variables.size());
  Answered answered = ask(request, {program, control, texts});
  if (answered.words.error == EUSERS)
    KJ_FAIL_REQUIRE("every user id of --worker-users is in use: make the range longer");
  if (answered.words.error != 0) KJ_FAIL_SYSCALL("gpupool-spawner", answered.words.error);
  KJ_REQUIRE(answered.descriptor.get() >= 0, "gpupool-spawner gave no process");
  return {answered.words.pid, kj::mv(answered.descriptor)};
}

void SpawnerParent::kill(pid_t pid) {
  if (killAdopted(pid)) return;
  SpawnerRequest request;
  request.operation = SpawnerOperation::kill;
  request.pid = pid;
  try {
    ask(request);
  } catch (const kj::Exception& error) {  // its workers end with it
    GPUPOOL_ERROR("worker %d cannot be killed: %s", pid, error.getDescription().cStr());
  }
}

int SpawnerParent::reap(pid_t pid) {
  if (reapAdopted(pid)) return -1;
  SpawnerRequest request;
  request.operation = SpawnerOperation::reap;
  request.pid = pid;
  try {
    const SpawnerAnswer answer = ask(request).words;
    return answer.error == 0 ? answer.status : -1;
  } catch (const kj::Exception&) {
    return -1;
  }
}

bool SpawnerParent::killEarlier(int process) {
  if (killBy(process)) return true;  // it was started without --worker-users
  SpawnerRequest request;
  request.operation = SpawnerOperation::killEarlier;
  try {
    return ask(request, {process}).words.error == 0;
  } catch (const kj::Exception&) {
    return false;
  }
}

void SpawnerParent::outlive(pid_t pid) {
  SpawnerRequest request;
  request.operation = SpawnerOperation::outlive;
  request.pid = pid;
  tell(request);
}

// One that is not of its user ids is none of its concern.
void SpawnerParent::spare(int process) {
  SpawnerRequest request;
  request.operation = SpawnerOperation::spare;
  tell(request, {process});
}

// A spawner that has ended is heard of elsewhere (ended).
void SpawnerParent::tell(const SpawnerRequest& request, const std::vector<int>& descriptors) {
  try {
    ask(request, descriptors);
  } catch (const kj::Exception& error) {
    GPUPOOL_ERROR("%s", error.getDescription().cStr());
  }
}

kj::Promise<void> SpawnerParent::ended(kj::UnixEventPort& port) {
  // The promise owns it, for this may live longer than the event port.
  auto observer =
      kj::heap<kj::UnixEventPort::FdObserver>(port, process_, kj::UnixEventPort::FdObserver::OBSERVE_READ);
  auto readable = observer->whenBecomesReadable();
  return readable.attach(kj::mv(observer)).then([]() -> kj::Promise<void> {
    return KJ_EXCEPTION(FAILED, "gpupool-spawner has ended: this server can start no worker any more");
  });
}

}  // namespace gpupool::server
