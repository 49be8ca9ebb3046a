// Placement on servers that lease more memory than their devices have.
#include <algorithm>
#include <random>

#include "catch.h"
#include "pool-manager/tests/placement_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::pool::test;

namespace {

DeviceUse shared(uint32_t ordinal, uint64_t memoryGiB, uint32_t overcommitPercent, bool software = false) {
  DeviceUse use = device(ordinal, memoryGiB, 0);
  use.info.software = software;
  use.info.uuid = "gpu " + std::to_string(ordinal);
  use.overcommitPercent = overcommitPercent;
  use.freeBytes = leasableBytes(use.info.memoryBytes, overcommitPercent);
  return use;
}

void lease(DeviceUse& use, uint64_t memoryGiB, const std::string& holder, uint32_t share = 0,
           uint64_t keptGiB = 0) {
  occupy({{use.info, memoryGiB * kGiB}, keptGiB * kGiB, share, false}, use);
  use.holders.push_back(holder);
}

}  // namespace

TEST_CASE("more is leased than there is, up to the overcommit") {
  std::vector<ServerUse> servers = {{"a", "", {shared(0, 80, 200)}}};
  DeviceUse& gpu = servers[0].devices[0];
  CHECK(gpu.freeBytes == 160 * kGiB);
  for (const char* holder : {"x", "y"}) {
    REQUIRE(place({1, 70 * kGiB, ""}, servers).server == "a");
    lease(gpu, 70, holder);
  }
  CHECK(gpu.freeBytes == 18 * kGiB);
  CHECK(place({1, 17 * kGiB, ""}, servers).server == "a");
  const Choice none = place({1, 18 * kGiB, ""}, servers);
  CHECK(none.server.empty());
  CHECK_FALSE(none.never);
  CHECK(says(none, "is held by x and y with 18.0 GiB free of the 160 GiB that may be leased"));
  CHECK(place({1, 81 * kGiB, ""}, servers).never);
  CHECK(says(place({1, 81 * kGiB, ""}, servers), "may be leased, but it has only 80.0 GiB"));
}

TEST_CASE("every lease fits beside all others aside") {
  std::vector<ServerUse> servers = {{"a", "", {shared(0, 80, 400)}}};
  DeviceUse& gpu = servers[0].devices[0];
  SECTION("the one that comes") {
    for (const char* holder : {"x", "y", "z"}) lease(gpu, 40, holder);
    CHECK(place({1, 76 * kGiB, ""}, servers).server == "a");
    const Choice none = place({1, 77 * kGiB, ""}, servers);  // and a context: 78 beside three others
    CHECK(says(
        none,
        "is held by x and y and z with 197 GiB free of the 320 GiB that may be leased, but for one "
        "lease only 77.0 GiB of its 80.0 GiB: the others keep the rest also while it is not their turn"));
    CHECK_FALSE(none.never);
    CHECK(place({1, 0, ""}, servers).server.empty());
  }
  SECTION("those that are there") {
    lease(gpu, 0, "x");
    gpu.largestBytes = 79 * kGiB;  // it has the whole device
    CHECK(says(place({1, kGiB, ""}, servers), "but the largest lease there would not fit"));
  }
  SECTION("what they keep, too") {
    lease(gpu, 40, "x", 0, 10);
    CHECK(place({1, 68 * kGiB, ""}, servers).server == "a");
    CHECK(place({1, 69 * kGiB, ""}, servers).server.empty());
  }
}

TEST_CASE("software GPUs keep nothing aside: leases of the whole device take turns") {
  std::vector<ServerUse> servers = {{"a", "", {shared(0, 4, 300, true)}}};
  for (const char* holder : {"x", "y", "z"}) {
    REQUIRE(place({1, 0, ""}, servers).server == "a");
    lease(servers[0].devices[0], 4, holder);
  }
  CHECK(place({1, 1, ""}, servers).server.empty());
}

TEST_CASE("a lease takes turns only where it has to, and then where the fewest do") {
  std::vector<ServerUse> servers = {{"a", "", {shared(0, 80, 400), shared(1, 80, 400)}},
                                    {"b", "", {shared(0, 80, 400), shared(1, 80, 400), shared(2, 80, 400)}}};
  lease(servers[0].devices[0], 60, "x");
  lease(servers[0].devices[1], 60, "x");
  CHECK(place({1, 10 * kGiB, ""}, servers).server == "a");  // the fullest where there is room
  CHECK(place({1, 30 * kGiB, ""}, servers).server == "b");
  for (DeviceUse& gpu : servers[1].devices) lease(gpu, 60, "y");
  lease(servers[0].devices[0], 60, "x");
  lease(servers[1].devices[0], 60, "y");
  lease(servers[1].devices[1], 20, "y");
  CHECK(place({1, 30 * kGiB, ""}, servers).server == "a");
  CHECK(ordinals(place({1, 30 * kGiB, ""}, servers)) == std::vector<uint32_t>{1});
  CHECK(ordinals(place({1, 30 * kGiB, "b"}, servers)) == std::vector<uint32_t>{2});
  CHECK(place({2, 30 * kGiB, ""}, servers).server == "b");
  CHECK(ordinals(place({2, 30 * kGiB, ""}, servers)) == std::vector<uint32_t>{1, 2});
}

