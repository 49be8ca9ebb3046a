#include "server/front/listeners.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include <kj/debug.h>
#include <kj/io.h>

namespace gpupool::server {
namespace {

int descriptorOf(kj::AsyncIoStream& stream) {
  KJ_IF_MAYBE (descriptor, stream.getFd()) {
    return *descriptor;
  }
  return -1;
}

kj::AutoCloseFd unixSocket() {
  int descriptor;
  KJ_SYSCALL(descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  return kj::AutoCloseFd(descriptor);
}

bool refused(const sockaddr_un& address) {
  const auto probe = unixSocket();
  return connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
         errno == ECONNREFUSED;
}

// A server that was killed while it started a worker leaves a child that has the socket until it runs the
// worker's program or dies, too: on a busy machine that may take a while.
void removeStale(const std::string& path, const sockaddr_un& address) {
  constexpr useconds_t kFirstPause = 50'000, kLongestPause = 800'000;  // 1.55 s together
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) return;
  KJ_REQUIRE(S_ISSOCK(status.st_mode), "this path exists and is not a socket", path.c_str());
  bool stale = refused(address);
  for (useconds_t pause = kFirstPause; pause <= kLongestPause && !stale; pause *= 2) {
    usleep(pause);
    stale = refused(address);
  }
  KJ_REQUIRE(stale, "another server answers on this socket", path.c_str());
  unlink(path.c_str());
}

}  // namespace

LocalListener::LocalListener(kj::LowLevelAsyncIoProvider& io, const std::string& path) : path_(path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  KJ_REQUIRE(path.size() < sizeof address.sun_path, "the path is too long for a Unix socket", path.c_str());
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  removeStale(path, address);
  auto descriptor = unixSocket();
  KJ_SYSCALL(bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address), path.c_str());
  KJ_SYSCALL(chmod(path.c_str(), 0666), path.c_str());
  KJ_SYSCALL(listen(descriptor, 256));
  receiver_ = io.wrapListenSocketFd(kj::mv(descriptor));
}

LocalListener::~LocalListener() noexcept { unlink(path_.c_str()); }

std::string peerName(kj::AsyncIoStream& stream) {
  const int descriptor = descriptorOf(stream);
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return "unknown";
  char text[INET6_ADDRSTRLEN] = "unknown";
  if (address.ss_family == AF_UNIX) {
    ucred peer{};
    bytes = sizeof peer;
    if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return "unknown";
    return "uid " + std::to_string(peer.uid);
  }
  if (address.ss_family == AF_INET)
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(&address)->sin_addr, text, sizeof text);
  if (address.ss_family == AF_INET6)
    inet_ntop(AF_INET6, &reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr, text, sizeof text);
  return text;
}

void tuneNetworkSocket(kj::AsyncIoStream& stream) {
  const int descriptor = descriptorOf(stream);
  const auto set = [&](int level, int name, int value) {
    setsockopt(descriptor, level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
}

}  // namespace gpupool::server
