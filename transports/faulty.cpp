// Wraps another connection for tests: seeded delays and stalls before a message or a transfer leaves or is
// handed up, and the loss of the peer after a number of messages or in the middle of a transfer.

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "base/log.h"
#include "transports/faulty.h"
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
  size_t sizeOf(Region remote, Deadline deadline) override { return inner_->sizeOf(remote, deadline); }
  bool mapsMemory() const override { return inner_->mapsMemory(); }
  Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) override {
    return transfer(bytes, [&](size_t some) { return inner_->put(local, remote, offset, some); });
  }
  Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) override {
    return transfer(bytes, [&](size_t some) { return inner_->get(local, remote, offset, some); });
  }
  bool wait(Transfer transfer, Deadline deadline) override {
    return inner_->wait(transfer, deadline) && transfer != doomed_;
  }

  Peer peer() const override { return inner_->peer(); }
  bool saidReason() const override { return inner_->saidReason(); }
  void setStallTimeout(std::chrono::milliseconds time) override { inner_->setStallTimeout(time); }
  std::string reason() const override { return inner_->reason(); }
  int wakeupDescriptor() const override { return inner_->wakeupDescriptor(); }
  void close() override { inner_->close(); }
  void abandon() override { inner_->abandon(); }
  const char* name() const override { return inner_->name(); }
  Traffic traffic() const override { return inner_->traffic(); }

 private:
  // splitmix64 over an atomic counter: the same seed gives the same sequence, from any mix of threads.
  uint64_t next() {
    uint64_t x = random_.fetch_add(0x9E3779B97F4A7C15u, std::memory_order_relaxed);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  // One in eight is late; all would only be a slow wire.
  void delay() {
    uint64_t limit = static_cast<uint64_t>(faults_.delay.count());
    if (limit == 0 && faults_.stall.count() == 0) return;
    uint64_t draw = next();
    if (limit != 0 && draw % 8 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds((draw >> 8) % (limit + 1)));
    if (draw % 256 == 1) std::this_thread::sleep_for(faults_.stall);
  }
  bool survives() {
    if (faults_.lifetime == 0) return true;
    uint64_t count = messages_.fetch_add(1) + 1;
    if (count == faults_.lifetime + 1) cut("after message", faults_.lifetime);
    return count <= faults_.lifetime;
  }
  // The transfer in whose middle the peer is lost: half of it is begun, and none of it is ever done.
  template <class Move>
  Transfer transfer(size_t bytes, Move move) {
    delay();
    if (faults_.transfers == 0 || transfers_.fetch_add(1) + 1 != faults_.transfers) return move(bytes);
    Transfer half = move(bytes / 2);
    doomed_ = half;
    std::this_thread::sleep_for(std::chrono::microseconds(next() % 4000));  // so far it gets
    cut("in transfer", faults_.transfers);
    return half == 0 ? kRefused : half;
  }
  void cut(const char* where, uint64_t number) {
    GPUPOOL_WARNING("faults: the wire is cut %s %llu (seed %llu)", where,
                    static_cast<unsigned long long>(number), static_cast<unsigned long long>(faults_.seed));
    static_cast<RingConnection&>(*inner_).sever();
  }

  std::unique_ptr<Connection> inner_;
  Faults faults_;
  std::atomic<uint64_t> random_;
  std::atomic<uint64_t> messages_{0}, transfers_{0};
  std::atomic<Transfer> doomed_{kRefused};  // of which half was begun, and may have arrived
};

[[noreturn]] void refuse(const std::string& part) {
  throw std::runtime_error("GPUPOOL_FAULTS: cannot read '" + part +
                           "'; it is like seed=7,delay=200us,stall=20ms,lifetime=1000,transfers=3");
}

uint64_t parseNumber(const std::string& part, const std::string& text, std::string& unit) {
  char* end = nullptr;
  uint64_t number = std::strtoull(text.c_str(), &end, 10);
  unit = end;
  if (end == text.c_str() || text[0] == '-') refuse(part);
  return number;
}

std::chrono::microseconds parseTime(const std::string& part, const std::string& text) {
  std::string unit;
  uint64_t number = parseNumber(part, text, unit);
  if (unit != "us" && unit != "ms") refuse(part);
  return std::chrono::microseconds(unit == "us" ? number : number * 1000);
}

uint64_t parseCount(const std::string& part, const std::string& text) {
  std::string unit;
  uint64_t number = parseNumber(part, text, unit);
  if (!unit.empty()) refuse(part);
  return number;
}

}  // namespace

Faults parseFaults(const std::string& text) {
  Faults faults;
  for (size_t at = 0; at <= text.size();) {
    size_t comma = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, comma - at);
    const size_t equals = std::min(part.find('='), part.size() - 1);
    const std::string name = part.substr(0, equals), value = part.substr(equals + 1);
    if (name == "seed")
      faults.seed = parseCount(part, value);
    else if (name == "delay")
      faults.delay = parseTime(part, value);
    else if (name == "stall")
      faults.stall = parseTime(part, value);
    else if (name == "lifetime")
      faults.lifetime = parseCount(part, value);
    else if (name == "transfers")
      faults.transfers = parseCount(part, value);
    else
      refuse(part);
    at = comma + 1;
  }
  return faults;
}

std::unique_ptr<Connection> faulty(std::unique_ptr<Connection> inner, const Faults& faults) {
  return std::make_unique<Faulty>(std::move(inner), faults);
}

}  // namespace gpupool::transport
