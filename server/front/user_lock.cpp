#include "server/front/user_lock.h"

#include <fcntl.h>
#include <kj/exception.h>

#include <cerrno>
#include <cstring>

#include "base/options.h"
#include "server/front/lock_file.h"

namespace gpupool::server {
namespace {

struct flock lockOf(const UserRange& users) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = users.first;
  lock.l_len = static_cast<off_t>(users.count());
  return lock;
}

[[noreturn]] void refuse(const UserRange& users, const std::string& why) {
  throw options::OptionError("--worker-users " + users.text() + ": " + why);
}

// "1900000000-1900000063 (process 12)"
std::string holder(const struct flock& lock) {
  const UserRange theirs{static_cast<uid_t>(lock.l_start),
                         static_cast<uid_t>(lock.l_start + (lock.l_len > 0 ? lock.l_len - 1 : 0))};
  // Of another PID namespace: 0.
  return theirs.text() +
         (lock.l_pid > 0 ? " (process " + std::to_string(lock.l_pid) + ")" : " (of another container)");
}

}  // namespace

// A lock of the process (F_SETLK), not of the open file (F_OFD_SETLK): only of that the kernel says whose it
// is, and no child of this process inherits it.
UserLock::UserLock(const std::string& folder, const UserRange& users) {
  try {
    file_ = openLockFile(folder + "/gpupool-worker-users.lock", "the lock of workers' user ids");
  } catch (const kj::Exception& error) {
    refuse(users, error.getDescription().cStr());
  }
  for (;;) {
    struct flock lock = lockOf(users);
    if (fcntl(file_, F_SETLK, &lock) == 0) return;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EACCES) refuse(users, std::string("fcntl: ") + std::strerror(errno));
    lock = lockOf(users);
    if (fcntl(file_, F_GETLK, &lock) != 0) refuse(users, std::string("fcntl: ") + std::strerror(errno));
    if (lock.l_type == F_UNLCK) continue;  // it has ended meanwhile
    refuse(users,
           "another gpupool-server of this machine has " + holder(lock) +
               " of these user ids, and each would end the other's workers: name a range that no other "
               "server has");
  }
}

}  // namespace gpupool::server
