// Client and worker on one host: rings and regions in memfds, handed over the bootstrap socket, and one
// thread per connection that watches this socket: for announced regions, and for the death of the peer. Both
// threads count in shared memory while their process runs, so that a stopped one can be told from a busy one.

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>

#include <cerrno>
#include <stdexcept>

#include "transports/bootstrap.h"
#include "transports/implementations.h"
#include "transports/last_words.h"
#include "transports/ring_connection.h"

namespace gpupool::transport {

namespace {

constexpr uint32_t kShmProtocol = 1;
// How long a record may take to leave: the peer's watcher always reads, so longer means that it does not run.
constexpr std::chrono::seconds kSendBound{2};
// A transfer may name a region whose announcement is still on the socket.
constexpr std::chrono::seconds kRegionBound{2};
// Signs of life follow one another by so much at most.
constexpr std::chrono::milliseconds kBeat{500};
constexpr std::chrono::milliseconds kLastWordsStep{20};

class Shm final : public RingConnection {
 public:
  Shm(int bootstrap, const Options& options, bool worker)
      : bootstrap_(bootstrap), stop_(newEvent()), side_(worker ? 0 : 1), stallTimeout_(options.stallTimeout) {
    TimeLeft time(options.setupTimeout);
    worker ? acceptPeer(options, time) : connectPeer(time);
    if (pid_t process = bootstrap_.peerProcess(); process > 0) {
      // A child forked by the peer may keep its socket open; this ends with the process itself. May be
      // refused.
      process_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
    }
    watcher_ = startQuietThread([this] { watch(); });
  }

  ~Shm() override {
    if (abandoned_) return;
    close();
    signalEvent(stop_);
    watcher_->join();
  }

  Region share(std::shared_ptr<SharedMemory> memory) override;
  void unshare(Region region) override;
  std::shared_ptr<SharedMemory> map(Region remote, void* fixedAddress, Deadline deadline) override;
  bool mapsMemory() const override { return true; }
  Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) override;
  Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) override;
  bool wait(Transfer transfer, Deadline) override { return transfer == 0; }

  void close() override {
    if (!closeHere()) return;
    if (peer() == Peer::alive) bootstrap_.send({.kind = RecordKind::goodbye}, -1, TimeLeft(kSendBound));
    markGone(Peer::closed, "this side closed the connection");
    local_.clear();
  }
  void sever() override {
    markGone(Peer::lost, "the wire was cut");
    ::shutdown(bootstrap_.descriptor(), SHUT_RDWR);
  }
  void abandon() override {
    abandoned_ = true;
    forget();
    [[maybe_unused]] std::thread* leaked = watcher_.release();  // it does not exist in this process
    bootstrap_.abandon();
    stop_.reset();
    process_.reset();
  }
  const char* name() const override { return "shm"; }

 private:
  void acceptPeer(const Options& options, TimeLeft& time);
  void connectPeer(TimeLeft& time);
  void watch();
  void beat();
  bool readRecords();
  std::string lastWords(const Record& record);
  std::shared_ptr<SharedMemory> reachable(Region remote, uint64_t offset, size_t bytes);

  Bootstrap bootstrap_;
  Descriptor stop_;
  Descriptor process_;  // pidfd of the peer, if there is one
  std::unique_ptr<std::thread> watcher_;
  bool abandoned_ = false;
  const int side_;
  const std::chrono::milliseconds stallTimeout_;

  // The watcher's.
  uint64_t peerBeats_ = 0;  // as last seen
  Clock::time_point lastBeat_ = Clock::now();
  std::chrono::nanoseconds silence_{0};
};

