#include "pool-manager/cli/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "base/log.h"

namespace gpupool::cli {
namespace {

// A zombie has ended; only its parent has not looked yet.
unsigned long long startTicks(pid_t pid, bool* zombie) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return 0;
  const size_t end = text.rfind(')');  // the name may contain anything
  if (end == std::string::npos) return 0;
  std::istringstream fields(text.substr(end + 1));
  std::string word;
  for (int field = 3; field <= 22 && fields >> word; ++field) {
    if (field == 3) *zombie = word == "Z" || word == "X";
    if (field == 22) return std::strtoull(word.c_str(), nullptr, 10);
  }
  return 0;
}

bool waitGone(const ProcessName& process, int pidfd, std::chrono::milliseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (alive(process)) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd wait{pidfd, POLLIN, 0};
    // Without pidfds (Linux before 5.3), look every 20 ms.
    ::poll(&wait, 1, pidfd >= 0 ? static_cast<int>(left.count()) : 20);
  }
  return true;
}

[[noreturn]] void becomeDaemon(const std::vector<char*>& arguments, const std::vector<std::string>& extra,
                               int log, pid_t parent, int failure) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::dup2(null, 0);
  ::dup2(log, 1);
  ::dup2(log, 2);
  for (int number = 1; number < SIGRTMIN; ++number)
    if (number != SIGKILL && number != SIGSTOP) ::signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const std::string& entry : extra) ::putenv(const_cast<char*>(entry.c_str()));
  ::execv(arguments[0], arguments.data());
  const int error = errno;
  if (::write(failure, &error, sizeof error) < 0) ::_exit(1);
  ::_exit(127);
}

}  // namespace

ProcessName nameProcess(pid_t pid, const std::string& role) {
  bool zombie = false;
  return {pid, startTicks(pid, &zombie), role};
}

bool alive(const ProcessName& process) {
  if (process.pid <= 0 || process.startTicks == 0) return false;
  bool zombie = false;
  return startTicks(process.pid, &zombie) == process.startTicks && !zombie;
}

bool endProcess(const ProcessName& process, std::chrono::milliseconds patience) {
  if (!alive(process)) return true;
  // The descriptor is opened before the identity is checked again, so that the signal cannot meet a stranger.
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0));
  const auto signal = [&](int number) {
    if (!alive(process)) return;
    if (pidfd < 0 || ::syscall(SYS_pidfd_send_signal, pidfd, number, nullptr, 0) != 0)
      ::kill(process.pid, number);
  };
  signal(SIGTERM);
  bool gone = waitGone(process, pidfd, patience);
  if (!gone) {
    GPUPOOL_WARNING("the %s (process %d) does not end; killing it", process.role.c_str(), process.pid);
    signal(SIGKILL);
    gone = waitGone(process, pidfd, std::chrono::milliseconds(2000));
  }
  if (pidfd >= 0) ::close(pidfd);
  return gone;
}

ProcessName startDaemon(const std::vector<std::string>& words, const std::vector<std::string>& extra,
                        const std::string& log, const std::string& role) {
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int output = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (output < 0) throw std::runtime_error(log + ": " + std::strerror(errno));
  int failure[2];
  if (::pipe2(failure, O_CLOEXEC) != 0)
    throw std::runtime_error(std::string("pipe: ") + std::strerror(errno));
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (pid == 0) becomeDaemon(arguments, extra, output, parent, failure[1]);
  ::close(output);
  ::close(failure[1]);
  int error = 0;
  const ssize_t size = ::read(failure[0], &error, sizeof error);
  ::close(failure[0]);
  if (size == sizeof error) {
    ::waitpid(pid, nullptr, 0);
    throw std::runtime_error(words[0] + ": " + std::strerror(error));
  }
  return nameProcess(pid, role);
}

std::vector<pid_t> children() {
  std::ifstream file("/proc/self/task/" + std::to_string(::getpid()) + "/children");
  std::vector<pid_t> found;
  for (pid_t pid; file >> pid;) found.push_back(pid);
  return found;
}

void writeProcesses(const std::string& path, const std::vector<ProcessName>& processes) {
  std::ofstream file(path + ".new");
  for (const ProcessName& process : processes)
    file << process.role << ' ' << process.pid << ' ' << process.startTicks << '\n';
  file.close();
  if (!file || ::rename((path + ".new").c_str(), path.c_str()) != 0)
    throw std::runtime_error(path + ": " + std::strerror(errno));
}

std::vector<ProcessName> readProcesses(const std::string& path) {
  std::ifstream file(path);
  std::vector<ProcessName> processes;
  for (ProcessName process; file >> process.role >> process.pid >> process.startTicks;)
    processes.push_back(process);
  return processes;
}

std::string tail(const std::string& path, size_t lines) {
  std::ifstream file(path);
  std::vector<std::string> kept;
  for (std::string line; std::getline(file, line);) {
    kept.push_back(line);
    if (kept.size() > lines) kept.erase(kept.begin());
  }
  std::string text;
  for (const std::string& line : kept) text += "  " + line + "\n";
  return text;
}

}  // namespace gpupool::cli
