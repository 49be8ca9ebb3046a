#include "server/front/doors.h"

#include <fcntl.h>
#include <kj/debug.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/descriptor_passing.h"
#include "base/log.h"

namespace gpupool::server {
namespace {

// By way of the folder's descriptor: a name may be longer than a socket's address.
sockaddr_un addressOf(int folder, pid_t worker) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%d", folder, worker);
  return address;
}

kj::AutoCloseFd datagramSocket() {
  return kj::AutoCloseFd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

kj::AutoCloseFd Doors::openFolder() const {
  return kj::AutoCloseFd(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
}

kj::AutoCloseFd Doors::make(pid_t worker) const {
  if (folder_.empty()) return nullptr;
  static_cast<void>(mkdir(folder_.c_str(), 0700));  // there is one, or what follows fails
  const kj::AutoCloseFd folder = openFolder();
  const std::string name = std::to_string(worker);
  kj::AutoCloseFd made = datagramSocket();
  const sockaddr_un address = addressOf(folder, worker);
  if (folder.get() >= 0) unlinkat(folder, name.c_str(), 0);  // of a process of that number before
  // It is given to a worker, which must not reach other sockets by it: that is final.
  if (folder.get() < 0 || made.get() < 0 || shutdown(made, SHUT_WR) != 0 ||
      bind(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    GPUPOOL_WARNING("%s: %s: a session ends with this server's process", folder_.c_str(), strerror(errno));
    return nullptr;
  }
  return made;
}

kj::Own<void> Doors::nameOf(pid_t worker) const {
  return kj::heap(kj::defer([path = folder_ + "/" + std::to_string(worker)] { unlink(path.c_str()); }));
}

int Doors::knock(pid_t worker, std::span<const std::byte> bytes, int descriptor) const {
  const kj::AutoCloseFd folder = openFolder(), from = datagramSocket();
  if (folder.get() < 0 || from.get() < 0) return errno;
  const sockaddr_un address = addressOf(folder, worker);
  if (connect(from, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return errno;
  return sendWithDescriptors(from, bytes, std::span(&descriptor, 1), MSG_DONTWAIT) < 0 ? errno : 0;
}

void Doors::remove() const { rmdir(folder_.c_str()); }

void Doors::sweep(const std::set<pid_t>& but) const {
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder_, error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename();
    char* rest = nullptr;
    const long pid = std::strtol(name.c_str(), &rest, 10);
    if (*rest == '\0' && !but.contains(static_cast<pid_t>(pid))) unlink(at->path().c_str());
  }
}

}  // namespace gpupool::server
