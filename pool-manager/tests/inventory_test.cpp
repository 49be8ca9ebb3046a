// The index of placement and the kept inventory, beside what they stand for: random servers, some of which
// overcommit, that change, come and go.
#include <map>
#include <random>

#include "catch.h"
#include "pool-manager/inventory.h"
#include "pool-manager/tests/random_devices.h"

using namespace gpupool;
using namespace gpupool::pool;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

struct Servers {
  explicit Servers(uint64_t seed) : random(seed) {}
  uint64_t pick(uint64_t below) { return random() % below; }

  DeviceUse device(const std::string& server, uint32_t ordinal, uint32_t percent) {
    DeviceUse use = pool::test::randomDevice(random, server, ordinal);
    use.overcommitPercent = percent;
    use.freeBytes = leasableBytes(use.info.memoryBytes, percent);
    for (uint64_t leases = pick(4); leases != 0; --leases) {
      const LeasedDevice leased{use.info, pick(4) == 0 ? use.info.memoryBytes : (1 + pick(50)) * kGiB};
      const bool suspended = pick(3) == 0;
      if (reservedBytes(leased) <= use.freeBytes) occupy({leased, pick(2) * kGiB, 0, suspended}, use);
    }
    if (pick(10) == 0) use.claimedMs = 1000 + pick(1000);
    return use;
  }

  ServerUse server(const std::string& name) {
    ServerUse use{name, pick(6) == 0 ? "silent for 9 s" : "", {}};
    if (pick(8) == 0) use.cordoned = true, use.unusable = "cordoned by an operator";
    for (uint64_t rows = 1 + pick(2); rows <= 2 && pick(3) != 0; ++rows) use.rows.push_back(rows);
    const uint32_t percent = pick(3) == 0 ? 200 : 100;
    for (uint32_t d = 0; d < 1 + pick(4); ++d) use.devices.push_back(device(name, d, percent));
    pool::test::join(random, use);
    return use;
  }

  Wish wish() {
    constexpr const char* kFilters[] = {"", "", "h200", "H100,l40", "memory>=80GiB", "b200", "compute>=9.0"};
    Wish wish;
    wish.deviceCount = static_cast<uint32_t>(pick(4));
    wish.memoryBytes = pick(2) == 0 ? 0 : (1 + pick(90)) * kGiB;
    if (pick(5) == 0) wish.server = std::string(1, static_cast<char>('a' + pick(9)));
    wish.gpu = parseDeviceFilter(kFilters[pick(std::size(kFilters))]);
    wish.policy = pick(2) == 0 ? Policy::pack : Policy::spread;
    wish.endsMs = pick(3) == 0 ? kNever : 1000 + pick(1000);
    wish.besideSuspended = pick(2) == 0;
    wish.sharePercent = static_cast<uint32_t>(pick(3)) * 40;
    if (pick(2) == 0) wish.clients.push_back({pick(4), "0.1.0"});  // 0: unknown; 3: no server's
    return wish;
  }

  std::mt19937_64 random;
};

void checkSame(const Wish& wish, const std::vector<ServerUse>& servers, const PlacementIndex& index) {
  const Choice all = place(wish, servers), indexed = place(wish, servers, index);
  CHECK(all.server == indexed.server);
  CHECK(all.never == indexed.never);
  REQUIRE(all.devices.size() == indexed.devices.size());
  for (size_t i = 0; i < all.devices.size(); ++i) {
    CHECK(all.devices[i].info.uuid == indexed.devices[i].info.uuid);
    CHECK(all.devices[i].memoryBytes == indexed.devices[i].memoryBytes);
  }
  CHECK(couldEver(wish, servers) == couldEver(wish, servers, index));
}

}  // namespace

TEST_CASE("placement by the index chooses what placement by every device chooses") {
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    INFO("seed " << seed);
    Servers random(seed);
    std::vector<ServerUse> servers;
    for (char name = 'a'; name < static_cast<char>('b' + random.pick(7)); ++name)
      servers.push_back(random.server(std::string(1, name)));
    PlacementIndex index;
    index.rebuild(servers);
    for (int i = 0; i < 4; ++i) checkSame(random.wish(), servers, index);
  }
}

TEST_CASE("a kept inventory is what one made anew would be, whatever changes, comes and goes") {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    INFO("seed " << seed);
    Servers random(seed);
    std::map<std::string, ServerUse> real;
    Inventory kept;
    for (int step = 0; step < 40; ++step) {
      for (uint64_t changes = random.pick(4); changes != 0; --changes) {
        const std::string name(1, static_cast<char>('a' + random.pick(8)));
        if (random.pick(4) == 0)
          real.erase(name);
        else
          real.insert_or_assign(name, random.server(name));
        kept.touch(name);
      }
      kept.forgetClaims();
      for (auto& [name, use] : real)
        for (DeviceUse& device : use.devices) device.claimedMs = kNever;
      const uint64_t version = kept.version();
      const auto before = kept.servers();
      kept.refresh([&](const std::string& name) {
        const auto at = real.find(name);
        return at == real.end() ? std::nullopt : std::optional(at->second);
      });
      CHECK((version == kept.version()) == (before == kept.servers()));
      std::vector<ServerUse> anew;
      anew.reserve(real.size());
      for (const auto& [name, use] : real) anew.push_back(use);
      REQUIRE(kept.servers() == anew);
      for (const ServerUse& use : anew) CHECK(kept.find(use.name) != nullptr);
      CHECK(kept.find("z") == nullptr);
      for (int i = 0; i < 3; ++i) checkSame(random.wish(), kept.servers(), kept.index());
    }
  }
}

TEST_CASE("claims on a kept inventory stay when its servers are made anew, and can be forgotten") {
  Servers random(7);
  ServerUse use{"a", "", {}};
  use.devices.push_back(random.device("a", 0, 100));
  use.devices[0].claimedMs = kNever;
  Inventory kept;
  kept.touch("a");
  kept.refresh([&](const std::string&) { return std::optional(use); });
  kept.servers()[0].devices[0].claimedMs = 5;
  use.unusable = "silent for 9 s";
  kept.touch("a");
  kept.refresh([&](const std::string&) { return std::optional(use); });
  CHECK(kept.servers()[0].devices[0].claimedMs == 5);
  CHECK(kept.servers()[0].unusable == "silent for 9 s");
  kept.forgetClaims();
  CHECK(kept.servers()[0].devices[0].claimedMs == kNever);
}
