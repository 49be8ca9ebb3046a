#include "pool-manager/cli/holder_child.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/cli/places.h"

namespace gpupool::cli {
namespace {

constexpr int kReleaseBoundMs = 10'000;

// A program that finds the machine's own NVML past LD_LIBRARY_PATH would count the machine's GPUs: it is told
// as job schedulers tell it. Whoever has chosen already is left alone.
std::string visibleDevices(uint32_t count) {
  std::string list;
  for (uint32_t i = 0; i < count; ++i) list += (i == 0 ? "" : ",") + std::to_string(i);
  return "CUDA_VISIBLE_DEVICES=" + list;
}

// Over a network the memory that NCCL's kernels read of a communicator is compared at each launch, of every
// kernel: nearly all of it is a queue of 1 MiB for work that does not fit into a launch (init.cc of
// NCCL 2.28). A smaller one makes it launch more often where hundreds of operations are grouped.
constexpr char kSmallFifo[] = "NCCL_WORK_FIFO_BYTES";
constexpr char kSmallFifoBytes[] = "65536";

}  // namespace

HolderChild::HolderChild(HolderSettings settings, int status)
    : name_("@gpupool-run-" + Id::random().text()), settings_(std::move(settings)), status_(status) {
  start();
}

HolderChild::~HolderChild() {
  if (control_ >= 0) ::close(control_);
  if (pid_ > 0) ::waitpid(pid_, nullptr, WNOHANG);
}

void HolderChild::say(const std::string& text) const {
  ::send(control_, text.data(), text.size(), MSG_NOSIGNAL);
}

std::string HolderChild::hear() const {
  char text[4096];
  ssize_t size;
  while ((size = ::recv(control_, text, sizeof text, 0)) < 0 && errno == EINTR) {
  }
  return size <= 0 ? "" : std::string(text, static_cast<size_t>(size));
}

HolderChild::Leased HolderChild::awaitLease() {
  std::string first;
  while ((first = hear()).starts_with(kNews)) GPUPOOL_WARNING("%s", first.c_str() + sizeof kNews - 1);
  if (first.starts_with(kFailed)) throw CommandError(status_, first.substr(sizeof kFailed - 1));
  if (!first.starts_with(kLeased))
    throw CommandError(status_,
                       "the process that holds the lease ended unexpectedly; GPUPOOL_LOG=debug may say why");
  char* end = nullptr;
  const auto devices = static_cast<uint32_t>(std::strtoul(first.c_str() + sizeof kLeased - 1, &end, 10));
  Leased leased{devices, *end == '\0' ? "" : end + 1};
  // It may have asked more than once, each time for another lease.
  if (const auto id = Id::parse(leased.id)) settings_.request.id = *id;
  return leased;
}

bool HolderChild::replace() {
  constexpr unsigned kMostReplaced = 3;
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);  // one that has only closed its end of the line would be waited for without end
    ::waitpid(pid_, nullptr, 0);
  }
  pid_ = -1;
  if (replaced_++ == kMostReplaced || settings_.request.id == Id{}) return false;
  // A lease that has ended meanwhile is not asked for anew: nobody waits for GPUs here.
  settings_.request.waitMs = 0;
  start();
  return true;
}

void HolderChild::keep() const { say(kKeep); }

void HolderChild::release() {
  say(kRelease);
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kReleaseBoundMs);
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd wait{control_, POLLIN, 0};
    const int ready = left.count() <= 0 ? 0 : ::poll(&wait, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      GPUPOOL_WARNING("the process that holds the lease does not answer; the lease will expire by itself");
      return;
    }
    const std::string text = hear();
    if (text == kLater) {
      GPUPOOL_INFO("the manager has not taken the lease back yet; it is given back when it does");
      return;
    }
    if (text.empty() || text == kReleased) break;
  }
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void HolderChild::start() {
  const int listening = listenForApplications(name_);
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
    throw CommandError(status_, std::string("socketpair: ") + std::strerror(errno));
  pid_ = ::fork();
  if (pid_ < 0) throw CommandError(status_, std::string("fork: ") + std::strerror(errno));
  if (pid_ == 0) {
    detachFromCaller({listening, pair[1]});
    if (settings_.request.holder.empty()) settings_.request.holder = holderName(::getpid(), "gpupool lease");
    ::_exit(runHolderProcess({std::move(settings_), listening, -1, pair[1]}));
  }
  ::close(listening);
  ::close(pair[1]);
  if (control_ < 0) {
    control_ = pair[0];
    return;
  }
  ::dup3(pair[0], control_, O_CLOEXEC);  // who waits for the first one's words waits for this one's
  ::close(pair[0]);
}

std::string clientLibrary(int status) {
  std::string library = clientLibraryDirectory();
  if (::access((library + "/libcuda.so.1").c_str(), R_OK) != 0)
    throw CommandError(status, library +
                                   "/libcuda.so.1 is missing: this installation has no client library. "
                                   "Install it there, or name its folder in GPUPOOL_LIBRARY_DIR.");
  return library;
}

std::vector<std::string> programEnvironment(const HolderChild& holder, const std::string& library,
                                            uint32_t devices, bool sharesMemory) {
  const char* before = std::getenv("LD_LIBRARY_PATH");
  std::string path = "LD_LIBRARY_PATH=" + library;
  if (before != nullptr && *before != '\0') path += ":" + std::string(before);
  std::vector<std::string> environment{path, "GPUPOOL_HOLDER=" + holder.name()};
  if (std::getenv("CUDA_VISIBLE_DEVICES") == nullptr) environment.push_back(visibleDevices(devices));
  if (!sharesMemory && std::getenv(kSmallFifo) == nullptr)
    environment.push_back(std::string(kSmallFifo) + "=" + kSmallFifoBytes);
  return environment;
}

}  // namespace gpupool::cli
