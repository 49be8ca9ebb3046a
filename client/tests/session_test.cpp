// What a worker said last and then went: read all the same, however late the client's threads come to it.
#include "client/session.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "base/reserve.h"
#include "catch.h"
#include "client/order_lock.h"
#include "transports/descriptor.h"
#include "transports/implementations.h"

using namespace gpupool;
using transport::Channel;
using transport::Deadline;
using transport::Peer;
using transport::Region;
using transport::Transfer;

namespace {

using Bytes = std::vector<std::byte>;

template <class... T>
Bytes joined(const T&... parts) {
  Bytes bytes;
  const auto add = [&](const auto& part) {
    const auto* data = reinterpret_cast<const std::byte*>(&part);
    bytes.insert(bytes.end(), data, data + sizeof part);
  };
  (add(parts), ...);
  return bytes;
}

// A worker that sends its messages and closes the connection just when a wait for them is over without one.
class LateWorker final : public transport::Connection {
 public:
  LateWorker(Channel channel, Bytes last) : channel_(channel), last_(std::move(last)) {}
  void goNow() { arrive(); }

  std::byte* reserve(Channel, size_t bytes, Deadline) override {
    if (peer_ != Peer::alive) return nullptr;
    out_.resize(bytes);
    return out_.data();
  }
  void commit(Channel, size_t) override {}
  std::span<const std::byte> receive(Channel channel, Deadline) override {
    if (peer_ == Peer::alive) {
      arrive();
      return {};
    }
    if (channel != channel_ || arrived_.empty()) return {};
    read_ = std::exchange(arrived_, {});
    return read_;
  }
  bool pending(Channel) override { return true; }
  size_t maxMessage(Channel) const override { return 1 << 20; }
  Region share(std::shared_ptr<transport::SharedMemory>) override { return {}; }
  void unshare(Region) override {}
  std::shared_ptr<transport::SharedMemory> map(Region, void*, Deadline) override { return nullptr; }
  bool mapsMemory() const override { return false; }
  Transfer put(const void*, Region, uint64_t, size_t) override { return transport::kRefused; }
  Transfer get(void*, Region, uint64_t, size_t) override { return transport::kRefused; }
  bool wait(Transfer, Deadline) override { return false; }
  Peer peer() const override { return peer_; }
  std::string reason() const override { return peer_ == Peer::alive ? "" : "the peer closed the connection"; }
  int wakeupDescriptor() const override { return -1; }
  void close() override {}
  void abandon() override {}
  const char* name() const override { return "late"; }

 private:
  void arrive() {
    arrived_ = last_;
    peer_ = Peer::closed;
  }

  const Channel channel_;
  const Bytes last_;
  Bytes arrived_, read_, out_;
  Peer peer_ = Peer::alive;
};

Bytes refusal() {
  auto hello = std::make_unique<schema::WorkerHello>();
  hello->protocol = schema::kProtocolVersion;
  hello->status = CUDA_ERROR_OUT_OF_MEMORY;
  std::snprintf(hello->text, sizeof hello->text, "no room");
  return joined(*hello);
}

}  // namespace

namespace gpupool::client {

int sessionDevice(CUdevice device) { return device; }

struct SessionSeam {
  explicit SessionSeam(std::unique_ptr<transport::Connection> connection) {
    session->connection_ = std::move(connection);
    session->words_ = std::make_unique<Words>(nullptr);
  }
  bool greet(CUresult& status, std::string& text) { return session->greet(accepts, status, text); }
  void mapMemory() {
    session->mapsMemory_ = true;
    session->epoch_ = 1;
  }
  static CUresult accepts(const schema::WorkerHello&) { return CUDA_SUCCESS; }
  void await(Session::Waiter& waiter) {
    session->addWaiter(&waiter);
    session->await(waiter);
  }
  void serve() { session->serviceLoop(); }

  std::unique_ptr<Session> session{new Session};
};

}  // namespace gpupool::client

using namespace gpupool::client;