TEST_CASE("shares that are named on one device are 100% at most, where leases take turns") {
  std::vector<ServerUse> servers = {{"a", "", {shared(0, 80, 200)}}};
  DeviceUse& gpu = servers[0].devices[0];
  lease(gpu, 20, "x", 60);
  Wish wish{1, 10 * kGiB, "", 40};
  CHECK(place(wish, servers).server == "a");
  wish.sharePercent = 41;
  const Choice none = place(wish, servers);
  CHECK(says(none, "1 device with 10.0 GiB free and 41% of its time is wanted, none is free"));
  CHECK(says(none, "but only 40% of its time is not promised to others"));
  CHECK_FALSE(none.never);
  CHECK(place({1, 10 * kGiB, "", 0}, servers).server == "a");
  gpu.overcommitPercent = 100;
  gpu.freeBytes = 59 * kGiB;
  CHECK(place(wish, servers).server == "a");
}

TEST_CASE("a lease that was suspended comes back by the same rules") {
  ServerUse server{"a", "", {shared(0, 80, 400)}};
  DeviceUse& gpu = server.devices[0];
  std::vector<Claim> claims = {{{gpu.info, 40 * kGiB}, 2 * kGiB, 30, false}};
  const auto saysMissing = [&](const std::string& text) {
    INFO(missingFor(claims, server));
    CHECK(missingFor(claims, server).find(text) != std::string::npos);
  };
  lease(gpu, 70, "x", 60);
  CHECK(missingFor(claims, server).empty());
  claims[0].sharePercent = 41;
  saysMissing(
      "a: GPU 0 (H200) has 249 GiB free of the 320 GiB that may be leased, but only 40% of its time is not "
      "promised to others: it is held by x");
  claims[0].sharePercent = 0;
  lease(gpu, 20, "y");
  lease(gpu, 1, "z");
  claims[0].kept = 6 * kGiB;  // x comes back to 71, beside two contexts and 7
  CHECK(missingFor(claims, server).empty());
  claims[0].kept = 7 * kGiB;
  saysMissing("the largest lease there would not fit");
  claims[0].kept = 0;
  lease(gpu, 40, "w", 0, 37);
  saysMissing("for one lease only 39.0 GiB of its 80.0 GiB");
  for (const char* holder : {"u", "v"}) lease(gpu, 79, holder);
  saysMissing(
      "has 25.0 GiB free of the 320 GiB that may be leased, 41.0 GiB are wanted: it is held by x and y");
}

namespace {

// Random leases on random servers, placed by place() and missingFor(), and what has to be true of them by
// other sums than theirs.
struct Crowd {
  struct Held {
    size_t server = 0;
    std::vector<LeasedDevice> devices;
    std::vector<uint64_t> kept;
    uint32_t share = 0;
    bool suspended = false;
  };
  struct Sums {
    uint64_t counted = 0, aside = 0, most = 0, share = 0;
  };

  explicit Crowd(uint64_t seed) : random(seed) {
    for (size_t s = 0; s < 1 + pick(3); ++s) {
      ServerUse& server = empty.emplace_back(ServerUse{std::string(1, static_cast<char>('a' + s)), "", {}});
      const uint32_t percent = pick(3) == 0 ? 100 : static_cast<uint32_t>(100 + pick(701));
      const bool software = pick(2) == 0;
      for (uint32_t d = 0; d < 1 + pick(3); ++d) {
        server.devices.push_back(shared(d, 4 + pick(16), percent, software));
        server.devices.back().info.uuid = server.name + std::to_string(d);
      }
    }
  }
  uint64_t pick(uint64_t below) { return random() % below; }

  std::vector<ServerUse> inventory(const Held* without = nullptr) const {
    std::vector<ServerUse> servers = empty;
    for (const Held& one : held)
      for (size_t i = 0; i < one.devices.size() && &one != without; ++i)
        for (DeviceUse& use : servers[one.server].devices)
          if (use.info.uuid == one.devices[i].info.uuid)
            occupy({one.devices[i], one.kept[i], one.share, one.suspended}, use);
    return servers;
  }

  static uint64_t overhead(const LeasedDevice& device) { return device.info.software ? 0 : kGiB; }
  static uint64_t whole(const LeasedDevice& device) {
    return std::min(device.info.memoryBytes, device.memoryBytes + overhead(device));
  }
  // plus: one more, for the question whether there was room for it.
  Sums sums(const Device& device, const Held* plus = nullptr) const {
    Sums sums;
    const auto add = [&](const Held& one) {
      for (size_t i = 0; i < one.devices.size(); ++i) {
        if (one.devices[i].info.uuid != device.uuid) continue;
        const uint64_t all = whole(one.devices[i]),
                       aside = std::min(all, one.kept[i] + overhead(one.devices[i]));
        sums.counted += one.suspended ? aside : all;
        sums.aside += aside;
        if (!one.suspended) sums.most = std::max(sums.most, all - aside), sums.share += one.share;
      }
    };
    for (const Held& one : held) add(one);
    if (plus != nullptr) add(*plus);
    return sums;
  }
  bool sound(const DeviceUse& use, const Sums& sums) const {
    const uint64_t memory = use.info.memoryBytes;
    return sums.counted <=
               memory / 100 * use.overcommitPercent + memory % 100 * use.overcommitPercent / 100 &&
           sums.aside + sums.most <= memory && (use.overcommitPercent == 100 || sums.share <= 100);
  }

