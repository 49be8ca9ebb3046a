// The choice of a GID, what is worth telling, and the thread that watches adapters which the test commands.
#include <chrono>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "server/fabric/tests/fake_verbs.h"
#include "server/fabric/watch.h"

using namespace gpupool::fabric;
using namespace gpupool::fabric::test;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

Gid gid(uint32_t index, GidType type, std::initializer_list<int> head, std::initializer_list<int> tail = {}) {
  Gid one;
  one.index = index;
  one.type = type;
  size_t at = 0;
  for (int byte : head) one.value[at++] = static_cast<uint8_t>(byte);
  at = one.value.size() - tail.size();
  for (int byte : tail) one.value[at++] = static_cast<uint8_t>(byte);
  return one;
}

const Gid kLinkLocalV1 = gid(0, GidType::ROCE_V1, {0xfe, 0x80}, {1});
const Gid kLinkLocalV2 = gid(1, GidType::ROCE_V2, {0xfe, 0x80}, {1});
const Gid kIpv4V1 = gid(2, GidType::ROCE_V1, {}, {0xff, 0xff, 10, 0, 0, 1});
const Gid kIpv4V2 = gid(3, GidType::ROCE_V2, {}, {0xff, 0xff, 10, 0, 0, 1});
const Gid kIpv6V2 = gid(5, GidType::ROCE_V2, {0x20, 0x01, 0x0d, 0xb8}, {1});

struct Bench {
  explicit Bench(std::chrono::milliseconds period) {
    settings.period = period;
    settings.sysfs = "/nonexistent";
    settings.stopBound = 200ms;
    adapters->change([](Fabric& fabric) { fabric.devices = {adapter("mlx5_0")}; });
    watch = std::make_unique<Watch>(std::make_unique<FakeVerbs>(adapters), settings);
  }
  bool until(const std::function<bool(const Fabric&)>& condition, std::chrono::milliseconds bound = 5s) {
    for (const auto end = Clock::now() + bound; Clock::now() < end; std::this_thread::sleep_for(2ms))
      if (condition(*watch->latest())) return true;
    return false;
  }
  void setPort(PortState state) {
    adapters->change([&](Fabric& fabric) { fabric.devices.at(0).ports.at(0).state = state; });
  }

  std::shared_ptr<Adapters> adapters = std::make_shared<Adapters>();
  Watch::Settings settings;
  std::unique_ptr<Watch> watch;
};

bool isUp(const Fabric& fabric) {
  return fabric.devices.size() == 1 && fabric.devices[0].ports[0].state == PortState::ACTIVE;
}
bool isDown(const Fabric& fabric) {
  return fabric.devices.size() == 1 && fabric.devices[0].ports[0].state == PortState::DOWN;
}

}  // namespace

TEST_CASE("the default GID: RoCE v2 with IPv4, else a routable one, else what there is") {
  CHECK(chooseGid({}) == -1);
  CHECK(chooseGid({kLinkLocalV1, kLinkLocalV2, kIpv4V1, kIpv4V2, kIpv6V2}) == 3);
  CHECK(chooseGid({kLinkLocalV1, kLinkLocalV2, kIpv6V2}) == 5);
  CHECK(chooseGid({kLinkLocalV1, kLinkLocalV2}) == 1);
  CHECK(chooseGid({kIpv4V1}) == 2);
  const Gid first = gid(0, GidType::INFINI_BAND, {0xfe, 0x80}, {1});
  CHECK(chooseGid({first, gid(1, GidType::INFINI_BAND, {0xfe, 0x80}, {2})}) == 0);
}

TEST_CASE("a port with more GIDs than a report holds keeps its default one") {
  auto adapters = std::make_shared<Adapters>();
  adapters->change([](Fabric& fabric) {
    fabric.devices = {adapter("mlx5_0")};
    auto& gids = fabric.devices[0].ports[0].gids;
    for (uint32_t i = 0; i < 200; ++i) gids.push_back(gid(i, GidType::ROCE_V1, {0xfe, 0x80}, {1}));
    gids[150] = gid(150, GidType::ROCE_V2, {}, {0xff, 0xff, 10, 0, 0, 1});
  });
  FakeVerbs verbs(adapters);
  const Fabric fabric = takeInventory(verbs, Sysfs("/nonexistent"), {});
  const Port& port = fabric.devices[0].ports[0];
  CHECK(port.gids.size() == kMaxGids);
  CHECK(port.defaultGid == 150);
  CHECK(port.gids.back().index == 150);
}

