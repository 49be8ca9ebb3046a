#include "client/holder.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "base/descriptor_passing.h"
#include "base/log.h"
#include "base/transport_names.h"
#include "client/process.h"

namespace gpupool::client {
namespace {

// bin/gpupool of the installation this library belongs to: <prefix>/lib/gpupool/libcuda.so.1 ->
// <prefix>/bin/gpupool.
std::string toolPath() {
  if (const char* chosen = std::getenv("GPUPOOL_TOOL")) return chosen;
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&openSession), &info) == 0 || info.dli_fname == nullptr)
    return "gpupool";
  char resolved[PATH_MAX];
  std::string path = realpath(info.dli_fname, resolved) != nullptr ? resolved : info.dli_fname;
  for (int up = 0; up < 3; ++up) path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  return path + "/bin/gpupool";
}

int connectTo(const char* name, std::string& text) {
  sockaddr_un address{};
  const socklen_t size = holder::socketAddress(name, address);
  if (size == 0) {
    text = "GPUPOOL_HOLDER is too long for a socket's name";
    return -1;
  }
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const bool connected = fd >= 0 && connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0;
  if (connected && holder::peerIsOurs(fd)) return fd;
  text = std::string("no lease holder at ") + name + ": " +
         (connected ? "it belongs to another user" : std::strerror(errno)) +
         "; start the program with `gpupool run`, or without GPUPOOL_HOLDER";
  if (fd >= 0) close(fd);
  return -1;
}

// Starts `gpupool hold`. A raw clone without an exit signal: the application neither gets a SIGCHLD nor finds
// a child that it does not know in wait(). Until exec the child makes system calls only.
int startHolder(std::string& text) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    text = std::string("no socket for the lease holder: ") + std::strerror(errno);
    return -1;
  }
  std::string tool = toolPath();
  const char* argv[] = {tool.c_str(), "hold", "--descriptor", "3", nullptr};
  long pid = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (pid == 0) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    if (pair[1] == 3)
      fcntl(3, F_SETFD, 0);
    else if (dup2(pair[1], 3) < 0)
      _exit(127);
    execve(argv[0], const_cast<char**>(argv), environ);
    _exit(127);
  }
  close(pair[1]);
  if (pid < 0) {
    text = std::string("cannot start the lease holder: ") + std::strerror(errno);
    close(pair[0]);
    return -1;
  }
  return pair[0];
}

// One session has one socket: of several the last stays.
ssize_t receiveDatagram(int fd, OpenedSession& out) {
  const auto received = receiveWithDescriptors(fd, std::as_writable_bytes(std::span(&out.reply, 1)));
  for (int descriptor : received.descriptors) {
    if (out.bootstrap >= 0) close(out.bootstrap);
    out.bootstrap = descriptor;
  }
  return received.bytes;
}

// docs/errors.md says why each. A program without GPUs goes on without; one whose GPU is busy may try later.
CUresult resultOf(holder::Status status) {
  switch (status) {
    case holder::Status::ok:
      return CUDA_SUCCESS;
    case holder::Status::noManager:
    case holder::Status::nothingFits:
      return CUDA_ERROR_NO_DEVICE;
    case holder::Status::noDevice:
    case holder::Status::serverLost:
    case holder::Status::leaseEnded:
      return CUDA_ERROR_DEVICE_UNAVAILABLE;
    case holder::Status::refused:
      return CUDA_ERROR_NOT_PERMITTED;
    case holder::Status::mismatch:
      return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    case holder::Status::internal:
    case holder::Status::waiting:
      break;
  }
  return CUDA_ERROR_UNKNOWN;
}

holder::OpenRequest requestOf(uint64_t rowsHash, const char* transport) {
  holder::OpenRequest request;
  request.rowsHash = rowsHash;
  request.pid = getpid();
  std::strncpy(request.transport, transport, sizeof request.transport - 1);
  process::commandName(request.command, sizeof request.command);
  return request;
}

void dropBootstrap(OpenedSession& opened) {
  if (opened.bootstrap >= 0) close(opened.bootstrap);
  opened.bootstrap = -1;
}

