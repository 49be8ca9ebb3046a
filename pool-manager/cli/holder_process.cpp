#include "pool-manager/cli/holder_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/log.h"

namespace gpupool::cli {
namespace {

constexpr kj::Duration kReleasePatience = 1 * kj::SECONDS;

// The loop around one Holder, with what may end it.
class Runner {
 public:
  explicit Runner(HolderProcess& process) : process_(process), io_(kj::setupAsyncIo()) {
    auto pair = kj::newPromiseAndFulfiller<void>();
    lost_ = kj::mv(pair.promise);
    onLost_ = kj::mv(pair.fulfiller);
  }

  int run() {
    Holder holder(
        *io_.provider, io_.unixEventPort, process_.settings,
        [this](const std::string& reason, bool told) {
          if (!told) tell(kLost + reason);
          onLost_->fulfill();
        },
        [this](const std::string& text) { tell(kNews + text); });
    auto over = io_.unixEventPort.onSignal(SIGTERM).ignoreResult();
    if (process_.listening >= 0) over = over.exclusiveJoin(holder.listen(process_.listening));
    if (process_.application >= 0)
      over = over.exclusiveJoin(holder.serve(kj::AutoCloseFd(process_.application)));
    if (process_.control >= 0) {
      observer_ = kj::heap<kj::UnixEventPort::FdObserver>(io_.unixEventPort, process_.control,
                                                          kj::UnixEventPort::FdObserver::OBSERVE_READ);
      // While the lease is awaited `gpupool run` says nothing, so that anything to read is its end.
      over = over.exclusiveJoin(
          lease(holder)
              .exclusiveJoin(observer_->whenBecomesReadable().then([]() { return false; }))
              .then([this](bool leased) { return leased ? obey() : kj::Promise<void>(kj::READY_NOW); }));
    }
    over.catch_([](kj::Exception&& error) { GPUPOOL_WARNING("holder: %s", pool::errorText(error).c_str()); })
        .wait(io_.waitScope);
    giveBack(holder);
    return 0;
  }

 private:
  // `gpupool run` waits for it, so that the next command finds the devices free; but not for a manager that
  // is away.
  void giveBack(Holder& holder) {
    auto released = holder.release().then([]() { return true; }).fork();
    const bool now =
        released.addBranch()
            .exclusiveJoin(io_.provider->getTimer().afterDelay(kReleasePatience).then([]() { return false; }))
            .wait(io_.waitScope);
    tell(now ? kReleased : kLater);
    if (!now) released.addBranch().wait(io_.waitScope);
  }

  void tell(const std::string& text) {
    if (process_.control >= 0)
      ::send(process_.control, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  kj::Promise<bool> lease(Holder& holder) {
    return kj::evalNow([&]() { return holder.acquire(); })
        .then(
            [this, &holder]() {
              const pool::Lease* lease = holder.lease();
              tell(kLeased +
                   (lease == nullptr ? "0" : std::to_string(lease->devices.size()) + " " + lease->id.text()));
              return true;
            },
            [this](kj::Exception&& error) {
              tell(kFailed + toFailure(error).text);
              return false;
            });
  }

  kj::Promise<void> obey() {
    char text[64] = {};
    const ssize_t size = ::recv(process_.control, text, sizeof text - 1, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
      return observer_->whenBecomesReadable().then([this]() { return obey(); });
    if (size <= 0) return untilProgramEnds();
    if (std::strncmp(text, kProgram, sizeof kProgram - 1) == 0) {
      const auto pid = static_cast<pid_t>(std::strtol(text + sizeof kProgram - 1, nullptr, 10));
      program_ = kj::AutoCloseFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    }
    if (std::strcmp(text, kRelease) == 0) return kj::READY_NOW;
    if (std::strcmp(text, kKeep) == 0) return kj::mv(lost_);
    return obey();
  }

  // `gpupool run` was killed; its program may go on, and needs the lease.
  kj::Promise<void> untilProgramEnds() {
    if (program_.get() < 0) return kj::READY_NOW;
    auto observer = kj::heap<kj::UnixEventPort::FdObserver>(io_.unixEventPort, program_,
                                                            kj::UnixEventPort::FdObserver::OBSERVE_READ);
    auto ended = observer->whenBecomesReadable();
    return ended.attach(kj::mv(observer));
  }

  HolderProcess& process_;
  kj::AsyncIoContext io_;
  kj::Own<kj::UnixEventPort::FdObserver> observer_;
  kj::AutoCloseFd program_;
  kj::Promise<void> lost_ = nullptr;  // the lease has ended
  kj::Own<kj::PromiseFulfiller<void>> onLost_;
};

}  // namespace

void closeAllBut(std::vector<int> kept) {
  std::sort(kept.begin(), kept.end());
  unsigned from = 3;
  const auto closeRange = [](unsigned first, unsigned last) {
    if (first > last) return;
    if (::syscall(SYS_close_range, first, last, 0) == 0) return;
    const unsigned limit = static_cast<unsigned>(std::min(::sysconf(_SC_OPEN_MAX), 65536L));
    for (unsigned descriptor = first; descriptor <= std::min(last, limit); ++descriptor)
      ::close(static_cast<int>(descriptor));
  };
  for (int descriptor : kept) {
    if (descriptor < 3) continue;
    closeRange(from, static_cast<unsigned>(descriptor) - 1);
    from = static_cast<unsigned>(descriptor) + 1;
  }
  closeRange(from, ~0U);
}

void detachFromCaller(const std::vector<int>& kept) {
  ::setsid();
  for (int number = 1; number < SIGRTMIN; ++number)
    if (number != SIGKILL && number != SIGSTOP) ::signal(number, SIG_DFL);
  for (int number : {SIGPIPE, SIGINT, SIGHUP, SIGQUIT, SIGTSTP}) ::signal(number, SIG_IGN);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  closeAllBut(kept);
  const int null = ::open("/dev/null", O_RDWR);
  if (null >= 0) {
    ::dup2(null, 0);
    ::dup2(null, 1);
    if (!log::enabled(log::Level::info)) ::dup2(null, 2);
    if (null > 2 && std::find(kept.begin(), kept.end(), null) == kept.end()) ::close(null);
  }
  if (::chdir("/") != 0) GPUPOOL_INFO("holder: chdir: %s", std::strerror(errno));
  ::umask(077);
}

int runHolderProcess(HolderProcess process) {
  log::setProcessName("holder");
  kj::UnixEventPort::captureSignal(SIGTERM);
  int status = 1;
  try {
    status = Runner(process).run();
  } catch (const kj::Exception& error) {
    GPUPOOL_ERROR("%s", pool::errorText(error).c_str());
  } catch (const std::exception& error) {
    GPUPOOL_ERROR("%s", error.what());
  }
  return status;
}

int listenForApplications(const std::string& name) {
  sockaddr_un address{};
  const socklen_t size = holder::socketAddress(name.c_str(), address);
  if (size == 0) throw std::runtime_error(name + ": too long for a Unix socket");
  const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket < 0 || ::bind(socket, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(socket, 128) != 0) {
    const int error = errno;
    if (socket >= 0) ::close(socket);
    throw std::runtime_error(name + ": " + std::strerror(error));
  }
  return socket;
}

}  // namespace gpupool::cli
