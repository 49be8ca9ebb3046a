// Wraps another connection for tests: seeded delays before a message leaves or is handed up, and the loss of
// the peer after a number of messages (both directions of this end counted together).

#include <atomic>
#include <stdexcept>
#include <thread>

#include "transports/ring_connection.h"

namespace gpupool::transport {

namespace {

class Faulty final : public Connection {
 public:
  Faulty(std::unique_ptr<Connection> inner, const Faults& faults)
      : inner_(std::move(inner)), faults_(faults), random_(faults.seed) {
    if (!dynamic_cast<RingConnection*>(inner_.get())) {
      throw std::runtime_error("faulty: cannot wrap a '" + std::string(inner_->name()) + "' connection");
    }
  }

  std::byte* reserve(Channel channel, size_t bytes, Deadline deadline) override {
    return inner_->reserve(channel, bytes, deadline);
  }
  void commit(Channel channel, size_t bytes) override {
    if (!survives()) return;
    delay();
    inner_->commit(channel, bytes);
  }
  std::span<const std::byte> receive(Channel channel, Deadline deadline) override {
    auto message = inner_->receive(channel, deadline);
    if (message.data() == nullptr) return message;
    if (!survives()) return {};
    delay();
    return message;
  }
  bool pending(Channel channel) override { return inner_->pending(channel); }
  size_t maxMessage(Channel channel) const override { return inner_->maxMessage(channel); }

  Region share(std::shared_ptr<SharedMemory> memory) override { return inner_->share(std::move(memory)); }
  void unshare(Region region) override { inner_->unshare(region); }
  std::shared_ptr<SharedMemory> map(Region remote, void* fixedAddress, Deadline deadline) override {
    delay();
    return inner_->map(remote, fixedAddress, deadline);
  }
  bool mapsMemory() const override { return inner_->mapsMemory(); }
  Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) override {
    delay();
    return inner_->put(local, remote, offset, bytes);
  }
  Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) override {
    delay();
    return inner_->get(local, remote, offset, bytes);
  }
  bool wait(Transfer transfer, Deadline deadline) override { return inner_->wait(transfer, deadline); }

  Peer peer() const override { return inner_->peer(); }
  std::string reason() const override { return inner_->reason(); }
  int wakeupDescriptor() const override { return inner_->wakeupDescriptor(); }
  void close() override { inner_->close(); }
  void abandon() override { inner_->abandon(); }
  const char* name() const override { return inner_->name(); }

 private:
  // splitmix64 over an atomic counter: the same seed gives the same sequence, from any mix of threads.
  uint64_t next() {
    uint64_t x = random_.fetch_add(0x9E3779B97F4A7C15u, std::memory_order_relaxed);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  // One message in eight is late; all would only be a slow wire.
  void delay() {
    uint64_t limit = static_cast<uint64_t>(faults_.delay.count());
    if (limit == 0) return;
    uint64_t draw = next();
    if (draw % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds((draw >> 3) % (limit + 1)));
  }
  bool survives() {
    if (faults_.lifetime == 0) return true;
    uint64_t count = messages_.fetch_add(1) + 1;
    if (count == faults_.lifetime + 1) static_cast<RingConnection&>(*inner_).sever();
    return count <= faults_.lifetime;
  }

  std::unique_ptr<Connection> inner_;
  Faults faults_;
  std::atomic<uint64_t> random_;
  std::atomic<uint64_t> messages_{0};
};

}  // namespace

std::unique_ptr<Connection> faulty(std::unique_ptr<Connection> inner, const Faults& faults) {
  return std::make_unique<Faulty>(std::move(inner), faults);
}

}  // namespace gpupool::transport