// A datagram within `bound`, or why not.
bool awaitDatagram(int fd, std::chrono::milliseconds bound, const std::function<bool()>& cancelled,
                   std::string& text) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kHolderLook{50};
  for (const auto end = Clock::now() + bound; Clock::now() < end;) {
    if (cancelled()) {
      text = "it was given up";
      return false;
    }
    pollfd wait{fd, POLLIN, 0};
    if (poll(&wait, 1, static_cast<int>(kHolderLook.count())) > 0) return true;
  }
  text = "the lease holder has not answered within " + std::to_string(bound.count()) + " ms";
  return false;
}

}  // namespace

CUresult acceptReply(OpenedSession& out, ssize_t bytes, std::string& text) {
  if (bytes <= 0) {
    const char* path = std::getenv("GPUPOOL_HOLDER");
    text = path != nullptr && *path != 0
               ? std::string("the lease holder at ") + path + " ended; start the program with `gpupool run`"
               : "the lease holder ended; is `gpupool` installed beside this library (" + toolPath() + ")?";
    return CUDA_ERROR_NO_DEVICE;
  }
  if (bytes != ssize_t{sizeof out.reply} || out.reply.magic != holder::kMagic ||
      out.reply.version != holder::kVersion) {
    text =
        "version mismatch: this libcuda.so.1 and the lease holder are of different builds of gpupool (holder "
        "protocol " +
        std::to_string(holder::kVersion) + " here" +
        (bytes >= 8 && out.reply.magic == holder::kMagic ? ", " + std::to_string(out.reply.version) + " there"
                                                         : "") +
        "); use both from one installation";
    return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  }
  out.reply.text[sizeof out.reply.text - 1] = 0;
  out.reply.transport[sizeof out.reply.transport - 1] = 0;
  out.reply.networkDevice[sizeof out.reply.networkDevice - 1] = 0;
  out.reply.server[sizeof out.reply.server - 1] = 0;
  return CUDA_SUCCESS;
}

