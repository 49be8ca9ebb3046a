#include "pool-manager/cli/child_program.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "pool-manager/cli/command.h"

namespace gpupool::cli {
namespace {

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT, SIGWINCH};

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> list;
  list.reserve(words.size() + 1);
  for (const std::string& word : words) list.push_back(const_cast<char*>(word.c_str()));
  list.push_back(nullptr);
  return list;
}

// 0, or execve(2)'s error.
int executing(const std::string& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) return errno;
  if (!S_ISREG(info.st_mode)) return EACCES;
  return ::faccessat(AT_FDCWD, path.c_str(), X_OK, AT_EACCESS) == 0 ? 0 : errno;
}

// As execvp(3) looks: a folder after the other, and one that may not be executed counts if there is none that
// may.
int lookedUp(const std::string& program) {
  if (program.empty()) return ENOENT;
  if (program.find('/') != std::string::npos) return executing(program);
  const char* path = std::getenv("PATH");
  std::string folders = path != nullptr ? path : "/bin:/usr/bin";
  int error = ENOENT;
  for (size_t at = 0; at <= folders.size();) {
    const size_t end = std::min(folders.find(':', at), folders.size());
    const std::string folder = folders.substr(at, end - at);
    const int why = executing(folder.empty() ? program : folder + "/" + program);
    if (why == 0) return 0;
    if (why == EACCES) error = EACCES;
    at = end + 1;
  }
  return error;
}

[[noreturn]] void failToExecute(const std::string& program, int error) {
  throw CommandError(error == ENOENT || error == ENOTDIR ? kExitNotFound : kExitNotExecutable,
                     program + ": " + (error == ENOENT ? "there is no such program" : std::strerror(error)));
}

}  // namespace

void demandExecutable(const std::string& program) {
  if (const int error = lookedUp(program); error != 0) failToExecute(program, error);
}

ChildProgram::ChildProgram() {
  sigset_t set;
  sigemptyset(&set);
  for (int number : kForwarded) sigaddset(&set, number);
  sigaddset(&set, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &set, &before_);
  signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) throw CommandError(kExitRun, std::string("signalfd: ") + std::strerror(errno));
}

ChildProgram::~ChildProgram() {
  ::close(signals_);
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

void ChildProgram::start(const std::vector<std::string>& words, const std::vector<std::string>& environment,
                         const std::function<void()>& before) {
  int failure[2];
  if (::pipe2(failure, O_CLOEXEC) != 0)
    throw CommandError(kExitRun, std::string("pipe: ") + std::strerror(errno));
  const auto arguments = pointers(words);
  pid_ = ::fork();
  if (pid_ < 0) throw CommandError(kExitRun, std::string("fork: ") + std::strerror(errno));
  if (pid_ == 0) {
    for (const std::string& entry : environment) ::putenv(const_cast<char*>(entry.c_str()));
    before();
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
    ::execvp(arguments[0], arguments.data());
    const int error = errno;
    if (::write(failure[1], &error, sizeof error) < 0) ::_exit(kExitRun);
    ::_exit(kExitNotFound);
  }
  ::close(failure[1]);
  int error = 0;
  ssize_t size;
  while ((size = ::read(failure[0], &error, sizeof error)) < 0 && errno == EINTR) {
  }
  ::close(failure[0]);
  if (size != sizeof error) return;  // closed by exec
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
  failToExecute(words[0], error);
}

void ChildProgram::forward() {
  signalfd_siginfo info;
  while (::read(signals_, &info, sizeof info) == sizeof info) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number != SIGCHLD && info.ssi_code != SI_KERNEL) ::kill(pid_, number);
  }
}

bool ChildProgram::reap(int* status) {
  for (;;) {
    const pid_t got = ::waitpid(pid_, status, WNOHANG | WUNTRACED);
    if (got != pid_) return got < 0 && errno == ECHILD;
    if (!WIFSTOPPED(*status)) return true;
    // A stop from the terminal must stop us too, or the shell gives no prompt; whoever continues us continues
    // the program. A plain SIGSTOP was meant for the program alone, and so will be what continues it.
    if (WSTOPSIG(*status) == SIGSTOP) continue;
    ::raise(SIGSTOP);
    ::kill(pid_, SIGCONT);
  }
}

int ChildProgram::wait(int descriptor, const std::function<bool()>& onReadable) {
  int status = 0;
  bool listening = descriptor >= 0;
  for (;;) {
    if (reap(&status)) return status;
    pollfd waits[2] = {{signals_, POLLIN, 0}, {listening ? descriptor : -1, POLLIN, 0}};
    if (::poll(waits, 2, -1) < 0 && errno != EINTR)
      throw CommandError(kExitRun, std::string("poll: ") + std::strerror(errno));
    if ((waits[0].revents & POLLIN) != 0) forward();
    if (waits[1].revents != 0) listening = onReadable();
  }
}

int endLike(int status) {
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  if (!WIFSIGNALED(status)) return kExitRun;
  const int number = WTERMSIG(status);
  const rlimit none{0, 0};  // the program has left its core; ours would bury it
  ::setrlimit(RLIMIT_CORE, &none);
  ::signal(number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, number);
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
  ::raise(number);
  return 128 + number;  // a signal that does not kill us
}

}  // namespace gpupool::cli
