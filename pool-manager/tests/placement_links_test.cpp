// Placement by what joins GPUs with one another and with the network: examples, and random servers beside
// every set that they could have given.
#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <tuple>

#include "catch.h"
#include "pool-manager/placement_index.h"
#include "pool-manager/tests/placement_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::pool::test;
using fabric::PciDistance;

namespace {

// Whole GPUs, free unless they are named, joined as said.
ServerUse server(const std::string& name, const std::vector<uint64_t>& joined,
                 const std::vector<uint32_t>& taken = {}) {
  ServerUse use{name, "", {}};
  for (uint32_t i = 0; i < joined.size(); ++i) {
    const bool isFree = std::find(taken.begin(), taken.end(), i) == taken.end();
    use.devices.push_back(device(i, 80, isFree ? 80 : 0));
    use.devices.back().info.uuid = name + std::to_string(i);
    use.devices.back().joined = joined[i];
  }
  return use;
}

// Groups of so many, each joined with each.
std::vector<uint64_t> groups(size_t devices, size_t together) {
  std::vector<uint64_t> joined(devices);
  for (size_t i = 0; i < devices; ++i)
    for (size_t j = 0; j < devices; ++j)
      if (i != j && i / together == j / together) joined[i] |= uint64_t{1} << j;
  return joined;
}

using Ordinals = std::vector<uint32_t>;

// By the index and without it.
Choice placed(const Wish& wish, const std::vector<ServerUse>& servers) {
  PlacementIndex index;
  index.rebuild(servers);
  const Choice choice = place(wish, servers), indexed = place(wish, servers, index);
  CHECK(indexed.server == choice.server);
  CHECK(ordinals(indexed) == ordinals(choice));
  return choice;
}

MoveWish moveOf(size_t count) {
  MoveWish wish;
  wish.from = "from";
  for (uint32_t i = 0; i < count; ++i) {
    LeasedDevice leased{device(i, 80, 0).info, 80 * kGiB};
    leased.info.uuid = "own" + std::to_string(i);
    wish.claims.push_back({leased, 0, 0, false});
  }
  return wish;
}

}  // namespace

TEST_CASE("a lease of several devices gets joined ones, before fuller ones and fuller servers") {
  std::vector<ServerUse> servers = {server("pairs", groups(4, 2), {0})};
  CHECK(ordinals(placed({2, 0, ""}, servers)) == Ordinals{2, 3});
  CHECK(ordinals(placed({1, 0, ""}, servers)) == Ordinals{1});
  CHECK(ordinals(placed({3, 0, ""}, servers)) == Ordinals{1, 2, 3});  // none is joined: as ever
  servers[0].devices[1].freeBytes = 40 * kGiB;
  CHECK(ordinals(placed({2, 10 * kGiB, ""}, servers)) == Ordinals{2, 3});
  CHECK(ordinals(placed({1, 10 * kGiB, ""}, servers)) == Ordinals{1});
  servers.push_back(server("plain", groups(2, 1)));
  CHECK(placed({2, 0, ""}, servers).server == "pairs");
  CHECK(placed({1, 0, ""}, servers).server == "plain");
  CHECK(placed({2, 0, "plain"}, servers).server == "plain");
  servers[0].devices[3].freeBytes = 0;
  CHECK(placed({2, 0, ""}, servers).server == "plain");
  servers.push_back(server("switched", groups(8, 8)));
  CHECK(placed({2, 0, ""}, servers).server == "switched");
  CHECK(ordinals(placed({4, 0, ""}, servers)) == Ordinals{0, 1, 2, 3});
}

TEST_CASE("devices that one is joined with need not be joined with each other") {
  // A ring: 0-1-2-3-0.
  const std::vector<ServerUse> ring = {server("ring", {0b1010, 0b0101, 0b1010, 0b0101})};
  CHECK(ordinals(placed({2, 0, ""}, ring)) == Ordinals{0, 1});
  CHECK(ordinals(placed({3, 0, ""}, ring)) == Ordinals{0, 1, 2});
  CHECK(describeLinks(place({2, 0, ""}, ring), ring) == "; joined by NVLink");
  CHECK(describeLinks(place({3, 0, ""}, ring), ring) == "; not all joined by NVLink");
}

TEST_CASE("a lease would rather be joined by nothing than take turns") {
  std::vector<ServerUse> servers = {server("a", groups(4, 2))};
  for (DeviceUse& one : servers[0].devices) {
    one.overcommitPercent = 200;
    one.freeBytes = 160 * kGiB;
  }
  for (const size_t busy : {0, 2})
    occupy({{servers[0].devices[busy].info, 60 * kGiB}, 0, 0, false}, servers[0].devices[busy]);
  CHECK(ordinals(placed({2, 40 * kGiB, ""}, servers)) == Ordinals{1, 3});
  CHECK(ordinals(placed({2, 10 * kGiB, ""}, servers)) == Ordinals{0, 1});
}