CUresult receiveReply(int fd, OpenedSession& out, std::string& text, std::chrono::milliseconds silence) {
  using Clock = std::chrono::steady_clock;
  bool told = false;
  for (auto heard = Clock::now();;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(heard + silence - Clock::now());
    pollfd wait{fd, POLLIN, 0};
    const int ready = poll(&wait, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      text = "the lease holder has said nothing for " + std::to_string(silence.count() / 1000) +
             " s; see what `gpupool leases` says, and start again";
      return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    const CUresult result = acceptReply(out, receiveDatagram(fd, out), text);
    if (result != CUDA_SUCCESS || out.reply.status != holder::Status::waiting) return result;
    if (out.reply.text[0] != 0 && !std::exchange(told, true)) GPUPOOL_WARNING("%s", out.reply.text);
    heard = Clock::now();
  }
}

CUresult openSession(uint64_t rowsHash, OpenedSession& out, std::string& text) {
  const char* path = std::getenv("GPUPOOL_HOLDER");
  out.holder = path != nullptr && *path != 0 ? connectTo(path, text) : startHolder(text);
  if (out.holder < 0) return CUDA_ERROR_NO_DEVICE;
  const char* transport = std::getenv("GPUPOOL_TRANSPORT");
  const holder::OpenRequest request = requestOf(rowsHash, transport != nullptr ? transport : "");
  // That nobody is there to take it is told by what follows: no reply.
  [[maybe_unused]] ssize_t sent = send(out.holder, &request, sizeof request, MSG_NOSIGNAL);
  CUresult result = receiveReply(out.holder, out, text, std::chrono::milliseconds(holder::kSilenceBoundMs));
  if (result == CUDA_SUCCESS) {
    result = resultOf(out.reply.status);
    if (result != CUDA_SUCCESS || out.bootstrap < 0)
      text = out.reply.text[0] != 0 ? out.reply.text : "the lease holder gave no connection";
    if (result == CUDA_SUCCESS && out.bootstrap < 0) result = CUDA_ERROR_UNKNOWN;
  }
  if (result != CUDA_SUCCESS) {
    if (out.bootstrap >= 0) close(out.bootstrap);
    close(out.holder);
    out.holder = out.bootstrap = -1;
  }
  return result;
}

namespace {

constexpr std::chrono::seconds kNextHolderBound{10};  // `gpupool run` starts it at once

bool isOver(const std::string& transport, const NextEpoch& wish) {
  return transport == wish.transport || (wish.mayShare && transportApart(transport) == wish.transport);
}

// `gone`: nobody is there any more.
CUresult askNextEpoch(int fd, uint64_t rowsHash, const NextEpoch& wish, OpenedSession& out, int& owed,
                      std::chrono::milliseconds bound, const std::function<bool()>& cancelled,
                      std::string& text, bool& gone) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + bound;
  holder::OpenRequest request = requestOf(rowsHash, wish.transport.c_str());
  request.sessionHigh = wish.sessionHigh;
  request.sessionLow = wish.sessionLow;
  request.epoch = wish.epoch;
  request.left = wish.lost ? 2 : wish.left ? 1 : 0;
  request.mayShare = wish.mayShare ? 1 : 0;
  if (fd < 0 || send(fd, &request, sizeof request, MSG_NOSIGNAL | MSG_DONTWAIT) != ssize_t{sizeof request}) {
    text = "the lease holder is gone";
    gone = fd >= 0 && (errno == EPIPE || errno == ECONNRESET);
    return CUDA_ERROR_DEVICE_UNAVAILABLE;
  }
  ++owed;
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    if (!awaitDatagram(fd, left, cancelled, text)) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    const ssize_t bytes = receiveDatagram(fd, out);
    const CUresult result = acceptReply(out, bytes, text);
    if (result != CUDA_SUCCESS) {
      gone = bytes <= 0;
      dropBootstrap(out);
      return result;
    }
    if (out.reply.status == holder::Status::waiting) continue;
    if (--owed == 0) break;
    dropBootstrap(out);
  }
  const holder::OpenReply& reply = out.reply;
  CUresult result = resultOf(reply.status);
  if (result != CUDA_SUCCESS) {
    text = reply.text[0] != 0 ? reply.text : "the lease holder gave no connection";
  } else if (out.bootstrap < 0 || reply.epoch != wish.epoch || reply.sessionHigh != wish.sessionHigh ||
             reply.sessionLow != wish.sessionLow || !isOver(reply.transport, wish)) {
    text = "the lease holder gave another session than the one asked for";
    result = CUDA_ERROR_UNKNOWN;
  }
  if (result != CUDA_SUCCESS) dropBootstrap(out);
  return result;
}

// The one that has taken the place of the holder at `fd`: it has the same name.
bool findNextHolder(int& fd, std::chrono::steady_clock::time_point end,
                    const std::function<bool()>& cancelled) {
  constexpr std::chrono::milliseconds kPause{50};
  const char* path = std::getenv("GPUPOOL_HOLDER");
  if (path == nullptr || *path == 0) return false;
  std::string ignored;
  for (int next = -1; !cancelled() && std::chrono::steady_clock::now() < end;
       std::this_thread::sleep_for(kPause)) {
    next = connectTo(path, ignored);
    if (next < 0) continue;
    close(std::exchange(fd, next));
    return true;
  }
  return false;
}

}  // namespace

CUresult openNextEpoch(int& fd, uint64_t rowsHash, const NextEpoch& wish, OpenedSession& out, int& owed,
                       std::chrono::milliseconds bound, const std::function<bool()>& cancelled,
                       std::string& text) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + bound;
  for (;;) {
    bool gone = false;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    const CUresult result = askNextEpoch(fd, rowsHash, wish, out, owed, left, cancelled, text, gone);
    if (!gone || !findNextHolder(fd, std::min(end, Clock::now() + kNextHolderBound), cancelled))
      return result;
    owed = 0;
    text.clear();
  }
}

}  // namespace gpupool::client
