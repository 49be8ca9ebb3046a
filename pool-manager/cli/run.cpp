// gpupool run. Three processes: this one starts the program, passes signals on and repeats its end; its
// child, the holder, keeps the lease in a session of its own, because a lease must be renewed while the
// terminal has stopped the program; and the program, which finds the holder at GPUPOOL_HOLDER.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/log.h"
#include "pool-manager/cli/child_program.h"
#include "pool-manager/cli/client_beside.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/cli/lease_wish.h"
#include "pool-manager/cli/places.h"

namespace gpupool::cli {
namespace {

constexpr int kReleaseBoundMs = 10'000;

const Help kRunHelp = {
    "gpupool run [options] [--] program [argument...]",
    "Leases GPUs of the pool, runs the program with them, and gives them back when it ends. The program "
    "needs no change: LD_LIBRARY_PATH makes it load gpupool's libcuda.so.1 and libnvidia-ml.so.1. Child "
    "processes of the program "
    "may use the same lease as long as the program itself runs. Signals that gpupool receives are passed on "
    "to the program. The lease is kept while the program is stopped from the terminal.",
    "For the program, gpupool's library folder is put in front of LD_LIBRARY_PATH, and GPUPOOL_HOLDER is set "
    "to the socket of the process that holds the lease. CUDA_VISIBLE_DEVICES, if it is not set, names the "
    "lease's devices. NCCL_WORK_FIFO_BYTES, if it is not set, becomes 65536 unless --transport is shm: "
    "the client compares that queue of NCCL's with the server's copy at each launch. GPUPOOL_LIBRARY_DIR: "
    "the folder of libcuda.so.1, instead of the one beside this tool. GPUPOOL_STATE: the folder of this "
    "machine's pool. GPUPOOL_LOG: error, warning, info or debug.",
    "The program's own; if the program is killed by a signal, gpupool ends by the same signal. 125: gpupool "
    "failed (no manager, no free GPU, ...). 126: the program cannot be executed. 127: the program was not "
    "found.",
    "  gpupool run -- ./vectorAdd\n"
    "  gpupool run --gpus 2 --memory 20GiB --wait 10m -- python train.py\n"
    "  gpupool run --gpu h200 --time 2h --reason 'nightly tests' -- ./tests\n"
    "  gpupool run --memory 60GiB --share 25% --priority low -- python train.py\n"
    "  gpupool run --claim alps:4711:0 -- python train.py\n"
    "  GPUPOOL_MANAGER=head:4780 gpupool run ./a.out\n"};

// The holder as this process sees it: the other end of the control socket.
class HolderChild {
 public:
  // No file for it: nobody would remove it where both this process and the holder are killed.
  explicit HolderChild(HolderSettings settings) : name_("@gpupool-run-" + Id::random().text()) {
    start(std::move(settings));
  }
  ~HolderChild() {
    if (control_ >= 0) ::close(control_);
    if (pid_ > 0) ::waitpid(pid_, nullptr, WNOHANG);
  }
  HolderChild(const HolderChild&) = delete;
  HolderChild& operator=(const HolderChild&) = delete;

  int control() const { return control_; }
  const std::string& name() const { return name_; }
  void say(const std::string& text) const { ::send(control_, text.data(), text.size(), MSG_NOSIGNAL); }

  // One datagram; empty when the holder is gone.
  std::string hear() const {
    char text[4096];
    ssize_t size;
    while ((size = ::recv(control_, text, sizeof text, 0)) < 0 && errno == EINTR) {
    }
    return size <= 0 ? "" : std::string(text, static_cast<size_t>(size));
  }

  // Asks for the release and waits for it, within a bound.
  void release() {
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

 private:
  void start(HolderSettings settings) {
    const int listening = listenForApplications(name_);
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
      throw CommandError(kExitRun, std::string("socketpair: ") + std::strerror(errno));
    pid_ = ::fork();
    if (pid_ < 0) throw CommandError(kExitRun, std::string("fork: ") + std::strerror(errno));
    if (pid_ == 0) {
      detachFromCaller({listening, pair[1]});
      ::_exit(runHolderProcess({std::move(settings), listening, -1, pair[1]}));
    }
    ::close(listening);
    ::close(pair[1]);
    control_ = pair[0];
  }

  std::string name_;
  int control_ = -1;
  pid_t pid_ = -1;
};

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

// Its folder.
std::string clientLibrary() {
  std::string library = clientLibraryDirectory();
  if (::access((library + "/libcuda.so.1").c_str(), R_OK) != 0)
    throw CommandError(kExitRun, library +
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

int runLeased(HolderSettings settings, const Words& program) {
  settings.request.holder = holderName(::getpid(), program[0].substr(program[0].rfind('/') + 1));
  const bool sharesMemory = settings.transport == "shm";
  HolderChild holder(std::move(settings));
  const std::string library = clientLibrary();
  const std::string first = holder.hear();
  if (first.starts_with(kFailed)) throw CommandError(kExitRun, first.substr(sizeof kFailed - 1));
  if (!first.starts_with(kLeased))
    throw CommandError(kExitRun,
                       "the process that holds the lease ended unexpectedly; GPUPOOL_LOG=debug may say why");
  const auto devices = static_cast<uint32_t>(std::strtoul(first.c_str() + sizeof kLeased - 1, nullptr, 10));
  const auto environment = programEnvironment(holder, library, devices, sharesMemory);
  int status = 0;
  {
    ChildProgram child;
    try {
      // Told by the program's own process: this one may be killed at any moment after it exists.
      child.start(program, environment, [&] { holder.say(kProgram + std::to_string(::getpid())); });
    } catch (const CommandError&) {
      holder.release();
      throw;
    }
    status = child.wait(holder.control(), [&] {
      const std::string text = holder.hear();
      if (text.starts_with(kLost))
        GPUPOOL_WARNING("the lease has ended: %s", text.c_str() + sizeof kLost - 1);
      if (text.starts_with(kEnding)) GPUPOOL_WARNING("%s", text.c_str() + sizeof kEnding - 1);
      if (text.empty()) GPUPOOL_WARNING("the process that holds the lease was killed; the lease ends");
      return !text.empty();
    });
    holder.release();
  }
  return status;
}

}  // namespace

int runRun(const Words& words) {
  ClientOptions options;
  Parsed parsed;
  HolderSettings settings;
  try {
    parsed = parseCommand(words, kRunHelp, &options, leaseOptionNames(), {});
    if (parsed.helped) return 0;
    settings = leaseWish(options);
    settings.request.client = clientBeside();
    if (parsed.rest.empty())
      throw options::OptionError("which program? usage: " + std::string(kRunHelp.usage));
  } catch (const std::exception& error) {
    throw CommandError(kExitRun, error.what());
  }
  try {
    return endLike(runLeased(std::move(settings), parsed.rest));
  } catch (const CommandError&) {
    throw;
  } catch (const std::exception& error) {
    throw CommandError(kExitRun, error.what());
  }
}

}  // namespace gpupool::cli