TEST_CASE("a worker's refusal is read though it has closed the connection before the client looks") {
  for (const bool before : {false, true}) {
    auto worker = std::make_unique<LateWorker>(Channel::call, refusal());
    if (before) worker->goNow();
    SessionSeam client(std::move(worker));
    CUresult status = CUDA_SUCCESS;
    std::string text;
    CHECK_FALSE(client.greet(status, text));
    CHECK(status == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(text == "no room");
  }
}

TEST_CASE("a greeting that comes to nothing leaves no address reserved") {
  const auto isFree = [](uint64_t address, size_t bytes) {
    return reserveAt(address, bytes) && munmap(reinterpret_cast<void*>(address), bytes) == 0;
  };
  const auto all = [](const schema::AddressSpace& space) { return space.windowBytes * schema::kMaxDevices; };
  schema::WorkerHello hello;
  hello.protocol = schema::kProtocolVersion;
  hello.status = CUDA_SUCCESS;
  // Under ThreadSanitizer only the last one is there.
  while (hello.space + 1 < schema::kMaxSpaces &&
         !isFree(schema::kSpaces[hello.space].deviceBase, all(schema::kSpaces[hello.space])))
    ++hello.space;
  const schema::AddressSpace& space = schema::kSpaces[hello.space];
  const size_t device = all(space);
  REQUIRE(isFree(space.deviceBase, device));
  SessionSeam client(std::make_unique<LateWorker>(Channel::call, joined(hello)));
  const bool taken = GENERATE(true, false);
  constexpr size_t kPage = 4096;
  if (taken) REQUIRE(reserveAt(space.hostBase, kPage));  // by the application
  client.mapMemory();                                    // which this worker does not have
  CUresult status = CUDA_SUCCESS;
  std::string text;
  CHECK_FALSE(client.greet(status, text));
  INFO(text);
  CHECK((text.find("application") != text.npos) == taken);
  CHECK((text.find("completion words") != text.npos) == !taken);
  CHECK(isFree(space.deviceBase, device));
  if (taken) munmap(reinterpret_cast<void*>(space.hostBase), kPage);
  CHECK(isFree(space.hostBase, space.hostBytes));
}

TEST_CASE("a reply is read though its worker has gone between the wait for it and the look at the worker") {
  schema::Reply reply;
  reply.seq = 7;
  reply.status = CUDA_ERROR_INVALID_VALUE;
  SessionSeam client(std::make_unique<LateWorker>(Channel::call, joined(reply)));
  Session::Waiter waiter;
  waiter.seq = reply.seq;
  client.await(waiter);
  CHECK(waiter.done);
  CHECK(waiter.status == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("why a session ends is read though its worker has gone meanwhile") {
  const schema::Notice notice{schema::NoticeType::failed, 0, 0};
  const schema::FailedBody body{0, CUDA_ERROR_ILLEGAL_ADDRESS, 0};
  SessionSeam client(std::make_unique<LateWorker>(Channel::control, joined(notice, body, uint64_t{0})));
  client.serve();
  CHECK(client.session->words().sticky() == CUDA_ERROR_ILLEGAL_ADDRESS);
}

// Failover waits for threads that may want that lock, and the reply comes behind it.
TEST_CASE("a thread that awaits a reply gives up its order lock for so long") {
  auto [near, far] = transport::loopbackPair({});
  SessionSeam client(std::move(near));
  std::mutex& order = OrderLock::mutex();
  std::atomic<bool> held{false};
  bool heldAgain = false;
  Session::Waiter waiter;
  waiter.seq = 7;
  std::thread awaiting([&] {
    const OrderLock lock;
    held = true;
    client.await(waiter);
    std::thread([&] { heldAgain = !order.try_lock(); }).join();
  });
  const auto until = transport::Clock::now() + std::chrono::seconds(20);
  const auto takes = [&] { return held && order.try_lock(); };
  bool taken = false;
  while (!(taken = takes()) && transport::Clock::now() < until) std::this_thread::yield();
  CHECK(taken);
  if (taken) order.unlock();
  schema::Reply reply;
  reply.seq = waiter.seq;
  const Bytes bytes = joined(reply);
  std::byte* room = far->reserve(Channel::call, bytes.size(), until);
  REQUIRE(room != nullptr);
  std::memcpy(room, bytes.data(), bytes.size());
  far->commit(Channel::call, bytes.size());
  awaiting.join();
  CHECK(waiter.done);
  CHECK(heldAgain);
}
