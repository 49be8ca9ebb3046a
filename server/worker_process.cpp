#include "server/worker_process.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/log.h"
#include "schema/convert.h"
#include "schema/worker.capnp.h"

namespace gpupool::server {
namespace {

// The handler's only way out; one WorkerProcess a process.
volatile int signalDescriptor = -1;
constexpr int kTellAgainMs = 50;
constexpr uint64_t kTerminated = 1, kServerDied = uint64_t{1} << 32;  // in the eventfd's sum

void onSignal(int signal) {
  const int saved = errno;
  const uint64_t which = signal == kServerDiedSignal ? kServerDied : kTerminated;
  if (write(signalDescriptor, &which, sizeof which) < 0) _exit(WorkerProcess::kExitStopped);
  errno = saved;
}

bool sendReport(int descriptor, capnp::MessageBuilder& message, int flags = 0) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  while (::send(descriptor, bytes.begin(), bytes.size(), MSG_NOSIGNAL | flags) < 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

}  // namespace

bool isControlSocket(int descriptor) {
  int type = 0;
  socklen_t bytes = sizeof type;
  return getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_SEQPACKET;
}

WorkerProcess::Control::Control(int from) : socket(from) {
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
  // A server that is stopped reads nothing: no report waits for it longer than a request for memory does.
  const timeval bound{kMemoryBound.count(), 0};
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound);
}

WorkerProcess::Control::~Control() { close(socket); }

WorkerProcess::WorkerProcess(int descriptor, uint64_t rowsHash) : rowsHash_(rowsHash) {
  if (!isControlSocket(descriptor))
    throw std::runtime_error("descriptor " + std::to_string(descriptor) +
                             " is not the server's socket: gpupool-worker is started by gpupool-server");
  control_ = std::make_shared<const Control>(descriptor);
}

std::shared_ptr<const WorkerProcess::Control> WorkerProcess::control() const {
  std::lock_guard lock(controlMutex_);
  return control_;
}

WorkerProcess::~WorkerProcess() {
  if (watcher_.joinable()) {
    const uint64_t one = 1;
    if (write(done_, &one, sizeof one) < 0) _exit(kExitStopped);
    watcher_.join();
    signal(SIGTERM, SIG_DFL);
    signal(kServerDiedSignal, SIG_DFL);
    close(signalDescriptor);
    signalDescriptor = -1;
  }
  if (done_ >= 0) close(done_);
  if (news_ >= 0) close(news_);
  if (client_ >= 0) close(client_);
  if (clientKept_ >= 0) close(clientKept_);
}

// One report of this worker; `fill` says what.
template <class Fill>
bool WorkerProcess::report(Fill&& fill, int flags) const {
  return report(*control(), fill, flags);
}

template <class Fill>
bool WorkerProcess::report(const Control& server, Fill&& fill, int flags) const {
  capnp::MallocMessageBuilder message;
  auto report = message.initRoot<schema::WorkerReport>();
  report.setRowsHash(rowsHash_);
  fill(report);
  return sendReport(server.socket, message, flags);
}

bool WorkerProcess::reportReady(const std::string& driverPath, std::span<const std::string> walls) {
  return report([&](auto& to) {
    to.setDriver(driverPath);
    schema::write(walls, to.initWalls(static_cast<unsigned>(walls.size())));
    to.setReady();
  });
}

bool WorkerProcess::reportDevices(const std::string& driverPath, std::span<const Device> devices) {
  return report([&](auto& to) {
    to.setDriver(driverPath);
    auto list = to.initDevices(static_cast<unsigned>(devices.size()));
    for (unsigned i = 0; i < devices.size(); ++i) schema::write(devices[i], list[i]);
  });
}

bool WorkerProcess::reportFailed(const std::string& text) {
  return report([&](auto& to) { to.setFailed(text); });
}

bool WorkerProcess::reportEnded(const std::string& text) {
  return report([&](auto& to) { to.setEnded(text); });
}

bool WorkerProcess::reportLost(uint32_t ordinal, const std::string& error) {
  {
    std::lock_guard lock(saidMutex_);
    saidLost_[ordinal] = error;
  }
  return report([&](auto& to) {
    auto lost = to.initLost();
    lost.setOrdinal(ordinal);
    lost.setText(error);
  });
}

bool WorkerProcess::reportSuspended(const SuspendOutcome& outcome) {
  {
    std::lock_guard lock(saidMutex_);
    saidSuspended_ = outcome;
    if (changes_ != 0) --changes_;
  }
  return sendSuspended(outcome);
}

bool WorkerProcess::sendSuspended(const SuspendOutcome& outcome) const {
  return report([&](auto& to) { writeOutcome(outcome, to.initSuspended()); });
}

bool WorkerProcess::reportMoved(const MoveOutcome& outcome) {
  return report([&](auto& to) {
    auto moved = to.initMoved();
    moved.setError(outcome.error);
    moved.setMovedBytes(outcome.movedBytes);
    moved.setDrainMs(outcome.drainMs);
    moved.setPauseMs(outcome.pauseMs);
  });
}

bool WorkerProcess::reportRebuilt(const std::string& error) {
  return report([&](auto& to) { to.setRebuilt(error); });
}

bool WorkerProcess::reportDisturb() {
  return report([&](auto& to) { to.setDisturb(); });
}

bool WorkerProcess::reportActivity(Activity activity) {
  static_assert(static_cast<int>(schema::Activity::BUSY) == static_cast<int>(Activity::busy) &&
                static_cast<int>(schema::Activity::QUIET) == static_cast<int>(Activity::quiet) &&
                static_cast<int>(schema::Activity::WAITING) == static_cast<int>(Activity::waiting));
  {
    std::lock_guard lock(saidMutex_);
    saidActivity_ = activity;
  }
  return report([&](auto& to) { to.setActivity(static_cast<schema::Activity>(activity)); });
}

bool WorkerProcess::reportHindrances(std::span<const std::string> reasons) {
  {
    std::lock_guard lock(saidMutex_);
    saidHindrances_.assign(reasons.begin(), reasons.end());
  }
  return report(
      [&](auto& to) { schema::write(reasons, to.initHindrances(static_cast<unsigned>(reasons.size()))); });
}

bool WorkerProcess::reportLog(const ClientLog& log) {
  {
    std::lock_guard lock(saidMutex_);
    saidLog_ = log;
  }
  return report([&](auto& to) {
    auto said = to.initLog();
    said.setFrameBytes(log.frameBytes);
    said.setPayloadBytes(log.payloadBytes);
    said.setWanted(log.wanted);
    said.setObstacle(log.obstacle);
  });
}

bool WorkerProcess::reportCounts(const SessionCounts& counts) {
  const bool told = report(
      [&](auto& to) {
        auto said = to.initCounts();
        said.setCalls(counts.calls);
        said.setAwaited(counts.awaited);
        said.setToDeviceBytes(counts.toDeviceBytes);
        said.setFromDeviceBytes(counts.fromDeviceBytes);
      },
      MSG_DONTWAIT);
  std::lock_guard lock(saidMutex_);
  if (told) saidCounts_ = counts;
  return told;
}

// A server that is away comes back within awayBound_, or the session ends: that wait is the watcher's to end.
void WorkerProcess::awaitServer(std::unique_lock<std::mutex>& lock, uint64_t generation,
                                const std::function<bool()>& heard) {
  auto bound = std::chrono::steady_clock::now() + kMemoryBound;
  while (!heard() && generation_ == generation && !stopping()) {
    if (answered_.wait_until(lock, bound) == std::cv_status::no_timeout) continue;
    if (!away_) return;
    bound += kMemoryBound;
  }
}

MemoryAnswer WorkerProcess::takeMemory(uint32_t place, uint64_t bytes) {
  std::unique_lock lock(memoryMutex_);
  for (;;) {
    tellShares();  // what was given back there is free for this
    const uint64_t ticket = nextTicket_++, generation = generation_;
    const uint64_t owed = std::exchange(owed_[place], 0);
    Asked& asked = asked_[ticket];
    asked = {place, bytes};
    const auto server = control();
    lock.unlock();
    const bool sent = report(*server, [&](auto& to) {
      auto request = to.initMemory();
      request.setTicket(ticket);
      request.setPlace(place);
      request.setTake(bytes);
      request.setGive(owed);
    });
    lock.lock();
    if (!sent && generation_ == generation) owed_[place] += owed;
    const auto heard = [&] { return asked.answer.has_value(); };
    awaitServer(lock, generation, heard);
    if (!heard() && generation_ != generation) {  // the server that was asked is no more
      asked_.erase(ticket);
      continue;
    }
    // The refusal is the session's end: its client first hears why.
    if (!heard())
      answered_.wait_until(lock, std::chrono::steady_clock::now() + kMemoryBound,
                           [&] { return heard() || told_; });
    if (heard()) {
      MemoryAnswer answer = std::move(*asked.answer);
      asked_.erase(ticket);
      return answer;
    }
    asked.abandoned = true;
    return {false, false, 0, stopping() || !sent ? "the server is gone" : "the server does not answer"};
  }
}

// Never waits: what a server that is stopped does not take now goes with the next word to it.
void WorkerProcess::giveMemory(uint32_t place, uint64_t bytes) {
  std::lock_guard lock(memoryMutex_);
  uint64_t& taken = taken_[place];
  taken -= std::min(taken, bytes);
  uint64_t& owed = owed_[place] += bytes;
  const bool sent = report(
      [&](auto& to) {
        auto request = to.initMemory();
        request.setPlace(place);
        request.setGive(owed);
      },
      MSG_DONTWAIT);
  if (sent) owed = 0;
}

void WorkerProcess::inheritMemory(uint32_t place, uint64_t bytes) {
  std::lock_guard lock(memoryMutex_);
  taken_[place] += bytes;
}

void WorkerProcess::disinheritMemory(uint32_t place, uint64_t bytes) {
  std::lock_guard lock(memoryMutex_);
  uint64_t& taken = taken_[place];
  taken -= std::min(taken, bytes);
}

void WorkerProcess::answer(uint64_t ticket, MemoryAnswer memory) {
  std::unique_lock lock(memoryMutex_);
  const auto found = asked_.find(ticket);
  if (found == asked_.end()) return;
  if (memory.granted) taken_[found->second.place] += found->second.bytes;
  if (!found->second.abandoned) {
    found->second.answer = std::move(memory);
    lock.unlock();
    answered_.notify_all();
    return;
  }
  const Asked late = found->second;
  asked_.erase(found);
  lock.unlock();
  if (memory.granted) giveMemory(late.place, late.bytes);
}

void WorkerProcess::watchServer(std::function<void(const std::string&)> stop, std::chrono::milliseconds grace,
                                int clientGone) {
  done_ = eventfd(0, EFD_CLOEXEC);
  news_ = eventfd(0, EFD_CLOEXEC);
  signalDescriptor = eventfd(0, EFD_CLOEXEC);
  if (done_ < 0 || news_ < 0 || signalDescriptor < 0)
    throw std::runtime_error("eventfd: " + std::string(strerror(errno)));
  struct sigaction action{};
  action.sa_handler = onSignal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(kServerDiedSignal, &action, nullptr);
  watcher_ =
      std::thread([this, stop = std::move(stop), grace, clientGone] { watch(stop, grace, clientGone); });
}

bool WorkerProcess::endsWithin(std::chrono::milliseconds time) const {
  const auto deadline = std::chrono::steady_clock::now() + time;
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd done{done_, POLLIN, 0};
    if (poll(&done, 1, static_cast<int>(std::max<int64_t>(left.count(), 0))) > 0) return true;
    if (left.count() <= 0) return false;
  }
}