  // By server: how many devices have room, beside the others or without taking turns.
  bool anyFits(const Wish& wish, bool turns) const {
    for (size_t s = 0; s < empty.size(); ++s) {
      if (!wish.server.empty() && empty[s].name != wish.server) continue;
      uint32_t fitting = 0;
      for (const DeviceUse& use : empty[s].devices) {
        const uint64_t memory = wish.memoryBytes == 0 ? use.info.memoryBytes : wish.memoryBytes;
        const Held more{s, {{use.info, memory}}, {0}, wish.sharePercent, false};
        const Sums with = sums(use.info, &more);
        fitting += memory <= use.info.memoryBytes && sound(use, with) &&
                   (turns || with.counted <= use.info.memoryBytes);
      }
      if (fitting >= wish.deviceCount) return true;
    }
    return false;
  }
  bool allSound(const Held& one) const {
    for (const DeviceUse& use : empty[one.server].devices)
      for (const LeasedDevice& leased : one.devices)
        if (use.info.uuid == leased.info.uuid && !sound(use, sums(leased.info))) return false;
    return true;
  }

  void placeOne() {
    const Wish wish{static_cast<uint32_t>(1 + pick(2)), pick(4) == 0 ? 0 : 1 + pick(12 * kGiB),
                    pick(4) == 0 ? "a" : "", static_cast<uint32_t>(pick(3) == 0 ? pick(70) : 0)};
    const auto servers = inventory();
    const Choice choice = place(wish, servers), again = place(wish, servers);
    REQUIRE(again.server == choice.server);
    REQUIRE(ordinals(again) == ordinals(choice));
    REQUIRE(again.missing == choice.missing);
    REQUIRE(choice.server.empty() == !anyFits(wish, true));
    REQUIRE(choice.missing.empty() == !choice.server.empty());
    refused += choice.server.empty();
    if (choice.server.empty()) return;
    REQUIRE(choice.devices.size() == wish.deviceCount);
    const bool alone = anyFits(wish, false);
    Held one{0, choice.devices, std::vector<uint64_t>(wish.deviceCount), wish.sharePercent, false};
    while (empty[one.server].name != choice.server) ++one.server;
    held.push_back(one);
    const bool turns = std::any_of(one.devices.begin(), one.devices.end(), [&](const LeasedDevice& leased) {
      return sums(leased.info).counted > leased.info.memoryBytes;
    });
    REQUIRE((!alone || !turns));
    ++placed;
    crowded += turns;
  }
  // What it keeps is known from then on.
  void suspend(Held& one) {
    one.suspended = true;
    const auto before = one.kept;
    for (uint64_t& kept : one.kept) kept = pick(2 * kGiB);
    if (!allSound(one)) one.kept = before;
  }
  void resume(Held& one) {
    std::vector<Claim> claims;
    claims.reserve(one.devices.size());
    for (size_t i = 0; i < one.devices.size(); ++i)
      claims.push_back({one.devices[i], one.kept[i], one.share, false});
    const std::string missing = missingFor(claims, inventory(&one)[one.server]);
    one.suspended = false;
    const bool room = allSound(one);
    REQUIRE(missing.empty() == room);
    one.suspended = !room;
    resumed += room;
  }
  void step() {
    const uint64_t what = pick(10);
    if (what < 6) return placeOne();
    if (held.empty()) return;
    const auto at = held.begin() + static_cast<ptrdiff_t>(pick(held.size()));
    if (what < 8)
      held.erase(at);
    else if (at->suspended)
      resume(*at);
    else
      suspend(*at);
  }

  std::mt19937_64 random;
  std::vector<ServerUse> empty;
  std::vector<Held> held;
  uint64_t placed = 0, crowded = 0, refused = 0, resumed = 0;
};

}  // namespace

TEST_CASE("whatever is placed, nothing exceeds the overcommit and every lease can have its turn") {
  uint64_t placed = 0, crowded = 0, refused = 0, resumed = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Crowd crowd(seed);
    INFO("seed " << seed);
    for (int step = 0; step < 60; ++step) {
      crowd.step();
      for (const ServerUse& server : crowd.empty)
        for (const DeviceUse& use : server.devices) REQUIRE(crowd.sound(use, crowd.sums(use.info)));
    }
    placed += crowd.placed, crowded += crowd.crowded, refused += crowd.refused, resumed += crowd.resumed;
  }
  CHECK(placed > 3000);
  CHECK(crowded > 500);
  CHECK(refused > 500);
  CHECK(resumed > 100);
}