TEST_CASE("what is told of a change") {
  Fabric before, after;
  before.devices = {adapter("mlx5_0"), adapter("mlx5_1")};
  after.devices = {adapter("mlx5_0"), adapter("mlx5_2")};
  after.devices[0].ports[0].state = PortState::DOWN;
  const auto list = changes(before, after);
  REQUIRE(list.size() == 3);
  CHECK(list[0].text == "mlx5_1 is gone");
  CHECK(list[0].worse);
  CHECK(list[1].text == "mlx5_0 port 1 is down (was active)");
  CHECK(list[1].worse);
  CHECK(list[2].text == "mlx5_2 is here, port 1 active");
  CHECK_FALSE(list[2].worse);
  const auto back = changes(after, before);
  REQUIRE(back.size() == 3);
  CHECK(back[1].text == "mlx5_0 port 1 is active (was down)");
  CHECK_FALSE(back[1].worse);
  CHECK(changes(before, before).empty());
  after = before;
  after.devices[0].ports[0].lid = 7;
  CHECK(changes(before, after).empty());
  after.devices[0].problem = "cannot be opened";
  CHECK(changes(before, after).at(0).text == "mlx5_0: cannot be opened");
}

TEST_CASE("an event is acted on at once, not when the period is over") {
  Bench bench(1h);
  REQUIRE(bench.until(isUp));
  const auto up = bench.watch->latest();
  CHECK(bench.watch->latest() == up);  // the same object while nothing changes
  bench.setPort(PortState::DOWN);
  bench.adapters->tell();
  CHECK(bench.until(isDown));
  CHECK(bench.watch->latest() != up);
  bench.setPort(PortState::ACTIVE);
  bench.adapters->tell();
  CHECK(bench.until(isUp));
}

TEST_CASE("without an event a change is seen within the period") {
  Bench bench(20ms);
  REQUIRE(bench.until(isUp));
  bench.setPort(PortState::DOWN);
  CHECK(bench.until(isDown));
  bench.adapters->change([](Fabric& fabric) { fabric.devices.clear(); });
  CHECK(bench.until([](const Fabric& fabric) { return fabric.devices.empty(); }));
}

TEST_CASE("a storm of events does not keep a processor busy") {
  Bench bench(1h);
  REQUIRE(bench.until(isUp));
  const int before = bench.adapters->queries();
  const auto end = Clock::now() + 500ms;
  while (Clock::now() < end) {
    bench.adapters->tell();
    std::this_thread::sleep_for(1ms);
  }
  CHECK(bench.adapters->queries() - before > 1);
  CHECK(bench.adapters->queries() - before <= 11);  // 500 ms in steps of 50
}

TEST_CASE("an adapter that does not answer holds up neither who asks nor the end") {
  Bench bench(5ms);
  REQUIRE(bench.until(isUp));
  auto adapters = bench.adapters;
  adapters->stuck.lock();
  std::this_thread::sleep_for(20ms);
  const auto begun = Clock::now();
  CHECK(isUp(*bench.watch->latest()));
  CHECK(Clock::now() - begun < 100ms * gpupool::test::busy());
  bench.watch = nullptr;
  CHECK(Clock::now() - begun < 2s * gpupool::test::busy());
  adapters->stuck.unlock();
  // The thread that was left behind ends now; it holds what it uses.
  for (int i = 0; i < 1000 && adapters.use_count() > 2; ++i) std::this_thread::sleep_for(5ms);
  CHECK(adapters.use_count() == 2);
}

TEST_CASE("a watch without a thread says why, and a library that is not there is no error") {
  CHECK(watchFabric("none", {})->latest()->note == "not looked at (--fabric none)");
  const auto report = watchFabric("libnosuch.so.7", {})->latest();
  CHECK(report->devices.empty());
  CHECK(report->note.find("no RDMA library: libnosuch.so.7") == 0);
}
