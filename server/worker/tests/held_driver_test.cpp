// The driver holds a context until the device is idle, and the device waits for a host function: what that
// function needs still comes through.
#include "server/worker/tests/client.h"

#include <algorithm>

using namespace gpupool;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

namespace {

// A driver of which some functions do not return until let go.
class HeldDriver {
 public:
  HeldDriver() : driver_(server::Driver::load(SOFT_DRIVER)) {
    held() = false;
    // The tests' own table, that nobody reads yet.
    auto& table = const_cast<server::Driver&>(*driver_);
    real() = &softDriver();
    table.cuMemsetD8Async = [](CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
      wait();
      return real()->cuMemsetD8Async(to, value, bytes, stream);
    };
    table.cuMemHostRegister_v2 = [](void* memory, size_t bytes, unsigned flags) {
      wait();
      return real()->cuMemHostRegister_v2(memory, bytes, flags);
    };
    table.cuStreamQuery = [](CUstream stream) {
      wait();
      return real()->cuStreamQuery(stream);
    };
  }
  const server::Driver& operator*() const { return *driver_; }
  static void hold() { held() = true; }
  static void letGo() {
    held() = false;
    held().notify_all();
  }
  static unsigned inside() { return waiting(); }

 private:
  static std::atomic<bool>& held() {
    static std::atomic<bool> is{false};
    return is;
  }
  static std::atomic<unsigned>& waiting() {
    static std::atomic<unsigned> threads{0};
    return threads;
  }
  static const server::Driver*& real() {
    static const server::Driver* driver = nullptr;
    return driver;
  }
  static void wait() {
    ++waiting();
    held().wait(true);
    --waiting();
  }
  std::unique_ptr<const server::Driver> driver_;
};

constexpr uint64_t kPinned = 64 << 10;  // offset in the arena

Arguments hostMap(uint64_t address) { return Arguments().value(address).value(8192).value(0).value(1); }

struct Held : HeldDriver {
  Held() : client(**this) {
    client.open();
    REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
                .status() == CUDA_SUCCESS);
    pinned = client.space().hostBase + kPinned;
    REQUIRE(client.await(ROW("sessionHostMap"), hostMap(pinned)).status() == CUDA_SUCCESS);
  }
  ~Held() { letGo(); }
  CUresult apply(uint64_t offset, uint64_t value) {
    schema::ByteBuffer run;
    run.value(offset);
    run.blob(&value, sizeof value);
    return client
        .awaitAside(ROW("sessionMirrorApply"),
                    Arguments().value(pinned).blob(run.span().data(), run.size()).value(run.size()))
        .status();
  }
  // The bytes of the runs in which the worker's copy has changed.
  std::vector<std::byte> collect() {
    auto answer = client.awaitAside(
        ROW("sessionMirrorCollect"),
        Arguments().value(pinned).value(64).value(4096).value(0).value(1).value(1).value(4096));
    REQUIRE(answer.status() == CUDA_SUCCESS);
    return answer.outputs;
  }

  Client client;
  uint64_t pinned = 0;
};

}  // namespace

TEST_CASE("aside calls pass a frame that stands still in the driver") {
  Held held;
  Client& client = held.client;
  held.hold();
  uint64_t last = 0;
  SECTION("a copy or the like") {
    last = client.post(ROW("cuMemsetD8Async"),
                       Arguments().value(client.hello.stagingAddress).value(7).value(64).value(kStream),
                       Frame::kAwait);
  }
  SECTION("making pinned memory") {
    last = client.post(ROW("sessionHostMap"), hostMap(held.pinned + (1 << 20)), Frame::kAwait);
  }
  REQUIRE(eventually([&] { return held.inside() == 1; }));
  CHECK(held.apply(16, 0x1122334455667788) == CUDA_SUCCESS);
  CHECK(*reinterpret_cast<uint64_t*>(held.pinned + 16) == 0x1122334455667788);  // the worker is this process
  *reinterpret_cast<uint64_t*>(held.pinned + 32) = 0x0102030405060708;
  const auto changed = held.collect();
  const uint64_t wanted = 0x0102030405060708;
  CHECK(std::search(changed.begin(), changed.end(), reinterpret_cast<const std::byte*>(&wanted),
                    reinterpret_cast<const std::byte*>(&wanted + 1)) != changed.end());
  CHECK(client.awaitAside(ROW("sessionOutput"), {}).status() == CUDA_SUCCESS);
  CHECK(held.inside() == 1);
  held.letGo();
  auto answer = client.receive();
  REQUIRE(answer);
  CHECK(answer->header.seq == last);
  CHECK(answer->status() == CUDA_SUCCESS);
}

