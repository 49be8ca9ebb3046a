// Random inventories and wishes, and what has to be true of every placement by other sums than its own.
// Servers that overcommit have their own such test (placement_overcommit_test.cpp).
#include <algorithm>
#include <random>

#include "catch.h"
#include "placement_fixture.h"
#include "pool-manager/tests/random_devices.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::pool;
using gpupool::pool::test::kGiB;
using gpupool::test::contains;

namespace {

constexpr uint64_t kNow = 1'000'000;

struct Pools {
  explicit Pools(uint64_t seed) : random(seed) {
    for (size_t s = 0; s < 1 + pick(4); ++s) {
      ServerUse& server = servers.emplace_back(ServerUse{std::string(1, static_cast<char>('a' + s)), "", {}});
      if (pick(6) == 0) server.unusable = "silent for 9 s";
      if (pick(6) == 0) server.cordoned = true, server.unusable = "cordoned by an operator";
      for (uint32_t d = 0; d < 1 + pick(4); ++d) server.devices.push_back(device(server.name, d));
    }
  }
  uint64_t pick(uint64_t below) { return random() % below; }

  DeviceUse device(const std::string& server, uint32_t ordinal) {
    DeviceUse use = pool::test::randomDevice(random, server, ordinal);
    for (uint64_t leases = pick(3); leases != 0; --leases) {
      const LeasedDevice leased{use.info, pick(4) == 0 ? use.info.memoryBytes : (1 + pick(60)) * kGiB};
      if (reservedBytes(leased) > use.freeBytes) continue;
      occupy({leased, 0, 0, false}, use);
      use.holders.push_back("holder");
      use.firstEndMs = std::min(use.firstEndMs, pick(6) == 0 ? 0 : kNow + pick(1000));
    }
    return use;
  }

  Wish wish() {
    constexpr const char* kFilters[] = {
        "", "", "h200", "H100,l40", "memory>=80GiB", "memory<=80GiB,h", "b200", "h200, compute>=9.0"};
    Wish wish;
    wish.deviceCount = 1 + static_cast<uint32_t>(pick(3));
    wish.memoryBytes = pick(2) == 0 ? 0 : (1 + pick(130)) * kGiB;
    if (pick(4) == 0) wish.server = std::string(1, static_cast<char>('a' + pick(5)));
    wish.gpu = parseDeviceFilter(kFilters[pick(std::size(kFilters))]);
    wish.policy = pick(2) == 0 ? Policy::pack : Policy::spread;
    wish.endsMs = pick(3) == 0 ? kNever : kNow + 1 + pick(800);
    return wish;
  }