void Shm::acceptPeer(const Options& options, TimeLeft& time) {
  RingMemory::Sizes sizes = RingMemory::sizes(options);
  auto backing = SharedMemory::create(RingMemory::totalBytes(sizes));
  Record hello{RecordKind::hello, kShmProtocol, expeditedBarrier(), 0, sizes.ring[0], sizes.ring[1]};
  Record answer;
  Descriptor none;
  if (!bootstrap_.send(hello, backing->descriptor(), time) || !bootstrap_.receive(answer, none, time)) {
    throw std::runtime_error(time.any() ? "shm: the client went away during the greeting"
                                        : "shm: the client did not answer the worker's greeting");
  }
  if (answer.kind != RecordKind::hello || answer.id != kShmProtocol) {
    throw std::runtime_error("shm: the client speaks another version of the transport");
  }
  auto memory = std::make_shared<RingMemory>(backing->descriptor(), sizes);
  attach(std::move(memory), 0, kChannels, answer.generation == 1 && expeditedBarrier());
}

void Shm::connectPeer(TimeLeft& time) {
  Record hello;
  Descriptor rings;
  if (!bootstrap_.receive(hello, rings, time)) {
    throw std::runtime_error("shm: no greeting from the worker");
  }
  if (hello.kind == RecordKind::lastWords) throw std::runtime_error(lastWords(hello));
  if (hello.kind != RecordKind::hello || hello.id != kShmProtocol || !rings) {
    throw std::runtime_error("shm: the worker speaks another version of the transport");
  }
  Options offered;
  offered.callBytes = hello.size;
  offered.controlBytes = hello.extra;
  RingMemory::Sizes sizes = RingMemory::sizes(offered);
  auto backing = SharedMemory::adopt(rings.release(), RingMemory::totalBytes(sizes));
  auto memory = std::make_shared<RingMemory>(backing->descriptor(), sizes);
  if (!bootstrap_.send({RecordKind::hello, kShmProtocol, expeditedBarrier()}, -1, time)) {
    throw std::runtime_error("shm: the worker went away during the greeting");
  }
  attach(std::move(memory), kChannels, 0, hello.generation == 1 && expeditedBarrier());
}

// --- the watcher ---

void Shm::watch() {
  Deadline processEnded = kForever;  // and how long the server's last words are waited for
  for (;;) {
    const bool ended = processEnded != kForever;
    pollfd watched[3] = {{stop_.get(), POLLIN, 0},
                         {bootstrap_.descriptor(), POLLIN, 0},
                         {ended ? -1 : process_.get(), POLLIN, 0}};
    auto beat = std::clamp(stallTimeout_ / 4, std::chrono::milliseconds(1), kBeat);
    if (ended) beat = std::min(beat, kLastWordsStep);
    if (poll(watched, 3, static_cast<int>(beat.count())) < 0) continue;  // EINTR; -1 is ignored
    if (watched[0].revents) return;
    this->beat();
    try {
      if (watched[1].revents && !readRecords()) return;
      if (watched[2].revents) {
        if (!readRecords()) return;
        processEnded = Clock::now() + (side_ == 1 ? kLastWordsBound : std::chrono::milliseconds(0));
      }
      if (Clock::now() >= processEnded) {
        markGone(Peer::lost, "the peer's process ended");
        return;
      }
    } catch (const std::exception& error) {
      markGone(Peer::lost, error.what());
      return;
    }
  }
}

// Only time in which this process ran itself counts as the peer's silence: both may have been stopped.
void Shm::beat() {
  const Clock::time_point now = Clock::now();
  const auto passed = std::min<std::chrono::nanoseconds>(now - lastBeat_, 2 * kBeat);
  lastBeat_ = now;
  memory_->beats(side_).fetch_add(1, std::memory_order_relaxed);
  const uint64_t seen = memory_->beats(1 - side_).load(std::memory_order_relaxed);
  silence_ = seen != peerBeats_ ? std::chrono::nanoseconds(0) : silence_ + passed;
  peerBeats_ = seen;
  if (silence_ < stallTimeout_) return;
  markGone(Peer::lost, "nothing was heard from the peer's process for " +
                           std::to_string(stallTimeout_.count()) + " ms (stopped, or starved)");
}

