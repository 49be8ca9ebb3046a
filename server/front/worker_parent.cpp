#include "server/front/worker_parent.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "server/spawner/become_worker.h"

namespace gpupool::server {
namespace {

class OwnChildren final : public WorkerParent {
 public:
  Process start(int program, const std::vector<std::string>& words, const std::vector<std::string>& variables,
                int control) override {
    int null;
    KJ_SYSCALL(null = open("/dev/null", O_RDONLY | O_CLOEXEC));
    const kj::AutoCloseFd nothing(null);
    auto argumentList = pointers(words), environmentList = pointers(variables);
    const pid_t parent = getpid();
    pid_t pid;
    KJ_SYSCALL(pid = fork());
    if (pid == 0)
      becomeWorker({program, argumentList.data(), environmentList.data(), control, nothing, parent});
    try {
      return {pid, openProcess(pid)};
    } catch (...) {
      ::kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
      throw;
    }
  }
  void kill(pid_t pid) override {
    if (killAdopted(pid)) return;
    ::kill(-pid, SIGKILL);
    ::kill(pid, SIGKILL);  // it may not have reached setsid yet
  }
  int reap(pid_t pid) override {
    if (reapAdopted(pid)) return -1;
    // Helpers the worker started (JIT compilers, ...) go with it; its pid is ours until it is reaped.
    ::kill(-pid, SIGKILL);
    return waitFor(pid);
  }
  bool killEarlier(int process) override { return killBy(process); }
};

}  // namespace

bool WorkerParent::killAdopted(pid_t pid) {
  const auto found = adopted_.find(pid);
  if (found == adopted_.end()) return false;
  killEarlier(found->second);
  return true;
}

WorkerParent& ownChildren() {
  static OwnChildren parent;
  return parent;
}

kj::AutoCloseFd openProcess(pid_t pid) {
  int descriptor;
  KJ_SYSCALL(descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), "pidfd_open (needs Linux 5.3)");
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return kj::AutoCloseFd(descriptor);
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  list.reserve(texts.size() + 1);
  for (const auto& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

bool killBy(int process) {
  return syscall(SYS_pidfd_send_signal, process, SIGKILL, nullptr, 0) == 0 || errno == ESRCH;
}

int waitFor(pid_t pid) {
  int status = 0;
  pid_t result;
  do {
    result = waitpid(pid, &status, 0);
  } while (result < 0 && errno == EINTR);
  return result < 0 ? -1 : status;
}

}  // namespace gpupool::server