  std::mt19937_64 random;
  std::vector<ServerUse> servers;
};

uint64_t needs(const Wish& wish, const Device& device) {
  if (wish.memoryBytes == 0 || wish.memoryBytes >= device.memoryBytes) return device.memoryBytes;
  return std::min(device.memoryBytes, wish.memoryBytes + (device.software ? 0 : kGiB));
}

bool may(const Wish& wish, const DeviceUse& device) {
  return device.duplicateOf.empty() && wish.gpu.matches(device.info) &&
         wish.memoryBytes <= device.info.memoryBytes;
}
bool can(const Wish& wish, const DeviceUse& device) {
  return may(wish, device) && device.info.problem.empty() && needs(wish, device.info) <= device.freeBytes &&
         (device.claimedMs == kNever || wish.endsMs <= device.claimedMs);
}

size_t count(const Wish& wish, const ServerUse& server, bool (*is)(const Wish&, const DeviceUse&)) {
  if (!wish.server.empty() && server.name != wish.server) return 0;
  return static_cast<size_t>(std::count_if(server.devices.begin(), server.devices.end(),
                                           [&](const DeviceUse& device) { return is(wish, device); }));
}

uint64_t room(const ServerUse& server) {
  uint64_t sum = 0;
  for (const DeviceUse& device : server.devices) sum += device.freeBytes;
  return sum;
}

void checkPlaced(const Wish& wish, const std::vector<ServerUse>& servers, const Choice& choice) {
  const auto at = std::find_if(servers.begin(), servers.end(),
                               [&](const ServerUse& server) { return server.name == choice.server; });
  REQUIRE(at != servers.end());
  CHECK(at->unusable.empty());
  CHECK((wish.server.empty() || wish.server == at->name));
  REQUIRE(choice.devices.size() == wish.deviceCount);
  std::vector<uint64_t> taken, left;
  for (const DeviceUse& device : at->devices) {
    const auto chosen = std::count_if(choice.devices.begin(), choice.devices.end(),
                                      [&](const auto& one) { return one.info.uuid == device.info.uuid; });
    CHECK(chosen <= 1);
    if (chosen != 0) CHECK(can(wish, device));
    if (can(wish, device)) (chosen != 0 ? taken : left).push_back(device.freeBytes);
  }
  REQUIRE(taken.size() == wish.deviceCount);
  const bool spread = wish.policy == Policy::spread;
  for (const uint64_t one : taken)
    for (const uint64_t other : left) CHECK((spread ? one >= other : one <= other));
  for (const ServerUse& server : servers) {
    if (!server.unusable.empty() || count(wish, server, can) < wish.deviceCount) continue;
    CHECK((spread ? room(*at) >= room(server) : room(*at) <= room(server)));
  }
}

// By the first thing that hinders it, if it is the only one.
void checkReason(const Wish& wish, const DeviceUse& device, const std::string& reason) {
  INFO(reason);
  CHECK(reason.empty() == can(wish, device));
  if (reason.empty()) return;
  if (!device.duplicateOf.empty())
    CHECK(contains(reason, "the same device as GPU 0 of server z"));
  else if (!device.info.problem.empty())
    CHECK(reason == "is broken (ECC)");
  else if (!wish.gpu.matches(device.info))
    CHECK(reason == "is not '" + wish.gpu.text + "'");
  else if (needs(wish, device.info) > device.freeBytes || wish.memoryBytes > device.info.memoryBytes)
    CHECK(contains(reason, device.holders.empty() ? "has only" : "is held by holder"));
  else
    CHECK(reason == "is for a request that is before it in the queue");
}

void check(const Wish& wish, const std::vector<ServerUse>& servers) {
  const Choice choice = place(wish, servers), again = place(wish, servers);
  CHECK(choice.server == again.server);
  REQUIRE(choice.devices.size() == again.devices.size());
  for (size_t i = 0; i < choice.devices.size(); ++i)
    CHECK(choice.devices[i].info.uuid == again.devices[i].info.uuid);
  CHECK(choice.missing == again.missing);
  const auto any = [&](const auto& test) { return std::any_of(servers.begin(), servers.end(), test); };
  const bool now = any([&](const ServerUse& server) {
    return server.unusable.empty() && count(wish, server, can) >= wish.deviceCount;
  });
  const bool ever =
      any([&](const ServerUse& server) { return count(wish, server, may) >= wish.deviceCount; });
  const bool inService = any([&](const ServerUse& server) {
    return !server.cordoned && count(wish, server, may) >= wish.deviceCount;
  });
  CHECK(couldEver(wish, servers) == ever);
  CHECK(onlyCordoned(wish, servers) == !inService);
  REQUIRE(choice.server.empty() == !now);
  if (now) return checkPlaced(wish, servers, choice);
  CHECK(choice.never == !ever);
  CHECK_FALSE(choice.missing.empty());
  const bool known = any([&](const ServerUse& server) { return server.name == wish.server; });
  const bool never = contains(choice.missing, "but no server has more than") ||
                     contains(choice.missing, "but the most that any server could give is") ||
                     contains(choice.missing, "there is no server named");
  CHECK(never == !ever);
  CHECK(contains(choice.missing, "there is no server named") == (!wish.server.empty() && !known));
}

// How many devices the head may have there before that time, if leases last as long as they may.
size_t readyBefore(uint64_t timeMs, const Wish& head, const ServerUse& server) {
  size_t ready = 0;
  for (DeviceUse device : server.devices) {
    device.claimedMs = kNever;
    const bool ends = device.firstEndMs < timeMs || !device.info.problem.empty();
    if (may(head, device) && (ends || can(head, device))) ++ready;
  }
  return ready;
}

}  // namespace

TEST_CASE("whatever is wished of whatever pool: placed rightly, or refused for the right reason") {
  for (uint64_t seed = 1; seed <= 4000; ++seed) {
    INFO("seed " << seed);
    Pools pools(seed);
    const Wish first = pools.wish(), second = pools.wish();
    check(first, pools.servers);
    const auto unclaimed = pools.servers;
    claim(first, kNow, pools.servers);
    for (size_t s = 0; s < pools.servers.size(); ++s)
      for (size_t d = 0; d < pools.servers[s].devices.size(); ++d) {
        const DeviceUse& device = pools.servers[s].devices[d];
        const bool mine = !pools.servers[s].cordoned && may(first, device) &&
                          count(first, pools.servers[s], may) >= first.deviceCount;
        CHECK((device.claimedMs != kNever) == mine);
        if (mine) CHECK(device.claimedMs >= kNow);
      }
    check(second, pools.servers);
    for (const ServerVerdict& verdict : judge(second, pools.servers)) {
      const auto server = std::find_if(pools.servers.begin(), pools.servers.end(),
                                       [&](const ServerUse& one) { return one.name == verdict.name; });
      REQUIRE(server != pools.servers.end());
      CHECK(verdict.devices.size() == (server->unusable.empty() ? server->devices.size() : 0));
      for (size_t d = 0; d < verdict.devices.size(); ++d)
        checkReason(second, server->devices[d], verdict.devices[d].reason);
    }
  }
}

// Whatever ends when it has to, a request that was let before the head has ended by then.
TEST_CASE("who is let before the head does not delay it") {
  uint64_t before = 0;
  for (uint64_t seed = 1; seed <= 20'000; ++seed) {
    INFO("seed " << seed);
    Pools pools(seed);
    Wish head = pools.wish();
    head.endsMs = kNever;
    if (!place(head, pools.servers).server.empty()) continue;
    claim(head, kNow, pools.servers);
    const Wish later = pools.wish();
    const Choice choice = place(later, pools.servers);
    if (choice.server.empty()) continue;
    for (const ServerUse& server : pools.servers) {
      if (server.name != choice.server) continue;
      for (const DeviceUse& device : server.devices)
        for (const LeasedDevice& one : choice.devices) {
          if (one.info.uuid != device.info.uuid || device.claimedMs == kNever) continue;
          ++before;
          CHECK(later.endsMs != kNever);
          CHECK(readyBefore(later.endsMs, head, server) < head.deviceCount);
        }
    }
  }
  CHECK(before > 20);
}