TEST_CASE("of equal devices those near to a network adapter come first") {
  std::vector<ServerUse> servers = {server("a", groups(4, 2))};
  auto& devices = servers[0].devices;
  devices[1].adapter = {"mlx5_0", PciDistance::NODE};
  devices[2].adapter = {"mlx5_1", PciDistance::PXB};
  devices[3].adapter = {"mlx5_1", PciDistance::PXB};
  CHECK(ordinals(placed({1, 0, ""}, servers)) == Ordinals{2});
  CHECK(ordinals(placed({2, 0, ""}, servers)) == Ordinals{2, 3});
  CHECK(ordinals(placed({3, 0, ""}, servers)) == Ordinals{1, 2, 3});
  devices[0].adapter = {"mlx5_0", PciDistance::PIX};  // the nearest, but not in sum with its peer
  CHECK(ordinals(placed({1, 0, ""}, servers)) == Ordinals{0});
  CHECK(ordinals(placed({2, 0, ""}, servers)) == Ordinals{2, 3});
  CHECK(describeLinks(place({1, 0, ""}, servers), servers) == "; nearest to mlx5_0: PIX");
  CHECK(describeLinks(place({2, 0, ""}, servers), servers) == "; joined by NVLink; nearest to mlx5_1: PXB");
  devices[3].adapter = {};
  CHECK(describeLinks(place({3, 0, ""}, servers), servers) ==
        "; not all joined by NVLink; GPU 0 nearest to mlx5_0: PIX; GPU 1 nearest to mlx5_0: NODE; GPU 2 "
        "nearest to mlx5_1: PXB");
  devices[1].freeBytes = 20 * kGiB;  // not equal any more
  CHECK(ordinals(placed({1, 10 * kGiB, ""}, servers)) == Ordinals{1});
}

TEST_CASE("a lease that moves gets joined devices, too") {
  std::vector<ServerUse> servers = {server("from", groups(2, 2)), server("pairs", groups(4, 2), {0}),
                                    server("plain", groups(2, 1))};
  Choice choice = placeMove(moveOf(2), servers);
  CHECK(choice.server == "pairs");
  CHECK(ordinals(choice) == Ordinals{2, 3});
  CHECK(placeMove(moveOf(1), servers).server == "plain");
  MoveWish named = moveOf(2);
  named.server = "pairs";
  named.ordinals = {3, 1};
  CHECK(ordinals(placeMove(named, servers)) == Ordinals{3, 1});
}

TEST_CASE("of many devices, groups are found, and a search that would take for ever is given up") {
  std::vector<ServerUse> servers = {server("a", groups(64, 8))};
  for (uint32_t i = 0; i < 64; i += 8) servers[0].devices[i].freeBytes = 40 * kGiB;  // one of each group
  servers[0].devices[60].adapter = {"mlx5_0", PciDistance::PIX};
  CHECK(ordinals(placed({8, 10 * kGiB, ""}, servers)) == Ordinals{56, 57, 58, 59, 60, 61, 62, 63});
  // 16 groups of 4: each GPU is joined with all of other groups. There are 4 to the 16th joined sets of 16.
  auto joined = groups(64, 4);
  for (size_t i = 0; i < 64; ++i) joined[i] = ~joined[i] & ~(uint64_t{1} << i);
  servers = {server("a", joined)};
  CHECK(ordinals(placed({17, 0, ""}, servers)) == ordinals(placed({17, 0, ""}, servers)));
  CHECK(placed({17, 0, ""}, servers).devices.size() == 17);
  CHECK(describeLinks(placed({16, 0, ""}, servers), servers) == "; joined by NVLink");
}

// --- whatever joins them --------------------------------------------------------------------------------

namespace {

// The less, the better: not joined, room (or its lack), distance.
using Merit = std::tuple<bool, int64_t, uint64_t>;

struct LinkedPools {
  explicit LinkedPools(uint64_t seed) : random(seed) {
    for (size_t s = 0; s < 1 + pick(4); ++s)
      servers.push_back(one(std::string(1, static_cast<char>('a' + s))));
  }
  uint64_t pick(uint64_t below) { return random() % below; }

  ServerUse one(const std::string& name) {
    const size_t count = 1 + pick(7);
    const uint64_t kind = pick(4);
    ServerUse use = server(name, groups(count, kind == 0 ? 1 : kind == 1 ? 2 + pick(3) : 8));
    if (pick(8) == 0) use.unusable = "silent for 9 s";
    for (size_t i = 0; i < count; ++i) {
      DeviceUse& device = use.devices[i];
      if (kind == 3)  // no groups
        for (size_t j = 0; j < i; ++j)
          if (pick(2) == 0) {
            device.joined &= ~(uint64_t{1} << j);
            use.devices[j].joined &= ~(uint64_t{1} << i);
          }
      if (pick(3) == 0) device.freeBytes = 20 * pick(4) * kGiB;
      if (pick(12) == 0) device.info.problem = "ECC";
      if (pick(2) == 0) device.adapter = {"mlx5_0", static_cast<PciDistance>(1 + pick(5))};
    }
    return use;
  }

