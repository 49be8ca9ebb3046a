#include "server/spawner/spawner.h"

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

#include "base/capabilities.h"
#include "base/descriptor_passing.h"
#include "server/spawner/become_worker.h"

namespace gpupool::server {
namespace {

constexpr int kAlone = 0, kOccupied = 1;  // what a child under a user id says of that
constexpr int kSweeps = 20;
// Where no user id is free, all are tried again for so long: on a busy machine what was killed takes longer
// to end.
constexpr std::chrono::seconds kPatience{1};

// For children: system calls only. CAP_KILL first: a child that cannot become the user signals nobody.
bool becomeUser(uid_t user, const UserRange& users, const std::vector<gid_t>& groups) {
  constexpr int kChange[] = {CAP_SETUID, CAP_SETGID};
  if (!keepCapabilities(kChange) || setgroups(groups.size(), groups.data()) != 0 ||
      setresgid(users.group(), users.group(), users.group()) != 0 || setresuid(user, user, user) != 0 ||
      !keepCapabilities({}))
    return false;
  uid_t real = 0, effective = 0, saved = 0;
  return getresuid(&real, &effective, &saved) == 0 && real == user && effective == user && saved == user &&
         users.has(user);
}

std::vector<gid_t> groupsOfWorkers() {
  std::vector<gid_t> groups = supplementaryGroups();
  std::erase(groups, getegid());  // the server's own: its files are that one's
  std::erase(groups, gid_t{0});
  return groups;
}

// The texts of a memory file, and pointers to them: `arguments`, null, `variables`, null. Empty: they are not
// that many.
struct Texts {
  std::string bytes;
  std::vector<char*> arguments, variables;
};
bool read(int file, const SpawnerRequest& request, Texts& texts) {
  struct stat info{};
  if (request.arguments == 0 || request.arguments > kMostSpawnerTexts ||
      request.variables > kMostSpawnerTexts || fstat(file, &info) != 0 || info.st_size <= 0 ||
      static_cast<uint64_t>(info.st_size) > kMostSpawnerBytes)
    return false;
  texts.bytes.resize(static_cast<size_t>(info.st_size));
  if (pread(file, texts.bytes.data(), texts.bytes.size(), 0) != info.st_size || texts.bytes.back() != '\0')
    return false;
  size_t at = 0;
  const auto take = [&](uint32_t count, std::vector<char*>& list) {
    for (uint32_t i = 0; i < count && at < texts.bytes.size(); ++i) {
      list.push_back(texts.bytes.data() + at);
      at += std::strlen(list.back()) + 1;
    }
    const bool whole = list.size() == count;
    list.push_back(nullptr);
    return whole;
  };
  return take(request.arguments, texts.arguments) && take(request.variables, texts.variables) &&
         at == texts.bytes.size();
}

// Of a pidfd; it is asked while it is known to be this process's. 0: it is none of these.
uid_t userOf(int process, const UserRange& users) {
  std::ifstream about("/proc/self/fdinfo/" + std::to_string(process));
  pid_t pid = 0;
  for (std::string line; std::getline(about, line);)
    if (std::sscanf(line.c_str(), "Pid: %d", &pid) == 1) break;
  if (pid <= 0) return 0;
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  unsigned real = 0, effective = 0, saved = 0;
  for (std::string line; std::getline(status, line);)
    if (std::sscanf(line.c_str(), "Uid: %u %u %u", &real, &effective, &saved) == 3) break;
  const bool lives =
      syscall(SYS_pidfd_send_signal, process, 0, nullptr, 0) == 0;  // so the id was not another's
  return lives && users.has(real) && effective == real && saved == real ? real : 0;
}

}  // namespace

Spawner::Spawner(UserRange users) : users_(users), groups_(groupsOfWorkers()), next_(users.first) {
  constexpr int kKept[] = {CAP_SETUID, CAP_SETGID, CAP_KILL};
  if (!keepCapabilities(kKept))
    throw std::runtime_error("it needs the capabilities CAP_SETUID, CAP_SETGID and CAP_KILL");
  // What a worker leaves behind becomes a child of this process, which reaps it.
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0 ||
      prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
    throw std::runtime_error(std::string("prctl: ") + std::strerror(errno));
  umask(0007);  // what workers of a tenant write, its other workers may read: they are of one group
}

Spawner::~Spawner() {
  collect();
  for (const auto& [pid, worker] : workers_)
    if (!worker.status && !worker.outlives) ::kill(-pid, SIGKILL);
}

void Spawner::serve(int socket) {
  const auto send = [socket](Answer answer) {
    const std::vector<int> descriptors(answer.descriptor >= 0 ? 1 : 0, answer.descriptor);
    const bool sent = sendWithDescriptors(socket, std::as_bytes(std::span(&answer.words, 1)), descriptors) ==
                      sizeof answer.words;
    if (answer.descriptor >= 0) close(answer.descriptor);
    return sent;
  };
  bool open = send({});
  while (open) {
    SpawnerRequest request;
    const auto received = receiveWithDescriptors(socket, std::as_writable_bytes(std::span(&request, 1)));
    if (received.bytes <= 0) break;
    const bool whole = received.whole && received.bytes == sizeof request && request.magic == kSpawnerMagic;
    open = send(whole ? answer(request, received.descriptors) : Answer{{EPROTO}});
    for (const int one : received.descriptors) close(one);
  }
}

Spawner::Answer Spawner::answer(const SpawnerRequest& request, const std::vector<int>& descriptors) {
  collect();
  switch (request.operation) {
    case SpawnerOperation::start:
      if (descriptors.size() != 3) break;
      return start(request, descriptors[0], descriptors[1], descriptors[2]);
    case SpawnerOperation::kill:
      return kill(request.pid);
    case SpawnerOperation::reap:
      return reap(request.pid);
    case SpawnerOperation::killEarlier:
      if (descriptors.size() != 1) break;
      return killEarlier(descriptors[0]);
    case SpawnerOperation::outlive:
      return outlive(request.pid);
    case SpawnerOperation::spare:
      if (descriptors.size() != 1) break;
      return spare(descriptors[0]);
  }
  return {{EPROTO}};
}

Spawner::Answer Spawner::start(const SpawnerRequest& request, int program, int control, int texts) {
  Texts words;
  if (!read(texts, request, words)) return {{EPROTO}};
  const uid_t user = freeUser();
  if (user == 0) return {{EUSERS}};
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing < 0) return {{errno}};
  const pid_t parent = getpid(), pid = fork();
  if (pid == 0) {
    if (!becomeUser(user, users_, groups_)) _exit(126);
    becomeWorker({program, words.arguments.data(), words.variables.data(), control, nothing, parent});
  }
  const int error = errno;
  close(nothing);
  if (pid < 0) return {{error}};
  const int process = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (process < 0) {
    const int why = errno;
    ::kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    return {{why}};
  }
  fcntl(process, F_SETFD, FD_CLOEXEC);
  workers_[pid] = {user, {}, false};
  return {{0, pid, 0}, process};
}