// False: there is nothing more to watch, and the peer was marked.
bool Shm::readRecords() {
  Record record;
  Descriptor attached;
  for (;;) {
    switch (bootstrap_.poll(record, attached)) {
      case Bootstrap::Got::nothing:
        return true;
      case Bootstrap::Got::end:
        markGone(Peer::lost, "the peer's process ended or dropped its socket");
        return false;
      case Bootstrap::Got::record:
        break;
    }
    if (record.kind == RecordKind::goodbye) {
      markGone(Peer::closed, "the peer closed the connection");
      return false;
    }
    if (record.kind == RecordKind::lastWords) {
      markGone(Peer::lost, lastWords(record));
      return false;
    }
    if (!applyRecord(*remote_, record, std::move(attached))) {
      markGone(Peer::lost, "the peer broke the protocol of the bootstrap socket");
      return false;
    }
  }
}

// The server sends them in one piece.
std::string Shm::lastWords(const Record& record) {
  std::byte text[256];
  LastWords words;
  words.take(std::as_bytes(std::span(&record, 1)));
  words.take({text, bootstrap_.read(text)});
  return words.text().empty() ? "the peer's process ended" : words.text();
}

// --- regions ---

Region Shm::share(std::shared_ptr<SharedMemory> memory) {
  if (!open() || memory->descriptor() < 0) return {};
  Region region = local_.add(memory);
  if (region == Region{}) return {};
  Record record{RecordKind::region, region.id, region.generation, 0, memory->size()};
  if (memory->isOfFile()) record.kind = RecordKind::file, record.extra = memory->offset();
  if (bootstrap_.send(record, memory->descriptor(), TimeLeft(kSendBound))) return region;
  local_.remove(region);
  markGone(Peer::lost, "the peer does not read its bootstrap socket");
  return {};
}

void Shm::unshare(Region region) {
  if (!local_.remove(region) || !open()) return;
  bootstrap_.send({RecordKind::withdraw, region.id, region.generation}, -1, TimeLeft(kSendBound));
}

std::shared_ptr<SharedMemory> Shm::map(Region remote, void* fixedAddress, Deadline deadline) {
  if (closedHere()) return nullptr;
  auto entry = remote_->wait(remote, deadline);
  if (!entry) return nullptr;
  if (entry->mapping && !fixedAddress) return entry->mapping;
  if (entry->fileOffset && !fixedAddress) return nullptr;
  int descriptor = fcntl(entry->descriptor->get(), F_DUPFD_CLOEXEC, 0);
  if (descriptor < 0) return nullptr;
  try {
    if (entry->fileOffset)
      return SharedMemory::ofFile(descriptor, *entry->fileOffset, entry->size, fixedAddress);
    auto mapping = SharedMemory::adopt(descriptor, entry->size, fixedAddress);
    return fixedAddress ? mapping : remote_->remember(remote, std::move(mapping));
  } catch (const std::exception& error) {
    // What it announced is not what it sent. But a file may have changed since.
    if (!entry->fileOffset) markGone(Peer::lost, error.what());
    return nullptr;
  }
}

std::shared_ptr<SharedMemory> Shm::reachable(Region remote, uint64_t offset, size_t bytes) {
  auto memory = map(remote, nullptr, Clock::now() + kRegionBound);
  return open() && memory && within(memory->size(), offset, bytes) ? memory : nullptr;
}

Transfer Shm::put(const void* local, Region remote, uint64_t offset, size_t bytes) {
  auto memory = reachable(remote, offset, bytes);
  if (!memory) return kRefused;
  copyBytes(memory->data() + offset, local, bytes);
  return 0;
}

Transfer Shm::get(void* local, Region remote, uint64_t offset, size_t bytes) {
  auto memory = reachable(remote, offset, bytes);
  if (!memory) return kRefused;
  copyBytes(local, memory->data() + offset, bytes);
  return 0;
}

}  // namespace

std::unique_ptr<Connection> acceptShm(int bootstrap, const Options& options) {
  return std::make_unique<Shm>(bootstrap, options, true);
}

std::unique_ptr<Connection> connectShm(int bootstrap, const Options& options) {
  return std::make_unique<Shm>(bootstrap, options, false);
}

}  // namespace gpupool::transport