void WorkerProcess::watchClient(int clientGone) {
  clientGone_.store(clientGone);
  const uint64_t one = 1;
  if (write(news_, &one, sizeof one) < 0) GPUPOOL_WARNING("the client is not watched: %s", strerror(errno));
}

// Why the session is to end; empty: nobody needs to know any more.
std::string WorkerProcess::awaitEnd(std::chrono::milliseconds grace, int clientGone) {
  pollfd waiting[5] = {{-1, POLLIN, 0},
                       {signalDescriptor, POLLIN, 0},
                       {done_, POLLIN, 0},
                       {clientGone, POLLIN, 0},
                       {news_, POLLIN, 0}};
  std::string reason;
  while (reason.empty()) {
    waiting[0].fd = away_ ? door_ : control()->socket;
    const bool untold = hasUntold_ && !away_;
    waiting[0].events = untold ? POLLIN | POLLOUT : POLLIN;
    const int ready = poll(waiting, 5, untold ? kTellAgainMs : awayLeft());
    if (untold) {
      std::lock_guard lock(memoryMutex_);
      tellShares();
    }
    if (ready == 0 && away_) return endAway();
    if (ready <= 0) continue;
    if (waiting[2].revents != 0) return "";
    if (waiting[4].revents != 0) {
      uint64_t count = 0;
      if (::read(news_, &count, sizeof count) < 0) waiting[4].fd = -1;
      waiting[3] = {clientGone_.load(), POLLIN, 0};
    }
    if (waiting[3].revents != 0) {
      if (endsWithin(grace)) return "";
      GPUPOOL_WARNING("the client is gone, and the driver does not return from a call");
      reportEnded("client gone; the driver did not come back from a call");
      _exit(kExitStopped);
    }
    if (waiting[1].revents != 0) reason = heardSignal();
    if ((waiting[0].revents & ~POLLOUT) == 0) continue;
    if (away_) {
      hearDoor();
      continue;
    }
    std::string ordered = obey();
    if (ordered == kServerDiedText && reason.empty()) ordered = beginAway();
    if (reason.empty()) reason = std::move(ordered);
  }
  return reason;
}