Spawner::Answer Spawner::kill(pid_t pid) {
  const auto worker = workers_.find(pid);
  if (worker == workers_.end()) return {{ESRCH}};
  if (worker->second.status) return {};  // its pid may be another one's by now
  ::kill(-pid, SIGKILL);
  ::kill(pid, SIGKILL);  // it may not have reached setsid yet
  return {};
}

Spawner::Answer Spawner::reap(pid_t pid) {
  const auto worker = workers_.find(pid);
  if (worker == workers_.end()) return {{ESRCH}};
  if (!worker->second.status) return {{EAGAIN}};
  const int status = *worker->second.status;
  workers_.erase(worker);
  return {{0, pid, status}};
}

void Spawner::collect() {
  for (;;) {
    siginfo_t ended{};
    if (waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid == 0) return;
    const auto worker = workers_.find(ended.si_pid);
    if (worker != workers_.end()) ::kill(-ended.si_pid, SIGKILL);  // the group is ours until it is reaped
    int status = 0;
    if (waitpid(ended.si_pid, &status, 0) == ended.si_pid && worker != workers_.end())
      worker->second.status = status;
  }
}

Spawner::Answer Spawner::killEarlier(int process) const {
  if (userOf(process, users_) == 0) return {{EPERM}};
  return {{syscall(SYS_pidfd_send_signal, process, SIGKILL, nullptr, 0) == 0 ? 0 : errno}};
}

Spawner::Answer Spawner::outlive(pid_t pid) {
  const auto worker = workers_.find(pid);
  if (worker == workers_.end()) return {{ESRCH}};
  worker->second.outlives = true;
  return {};
}

Spawner::Answer Spawner::spare(int process) {
  const uid_t user = userOf(process, users_);
  if (user == 0) return {{EPERM}};
  const int kept = fcntl(process, F_DUPFD_CLOEXEC, 0);
  if (kept < 0) return {{errno}};
  if (!spared_.try_emplace(user, kept).second) close(kept);  // one more of them: it is that one's
  return {};
}

bool Spawner::isSpared(uid_t user) {
  const auto found = spared_.find(user);
  if (found == spared_.end()) return false;
  pollfd gone{found->second, POLLIN, 0};
  if (poll(&gone, 1, 0) != 1) return true;
  close(found->second);
  spared_.erase(found);
  return false;
}

uid_t Spawner::freeUser() {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (bool occupied = true; occupied;) {
    occupied = false;  // by what was killed
    for (size_t tries = 0; tries < users_.count(); ++tries) {
      const uid_t user = next_;
      next_ = next_ == users_.last ? users_.first : next_ + 1;
      const bool used = std::any_of(workers_.begin(), workers_.end(),
                                    [&](const auto& one) { return one.second.user == user; });
      if (used || isSpared(user)) continue;
      if (sweep(user)) return user;
      occupied = std::chrono::steady_clock::now() < until;
    }
  }
  return 0;
}

// Something may run there that a worker without walls has left, or that an earlier life of the server has.
bool Spawner::sweep(uid_t user) {
  for (int tries = 0; tries < kSweeps; ++tries) {
    const pid_t pid = fork();
    if (pid == 0) endOthers(user);
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return false;
    if (WEXITSTATUS(status) == kAlone) return true;
    if (WEXITSTATUS(status) != kOccupied) return false;
    usleep(1000);  // what was killed takes a moment to end
    collect();     // it counts until it is reaped
  }
  return false;
}

void Spawner::endOthers(uid_t user) const {
  if (!becomeUser(user, users_, groups_)) _exit(126);
  ::kill(-1, SIGKILL);  // every process of this user but this one
  // Whether there are others is told by the kernel's count of this user's threads (RLIMIT_NPROC): one more
  // than this process has is within this limit, if it is alone. kill(-1) does not say. A sanitizer has a
  // thread of its own here.
  struct stat threads{};
  const rlim_t own =
      stat("/proc/self/task", &threads) == 0 && threads.st_nlink > 2 ? threads.st_nlink - 2 : 1;
  const rlimit oneMore{own + 1, own + 1};
  if (setrlimit(RLIMIT_NPROC, &oneMore) != 0) _exit(126);
  const pid_t second = fork();
  if (second == 0) _exit(0);
  _exit(second > 0 ? kAlone : kOccupied);
}

}  // namespace gpupool::server