TEST_CASE("no context is asked for faults while it ends") {
  static std::atomic<bool> ending{false};
  static std::atomic<unsigned> asked{0}, askedMeanwhile{0};
  softDriver();  // which it is, initialised
  auto driver = server::Driver::load(SOFT_DRIVER);
  auto& table = const_cast<server::Driver&>(*driver);
  table.cuStreamQuery = [](CUstream stream) {
    ++asked;
    if (ending) ++askedMeanwhile;
    return softDriver().cuStreamQuery(stream);
  };
  table.cuDevicePrimaryCtxReset_v2 = [](CUdevice device) {
    ending = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CUresult status = softDriver().cuDevicePrimaryCtxReset_v2(device);
    ending = false;
    return status;
  };
  Client client(*driver);
  client.open();
  client.tell(NoticeType::watch, schema::WordUpdate{5, 7});  // never reached: faults are asked for
  for (int i = 0; i < 3; ++i) {
    const unsigned before = asked;
    CHECK(eventually([&] { return asked > before; }));
    client.context = 0;
    CHECK(client.await(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)).status() == CUDA_SUCCESS);
    CHECK(client.await(ROW("cuDevicePrimaryCtxRetain"), Arguments().value(kContext).value(0)).status() ==
          CUDA_SUCCESS);
  }
  CHECK(askedMeanwhile == 0);
}

TEST_CASE("the end of a context takes nothing from the work of another, and waits for none of it") {
  constexpr uint64_t kOther = makeHandle(handles::Kind::context, 2, 1);
  constexpr uint64_t kOthers = makeHandle(handles::Kind::stream, 2, 1);
  const auto stream = [](uint64_t name) { return Arguments().value(name).value(1).value(0); };
  Client client;
  client.open();  // the primary context is the first one: what it registers goes with it
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), stream(kStream)).status() == CUDA_SUCCESS);
  client.context = 0;
  REQUIRE(client.await(ROW("cuCtxCreate_v2"), Arguments().value(kOther).value(0).value(0)).status() ==
          CUDA_SUCCESS);
  client.context = kOther;
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), stream(kOthers)).status() == CUDA_SUCCESS);
  client.post(ROW("sessionGate"), Arguments().value(kOthers).value(9).value(1));
  client.post(ROW("sessionWord"), Arguments().value(kOthers).value(5).value(7));
  client.context = 0;
  REQUIRE(client.await(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)).status() == CUDA_SUCCESS);
  CHECK(client.word(5) == 0);
  REQUIRE(client.awaitAside(ROW("sessionGateOpen"), Arguments().value(9).value(1)).status() == CUDA_SUCCESS);
  CHECK(eventually([&] { return client.word(5) == 7; }));
  client.context = kOther;
  CHECK(client.await(ROW("sessionDrain"), Arguments().value(kOthers).value(1)).status() == CUDA_SUCCESS);
  CHECK(client.sticky() == CUDA_SUCCESS);
}

TEST_CASE("words are told while the driver keeps whoever asks for faults") {
  Held held;
  Client& client = held.client;
  held.hold();
  client.tell(NoticeType::watch, schema::WordUpdate{5, 7});
  REQUIRE(eventually([&] { return held.inside() == 1; }));
  const uint32_t bell = client.bell();
  client.post(ROW("sessionWord"), Arguments().value(kStream).value(5).value(7));
  CHECK(eventually([&] { return client.bell() != bell; }));
  CHECK(held.inside() == 1);
}
