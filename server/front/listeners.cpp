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

#include "base/stale_socket.h"

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

}  // namespace

LocalListener::LocalListener(kj::LowLevelAsyncIoProvider& io, const std::string& path) : path_(path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  KJ_REQUIRE(path.size() < sizeof address.sun_path, "the path is too long for a Unix socket", path.c_str());
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  removeStaleSocket(path, "another server");
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
