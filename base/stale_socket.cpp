#include "base/stale_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace gpupool {
namespace {

bool refused(const sockaddr_un& address) {
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe < 0) throw std::system_error(errno, std::generic_category(), "a socket");
  const bool refused = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
                       errno == ECONNREFUSED;
  close(probe);
  return refused;
}

}  // namespace

// A server that was killed while it started a worker leaves a child that has the socket until it runs the
// worker's program or dies, too: on a busy machine that may take a while.
void removeStaleSocket(const std::string& path, const std::string& who) {
  constexpr useconds_t kFirstPause = 50'000, kLongestPause = 800'000;  // 1.55 s together
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) return;
  if (!S_ISSOCK(status.st_mode)) throw std::runtime_error(path + ": it exists and is not a socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw std::runtime_error(path + ": the path is too long for a Unix socket");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  bool stale = refused(address);
  for (useconds_t pause = kFirstPause; pause <= kLongestPause && !stale; pause *= 2) {
    usleep(pause);
    stale = refused(address);
  }
  if (!stale) throw std::runtime_error(path + ": " + who + " answers on this socket");
  unlink(path.c_str());
}

}  // namespace gpupool
