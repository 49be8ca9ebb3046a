#include "server/front/lock_file.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <sys/stat.h>

#include <cerrno>

namespace gpupool::server {

// An existing one first, without O_CREAT: in a folder for everybody the kernel refuses that for another
// user's file (fs.protected_regular). Never a link, and no pipe that would block.
kj::AutoCloseFd openLockFile(const std::string& path, const char* what) {
  constexpr int kFlags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  for (;;) {
    int file = open(path.c_str(), kFlags);
    if (file < 0 && errno == ENOENT) {
      file = open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
      if (file < 0 && errno == EEXIST) continue;  // somebody else made it meanwhile
      if (file >= 0) fchmod(file, 0666);          // whatever our umask
    }
    if (file < 0) KJ_FAIL_SYSCALL(kj::str(what, "; see --device-locks").cStr(), errno, path.c_str());
    kj::AutoCloseFd opened(file);
    struct stat status{};
    KJ_REQUIRE(fstat(opened, &status) == 0 && S_ISREG(status.st_mode),
               kj::str(what, " is no ordinary file; see --device-locks"), path.c_str());
    return opened;
  }
}

}  // namespace gpupool::server
