#include "server/front/other_workers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "base/log.h"
#include "server/front/worker_child.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostAnswer = 1024;
constexpr size_t kMostPrograms = 15;  // besides the current one: so many are listed

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

// A process that is asked; ended and reaped with this.
class Asked {
 public:
  explicit Asked(const std::string& path) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail(std::strerror(errno));
    answer_ = kj::AutoCloseFd(ends[0]);
    const kj::AutoCloseFd theirs(ends[1]);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&files, theirs, STDOUT_FILENO);
    std::string option = "--identify", name = path;
    char* words[] = {name.data(), option.data(), nullptr};
    auto variables = workerEnvironment(environ);
    std::vector<char*> environment;
    environment.reserve(variables.size() + 1);
    for (std::string& one : variables) environment.push_back(one.data());
    environment.push_back(nullptr);
    const int error = posix_spawn(&process_, path.c_str(), &files, nullptr, words, environment.data());
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) fail(std::strerror(error));
  }
  ~Asked() {
    kill(process_, SIGKILL);
    while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) continue;
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

  // The first line, without its end.
  std::string line(std::chrono::steady_clock::time_point until) {
    std::string text;
    while (text.find('\n') == std::string::npos) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      pollfd wait{answer_, POLLIN, 0};
      const int ready = left.count() <= 0 ? 0 : poll(&wait, 1, static_cast<int>(left.count()));
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0) fail("it does not answer --identify");
      char bytes[256];
      const ssize_t count = ready < 0 ? -1 : read(answer_, bytes, sizeof bytes);
      if (count < 0) fail(std::strerror(errno));
      if (count == 0) fail("it says nothing to --identify: a build from before that option, or no worker");
      text.append(bytes, static_cast<size_t>(count));
      if (text.size() > kMostAnswer) fail("its answer to --identify is too long");
    }
    return text.substr(0, text.find('\n'));
  }

 private:
  pid_t process_ = -1;
  kj::AutoCloseFd answer_;
};

std::vector<std::string> filesIn(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error))
    paths.push_back(entry.path().string());
  if (error && error != std::errc::no_such_file_or_directory)
    GPUPOOL_WARNING("no other worker programs: %s: %s", folder.c_str(), error.message().c_str());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

WorkerIdentity identifyWorker(const std::string& path, std::chrono::milliseconds bound) {
  Asked asked(path);
  const auto identity = parseWorkerIdentity(asked.line(std::chrono::steady_clock::now() + bound));
  if (!identity) fail("it answers --identify with something else");
  return *identity;
}

std::vector<OtherWorker> findWorkers(const std::string& folder, uint64_t current,
                                     std::chrono::milliseconds bound) {
  std::vector<OtherWorker> found;
  for (const std::string& path : filesIn(folder)) {
    try {
      WorkerIdentity identity = identifyWorker(path, bound);
      if (identity.interface != kWorkerInterface)
        fail("it is of gpupool " + identity.release + ", whose workers and servers speak version " +
             std::to_string(identity.interface) + " with each other, and this server speaks " +
             std::to_string(kWorkerInterface));
      const auto same = [&](const OtherWorker& other) { return other.identity.rows == identity.rows; };
      if (identity.rows == current || std::any_of(found.begin(), found.end(), same)) {
        GPUPOOL_INFO("worker program %s is not needed: another one serves the same clients", path.c_str());
        continue;
      }
      if (found.size() == kMostPrograms) fail("there are too many");
      GPUPOOL_INFO("worker program %s: for clients of gpupool %s (call rows %016llx)", path.c_str(),
                   identity.release.c_str(), static_cast<unsigned long long>(identity.rows));
      found.push_back({WorkerProgram(path), std::move(identity)});
    } catch (const std::exception& error) {
      GPUPOOL_WARNING("worker program %s is left out: %s", path.c_str(), error.what());
    }
  }
  return found;
}

}  // namespace gpupool::server