  std::mt19937_64 random;
  std::vector<ServerUse> servers;
};

bool can(const DeviceUse& device, uint64_t memoryBytes) {
  const uint64_t needed = memoryBytes == 0 ? device.info.memoryBytes : memoryBytes + kGiB;
  return device.info.problem.empty() && device.freeBytes >= needed;
}

uint64_t far(const DeviceUse& device) {
  return device.adapter.name.empty() ? 6 : static_cast<uint64_t>(device.adapter.distance);
}

// Of those devices of the server.
Merit meritOf(const ServerUse& server, uint64_t set, Policy policy) {
  Merit merit{false, 0, 0};
  for (size_t i = 0; i < server.devices.size(); ++i) {
    if ((set >> i & 1) == 0) continue;
    const DeviceUse& device = server.devices[i];
    const auto room = static_cast<int64_t>(device.freeBytes);
    std::get<0>(merit) = std::get<0>(merit) || (set & ~device.joined & ~(uint64_t{1} << i)) != 0;
    std::get<1>(merit) += policy == Policy::spread ? -room : room;
    std::get<2>(merit) += far(device);
  }
  return merit;
}

// Of all sets that the server could give; none: too few devices fit.
std::optional<Merit> bestOf(const ServerUse& server, size_t count, uint64_t memoryBytes, Policy policy) {
  std::optional<Merit> best;
  uint64_t fitting = 0;
  for (size_t i = 0; i < server.devices.size(); ++i)
    if (can(server.devices[i], memoryBytes)) fitting |= uint64_t{1} << i;
  for (uint64_t set = 0; set < uint64_t{1} << server.devices.size(); ++set) {
    if (static_cast<size_t>(std::popcount(set)) != count || (set & ~fitting) != 0) continue;
    const Merit merit = meritOf(server, set, policy);
    if (!best || merit < *best) best = merit;
  }
  return best;
}

// On the best server the best set.
void checkBest(const Choice& choice, const std::vector<ServerUse>& servers, size_t count,
               uint64_t memoryBytes, Policy policy) {
  const ServerUse* expected = nullptr;
  std::tuple<bool, int64_t> least;
  for (const ServerUse& server : servers) {
    const auto best = bestOf(server, count, memoryBytes, policy);
    if (!best || !server.unusable.empty()) continue;
    const auto room = static_cast<int64_t>(totalRoom(server));
    const std::tuple<bool, int64_t> merit{std::get<0>(*best), policy == Policy::spread ? -room : room};
    if (expected == nullptr || merit < least) {
      expected = &server;
      least = merit;
    }
  }
  REQUIRE(choice.server == (expected == nullptr ? "" : expected->name));
  if (expected == nullptr) return;
  REQUIRE(choice.devices.size() == count);
  uint64_t set = 0;
  for (const LeasedDevice& leased : choice.devices) set |= uint64_t{1} << leased.info.ordinal;
  REQUIRE(static_cast<size_t>(std::popcount(set)) == count);
  for (const LeasedDevice& leased : choice.devices)
    CHECK(can(expected->devices[leased.info.ordinal], memoryBytes));
  CHECK(meritOf(*expected, set, policy) == bestOf(*expected, count, memoryBytes, policy));
}

}  // namespace

TEST_CASE("whatever joins them: the best set of the best server, and never more than there is") {
  std::map<bool, int> joined;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    INFO("seed " << seed);
    LinkedPools pools(seed);
    for (int lease = 0; lease < 4; ++lease) {
      Wish wish{1 + static_cast<uint32_t>(pools.pick(4)), pools.pick(2) == 0 ? 0 : pools.pick(50) * kGiB, ""};
      wish.policy = pools.pick(2) == 0 ? Policy::pack : Policy::spread;
      const Choice choice = placed(wish, pools.servers);
      checkBest(choice, pools.servers, wish.deviceCount, wish.memoryBytes, wish.policy);
      for (ServerUse& server : pools.servers) {
        if (server.name != choice.server) continue;
        if (wish.deviceCount > 1) {
          const std::string text = describeLinks(choice, pools.servers);
          ++joined[text.find("; joined by NVLink") == 0];
        }
        for (const LeasedDevice& leased : choice.devices) {
          DeviceUse& device = server.devices[leased.info.ordinal];
          REQUIRE(reservedBytes(leased) <= device.freeBytes);
          occupy({leased, 0, 0, false}, device);
        }
      }
      MoveWish move = moveOf(1 + pools.pick(3));
      move.policy = wish.policy;
      checkBest(placeMove(move, pools.servers), pools.servers, move.claims.size(), 0, move.policy);
    }
  }
  CHECK(joined[true] > 1000);
  CHECK(joined[false] > 500);
}
