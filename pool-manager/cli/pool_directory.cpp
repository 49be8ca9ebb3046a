#include "pool-manager/cli/pool_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/processes.h"

namespace gpupool::cli {
namespace {

constexpr std::chrono::milliseconds kOrphanPatience{5000};

struct flock wholeFile(short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

// The lock is worth nothing if the file it lies on has been removed meanwhile.
bool stillThere(int descriptor, const std::string& path) {
  struct stat opened{}, named{};
  return ::fstat(descriptor, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

}  // namespace

PoolDirectory::~PoolDirectory() {
  if (lock_ >= 0) ::close(lock_);
}

bool PoolDirectory::take(pid_t* owner) {
  const std::string path = file(kLock);
  for (int attempt = 0; attempt < 100; ++attempt) {
    makePrivateDirectory(path_);
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
    auto lock = wholeFile(F_WRLCK);
    if (::fcntl(descriptor, F_SETLK, &lock) != 0) {
      const int error = errno;
      auto other = wholeFile(F_WRLCK);
      const bool known = ::fcntl(descriptor, F_GETLK, &other) == 0 && other.l_type != F_UNLCK;
      ::close(descriptor);
      if (error != EACCES && error != EAGAIN) throw std::runtime_error(path + ": " + std::strerror(error));
      if (!known) continue;  // gone in between
      *owner = other.l_pid > 0 ? other.l_pid : 0;
      return false;
    }
    if (stillThere(descriptor, path)) {
      lock_ = descriptor;
      return true;
    }
    ::close(descriptor);
  }
  throw std::runtime_error(path + ": cannot be locked, it keeps changing");
}

pid_t PoolDirectory::owner() const {
  const int descriptor = ::open(file(kLock).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return 0;
  auto lock = wholeFile(F_WRLCK);
  const bool held = ::fcntl(descriptor, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  ::close(descriptor);
  if (!held) return 0;
  return lock.l_pid > 0 ? lock.l_pid : -1;
}

bool PoolDirectory::endLeftovers() {
  bool found = false;
  auto left = readProcesses(file(kProcesses));
  std::reverse(left.begin(), left.end());  // the server first, as its supervisor would have done
  for (const ProcessName& process : left) {
    if (process.role == "supervisor" || !alive(process)) continue;
    found = true;
    if (!endProcess(process, kOrphanPatience))
      throw CommandError(kExitFailure, "the " + process.role + " of an earlier pool, process " +
                                           std::to_string(process.pid) + ", cannot be ended");
  }
  return found;
}

void PoolDirectory::clear() {
  std::error_code ignored;
  std::filesystem::remove_all(file(kServerFolder), ignored);
  for (const char* name : kPoolFiles)
    if (std::string_view(name) != kLock) ::unlink(file(name).c_str());
}

void PoolDirectory::remove() {
  clear();
  ::unlink(file(kLock).c_str());
  ::rmdir(path_.c_str());
}

}  // namespace gpupool::cli
