// Both ends in one process: the rings and tables of shm without the socket. For unit tests.

#include <fcntl.h>

#include <stdexcept>

#include "transports/implementations.h"
#include "transports/ring_connection.h"

namespace gpupool::transport {

namespace {

class Loopback;

// How one end reaches the other; cleared when either goes.
struct Wire {
  std::mutex mutex;
  Loopback* ends[2] = {nullptr, nullptr};
};

class Loopback final : public RingConnection {
 public:
  Loopback(std::shared_ptr<Wire> wire, int end, std::shared_ptr<RingMemory> memory)
      : wire_(std::move(wire)), end_(end) {
    attach(std::move(memory), end == 0 ? 0 : kChannels, end == 0 ? kChannels : 0, expeditedBarrier());
    wire_->ends[end] = this;
  }
  ~Loopback() override {
    if (abandoned_) return;
    close();
    std::lock_guard lock(wire_->mutex);
    wire_->ends[end_] = nullptr;
  }

  Region share(std::shared_ptr<SharedMemory> memory) override {
    if (!open() || memory->descriptor() < 0) return {};
    Region region = local_.add(memory);
    std::optional<uint64_t> fileOffset;
    if (memory->isOfFile()) fileOffset = memory->offset();
    withOther(
        [&](Loopback& other) { other.remote_->announce(region, memory->size(), {}, memory, fileOffset); });
    return region;
  }
  void unshare(Region region) override {
    if (!closedHere() && local_.remove(region)) {
      withOther([&](Loopback& other) { other.remote_->withdraw(region); });
    }
  }
  std::shared_ptr<SharedMemory> map(Region remote, void* fixedAddress, Deadline deadline) override {
    if (closedHere()) return nullptr;
    auto entry = remote_->wait(remote, deadline);
    if (!entry) return nullptr;
    if (!fixedAddress) return entry->fileOffset ? nullptr : entry->mapping;
    int descriptor = fcntl(entry->mapping->descriptor(), F_DUPFD_CLOEXEC, 0);
    if (descriptor < 0) return nullptr;
    if (!entry->fileOffset) return SharedMemory::adopt(descriptor, entry->size, fixedAddress);
    try {
      return SharedMemory::ofFile(descriptor, *entry->fileOffset, entry->size, fixedAddress);
    } catch (const std::exception&) {
      return nullptr;
    }
  }
  bool mapsMemory() const override { return true; }
  Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) override {
    auto memory = map(remote, nullptr, Clock::now());
    if (!open() || !memory || !within(memory->size(), offset, bytes)) return kRefused;
    copyBytes(memory->data() + offset, local, bytes);
    return 0;
  }
  Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) override {
    auto memory = map(remote, nullptr, Clock::now());
    if (!open() || !memory || !within(memory->size(), offset, bytes)) return kRefused;
    copyBytes(local, memory->data() + offset, bytes);
    return 0;
  }
  bool wait(Transfer transfer, Deadline) override { return transfer == 0; }

  void close() override {
    if (!closeHere()) return;
    withOther([](Loopback& other) { other.markGone(Peer::closed, "the other end was closed"); });
    markGone(Peer::closed, "this side closed the connection");
    local_.clear();
  }
  void sever() override {
    withOther([](Loopback& other) { other.markGone(Peer::lost, "the wire was cut"); });
    markGone(Peer::lost, "the wire was cut");
  }
  void abandon() override {
    abandoned_ = true;
    forget();
  }
  const char* name() const override { return "loopback"; }

 private:
  template <class Function>
  void withOther(Function function) {
    std::lock_guard lock(wire_->mutex);
    if (Loopback* other = wire_->ends[1 - end_]) function(*other);
  }

  std::shared_ptr<Wire> wire_;
  int end_;
  bool abandoned_ = false;
};

}  // namespace

std::pair<std::unique_ptr<Connection>, std::unique_ptr<Connection>> loopbackPair(const Options& options) {
  RingMemory::Sizes sizes = RingMemory::sizes(options);
  auto backing = SharedMemory::create(RingMemory::totalBytes(sizes));
  auto memory = std::make_shared<RingMemory>(backing->descriptor(), sizes);
  auto wire = std::make_shared<Wire>();
  auto client = std::make_unique<Loopback>(wire, 0, memory);
  auto worker = std::make_unique<Loopback>(wire, 1, memory);
  return {std::move(client), std::move(worker)};
}

}  // namespace gpupool::transport