// What the death of the process that has started this one means, its socket tells where there is a door: it
// may be the spawner's alone.
std::string WorkerProcess::heardSignal() const {
  uint64_t which = 0;
  const bool known = ::read(signalDescriptor, &which, sizeof which) == ssize_t{sizeof which};
  if (!known || which % kServerDied != 0) return "the GPU server is shutting down";
  return door_ >= 0 ? "" : kServerDiedText;
}

void WorkerProcess::watch(const std::function<void(const std::string&)>& stop,
                          std::chrono::milliseconds grace, int clientGone) {
  const std::string reason = awaitEnd(grace, clientGone);
  if (reason.empty()) return;
  {
    std::lock_guard lock(memoryMutex_);
    stopping_.store(true, std::memory_order_release);
  }
  answered_.notify_all();
  GPUPOOL_INFO("stopping: %s", reason.c_str());
  // On a thread of its own, so that a session that cannot even be told to stop does not outlive the grace.
  const auto deadline = std::chrono::steady_clock::now() + grace;
  // Not std::async: its function runs within pthread_once, and ThreadSanitizer lets no process end from
  // there.
  std::promise<void> telling;
  auto told = telling.get_future();
  std::thread teller([&] {
    try {
      stop(reason);
      std::lock_guard lock(memoryMutex_);
      told_ = true;
      answered_.notify_all();
      telling.set_value();
    } catch (...) {
      telling.set_exception(std::current_exception());
    }
  });
  if (told.wait_until(deadline) == std::future_status::ready) {
    teller.join();
    try {
      told.get();
    } catch (const std::exception& error) {
      GPUPOOL_ERROR("the session could not be asked to stop: %s", error.what());
    }
    if (endsWithin(std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())))
      return;
  }
  GPUPOOL_WARNING("the session did not end in time after: %s", reason.c_str());
  _exit(kExitStopped);
}

}  // namespace gpupool::server
