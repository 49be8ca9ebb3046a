// The pool's kept inventory after random histories (tests/manager/history has longer ones, with all that can
// go wrong).
#include <random>

#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

struct Histories : Fixture {
  explicit Histories(uint64_t seed) : random(seed) {}
  uint64_t pick(uint64_t below) { return random() % below; }
  std::string name() { return std::string(1, static_cast<char>('a' + pick(4))); }

  void join(const std::string& which) {
    Server facts = gpupool::test::server(which, ++incarnations, 1 + static_cast<uint32_t>(pick(3)));
    if (pick(4) == 0) facts.overcommitPercent = 200;
    if (pick(6) == 0) facts.devices[0].uuid = "shared by several";
    facts.devices[0].uuid.resize(16, '.');
    try {
      pool->join(kAdmin, facts, {}, now);
    } catch (const std::invalid_argument&) {  // it is there already
    }
  }

  void tellFabric(const std::string& which, size_t gpus) {
    fabric::Fabric fabric;
    fabric.nvlinks.resize(gpus);
    if (gpus > 1 && pick(2) == 0) fabric.nvlinks[0] = 0b10, fabric.nvlinks[1] = 0b01;
    fabric.devices.resize(pick(3));
    for (fabric::Device& device : fabric.devices) {
      device.name = "mlx5_" + std::to_string(pick(2));
      device.ports.resize(1);
      device.ports[0].state = pick(2) == 0 ? fabric::PortState::ACTIVE : fabric::PortState::DOWN;
      for (size_t i = 0; i < gpus; ++i)
        device.gpuDistances.push_back(static_cast<fabric::PciDistance>(pick(6)));
    }
    pool->setFabric(which, std::move(fabric));
  }

  void beat(const std::string& which) {
    const auto at = pool.pool->servers().find(which);
    if (at == pool.pool->servers().end()) return join(which);
    std::vector<Id> held;
    std::vector<LeaseTurn> turns;
    for (const auto& [id, record] : pool.pool->leases()) {
      if (record.on(which) == nullptr || pick(20) == 0) continue;
      held.push_back(id);
      if (pick(2) == 0) turns.push_back({id, TurnPlace::aside, 0, 0, "", {pick(3) * kGiB}});
    }
    if (pick(20) == 0) held.push_back(Id::random());
    std::vector<std::string> problems(at->second.facts.devices.size());
    if (pick(5) == 0) problems[0] = "ECC";
    if (pick(4) == 0) tellFabric(which, at->second.facts.devices.size());
    pool->beat(which, at->second.facts.incarnation, held, problems, 1, now, {}, turns);
  }

  void ask() {
    LeaseRequest wish = request(++leases, pick(2) == 0 ? 0 : 60'000, pick(2) == 0 ? 0 : (1 + pick(80)) * kGiB,
                                1 + static_cast<uint32_t>(pick(2)));
    wish.turns.priority = static_cast<Priority>(pick(3));
    wish.turns.sharePercent = static_cast<uint32_t>(pick(3)) * 20;
    if (pick(3) == 0) wish.limitMs = 1000 + pick(20'000);
    pool->request(kAdmin, wish, now);
  }

  void order() {
    if (pool.pool->leases().empty()) return;
    auto at = pool.pool->leases().begin();
    std::advance(at, static_cast<std::ptrdiff_t>(pick(pool.pool->leases().size())));
    const Id id = at->first;
    try {
      switch (pick(5)) {
        case 0:
          return (void)pool->release(kAdmin, id, now);
        case 1:
          return pool->suspend(kAdmin, id, 0, now);
        case 2:
          return pool->resume(kAdmin, id, 5000, now);
        case 3:
          return pool->migrate(kAdmin, id, 0, {"", {}, true}, now);
        default:
          return pool->explain(kAdmin, request(++leases), now), void();
      }
    } catch (const std::invalid_argument&) {  // it is in no state for that
    }
  }

  // Servers answer some of what they were ordered.
  void answer() {
    for (const Lease& lease : std::exchange(events.grants, {}))
      pick(8) == 0 ? pool->grantFailed(lease.id, "no", true, now) : pool->granted(lease.id, now);
    for (const auto& one : std::exchange(events.revokes, {})) {
      if (pick(8) == 0)
        pool->revokeFailed({one.server, one.incarnation}, one.id, now);
      else
        pool->revoked({one.server, one.incarnation}, one.id, now);
    }
    for (const auto& one : std::exchange(events.suspends, {}))
      pick(4) == 0 ? pool->suspendFailed(one.id, one.number, "no", now)
                   : pool->suspendDone(one.id, one.number, {{pick(3) * kGiB}, 0, 0, 0}, now);
    for (const auto& one : std::exchange(events.resumes, {}))
      pick(4) == 0 ? pool->resumeFailed(one.id, one.number, "no", true, now)
                   : pool->resumeDone(one.id, one.number, now);
    for (const auto& one : std::exchange(events.prepares, {}))
      pick(4) == 0 ? pool->prepareFailed(one.id, one.number, "no", pick(2) == 0, now)
                   : pool->prepareDone(one.id, one.number, now);
    for (const auto& one : std::exchange(events.migrates, {}))
      pick(4) == 0 ? pool->migrateFailed(one.id, one.number, "no", pick(2) == 0, now)
                   : pool->migrateDone(one.id, one.number, {}, now);
    for (const auto& one : std::exchange(events.returns, {}))
      pool->returned(one.id, one.number, pick(2) == 0, now);
    for (const auto& one : std::exchange(events.settles, {})) pool->settled(one.id, one.number, now);
  }

  void step() {
    now += pick(300);
    switch (pick(12)) {
      case 0:
      case 1:
      case 2:
        return ask();
      case 3:
      case 4:
        return order();
      case 5: {
        const std::string which = name();
        const auto at = pool.pool->servers().find(which);
        if (at != pool.pool->servers().end() && pick(3) == 0)
          pool->left(which, at->second.facts.incarnation, pick(2) == 0, now);
        return;
      }
      case 6: {
        const std::string which = name();
        if (!pool.pool->servers().contains(which)) return;
        return pick(2) == 0 ? pool->cordon(kAdmin, which, {"tests", "", 0}, [](const std::string&) {})
                            : pool->uncordon(kAdmin, which, [](const std::string&) {});
      }
      case 7:
        return pick(4) == 0 ? (void)(now += 6000) : pool->tick(now);
      case 8:
        return answer();
      default:
        return beat(name());
    }
  }

  std::mt19937_64 random;
  uint64_t incarnations = 0, leases = 0;
};

}  // namespace

TEST_CASE("the inventory that a pool keeps is the one that its servers and leases make") {
  uint64_t served = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Histories history(seed);
    history.times.preempt.what = seed % 3 == 0 ? Preemption::suspend : Preemption::off;
    history.times.preempt.minRunMs = 100;
    history.restart();
    for (int i = 0; i < 250; ++i) {
      INFO("seed " << seed << ", step " << i);
      history.step();
      REQUIRE(history.pool.pool->inventoryFault(history.now) == "");
    }
    served += history.events.leases.size();
  }
  CHECK(served > 1000);  // the histories are not empty ones
}
