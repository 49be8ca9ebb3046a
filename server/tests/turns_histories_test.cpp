// Who has the devices when leases take turns: random histories.
#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <source_location>
#include <sstream>

#include "catch.h"
#include "server/tests/turns_world.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

struct Random {
  std::mt19937_64 engine;
  explicit Random(uint64_t seed) : engine(seed) {}
  uint64_t below(uint64_t bound) { return engine() % bound; }
  bool chance(uint64_t percent) { return below(100) < percent; }
};

// A REQUIRE that costs nothing.
void demand(bool holds, std::source_location at = std::source_location::current()) {
  if (!holds) FAIL("line " << at.line());
}

// Moves take time and fail, leases begin and end, sleep and wake.
struct Chaos {
  struct Under {
    Turns::Move move;
    Time end;
    bool fails = false;
  };
  Random random;
  World world;
  uint64_t next = 1;
  bool calm = false;  // nothing begins, ends, fails or sleeps from now on
  std::vector<Under> under;
  std::map<Id, Time> waitsSince;
  std::map<Id, int> mood;  // percent a second to change what it wants
  Time longest{0};
  std::ostringstream history;

  // Each lease can be there when all others are aside.
  explicit Chaos(uint64_t seed) : random(seed), world({100, 100, 100}) {
    for (int i = 0; i < 12; ++i) begin();
  }
  void begin() {
    const Id id = World::id(next++);
    Turns::Facts facts{Place::aside, random.chance(70), 0, static_cast<int>(random.below(2)), {}};
    if (random.chance(30)) facts.sharePercent = 5 + static_cast<uint32_t>(random.below(10));
    for (size_t device = 0; device < 3; ++device)
      if (facts.parts.empty() ? device == 2 || random.chance(40) : random.chance(20))
        facts.parts.push_back({device, 10 + random.below(61), 0});
    if (world.leases.size() >= 20) return;
    mood[id] = random.chance(50) ? 0 : static_cast<int>(random.below(30));
    world.leases[id] = facts;
  }
  uint64_t used(size_t device) const {
    uint64_t used = 0;
    for (const auto& [id, facts] : world.leases)
      for (const auto& part : facts.parts)
        if (part.device == device) used += facts.place == Place::aside ? part.left : part.whole;
    return used;
  }
  void live() {
    for (auto at = world.leases.begin(); at != world.leases.end();) {
      const bool ends = !calm && random.chance(1) && random.chance(5) && at->second.place != Place::moving;
      if (!calm && random.below(1000) < static_cast<uint64_t>(mood[at->first])) at->second.wants ^= true;
      at = ends ? world.leases.erase(at) : std::next(at);
    }
    if (!calm && random.chance(1)) begin();
  }
  void finish() {
    for (auto at = under.begin(); at != under.end();) {
      if (at->end > world.now) {
        ++at;
        continue;
      }
      Turns::Facts& facts = world.leases.at(at->move.lease);
      facts.place = at->move.back != at->fails ? Place::resident : Place::aside;
      for (auto& part : facts.parts) part.left = 1;
      if (at->fails)
        world.turns.failed(at->move.lease, "told to", world.now);
      else
        world.turns.moved(at->move.lease, at->move.back, Time(300));
      at = under.erase(at);
    }
  }
  void decide() {
    world.turns.see(world.leases, world.now);
    const bool waited = world.turns.waiting();
    std::set<size_t> coming, going;
    const auto moves = world.turns.decide(world.now);
    demand(waited || moves.empty());
    for (const auto& move : moves) {
      history << world.now.count() << ' ' << move.lease.low << move.back << ' ';
      Turns::Facts& facts = world.leases.at(move.lease);
      demand(facts.place == (move.back ? Place::aside : Place::resident));
      if (move.back) demand(facts.wants);
      for (const auto& part : facts.parts) {
        for (const auto& one : under)
          for (const auto& other : world.leases.at(one.move.lease).parts) demand(other.device != part.device);
        if (move.back) demand(coming.insert(part.device).second);
        if (!move.back) going.insert(part.device);
      }
      facts.place = Place::moving;
    }
    for (const size_t device : going) demand(!coming.contains(device));
    for (size_t device = 0; device < 3; ++device) demand(used(device) <= 100);
    for (const auto& move : moves)
      under.push_back({move, world.now + Time(300 + random.below(500)), !calm && random.chance(10)});
  }
  void watch() {
    std::erase_if(waitsSince, [&](const auto& entry) { return !world.leases.contains(entry.first); });
    for (const auto& [id, facts] : world.leases) {
      if (!facts.wants || facts.place == Place::resident) {
        waitsSince.erase(id);
        continue;
      }
      longest = std::max(longest, world.now - waitsSince.try_emplace(id, world.now).first->second);
    }
  }
  void run(Time time) {
    for (const Time end = world.now + time; world.now < end; world.now += kTick) {
      live();
      finish();
      decide();
      watch();
    }
  }
};

}  // namespace

TEST_CASE("random histories: memory is never exceeded, everybody is served, and all can be repeated") {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    CAPTURE(seed);
    Chaos chaos(seed), again(seed);
    chaos.run(Time(600'000));
    again.run(Time(600'000));
    CHECK(chaos.history.str() == again.history.str());
    // From here on all that run want their devices for ever, and have one priority. Who stands two turns
    // above the others waits until each of them has had so many and the one that it is in; and it may be in
    // its way to more than one device.
    chaos.calm = true;
    Time longestTurn{0};
    for (auto& [id, facts] : chaos.world.leases) {
      facts.wants = true;
      facts.priority = 0;
    }
    chaos.run(Time(1'000'000));
    for (const auto& [id, facts] : chaos.world.leases)
      longestTurn = std::max(longestTurn, chaos.world.turns.turn(id));
    chaos.waitsSince.clear();
    chaos.longest = Time(0);
    chaos.run(Time(3'000'000));
    const auto leases = static_cast<int64_t>(chaos.world.leases.size());
    CHECK(chaos.longest <= 2 * leases * longestTurn);
    CHECK(chaos.longest > Time(0));
  }
}

TEST_CASE("shares are kept within a few percent") {
  for (const auto& [shares, sizes] :
       std::vector<std::pair<std::vector<uint32_t>, std::vector<uint64_t>>>{{{25, 0}, {60, 60}},
                                                                            {{50, 30, 20}, {60, 60, 60}},
                                                                            {{40, 0, 0, 0}, {90, 90, 51, 70}},
                                                                            {{0, 0, 0}, {50, 50, 50}},
                                                                            {{10, 0, 0}, {60, 60, 60}}}) {
    World world;
    uint32_t named = 0, unnamed = 0;
    for (size_t i = 0; i < shares.size(); ++i) {
      world.add(i + 1, Place::aside, sizes[i], true, shares[i]);
      named += shares[i];
      unnamed += shares[i] == 0 ? 1 : 0;
    }
    const Time all(10'000'000);
    world.run(all);
    double together = 0;
    for (size_t i = 0; i < shares.size(); ++i)
      together += static_cast<double>(world.turns.report(World::id(i + 1))->served.count());
    for (size_t i = 0; i < shares.size(); ++i) {
      const double share = shares[i] != 0 ? shares[i] : (100.0 - named) / unnamed;
      const double part =
          static_cast<double>(world.turns.report(World::id(i + 1))->served.count()) / together * 100;
      CAPTURE(i, share, part);
      CHECK(part == Approx(share).margin(2.5));
    }
  }
}

TEST_CASE("a hundred leases are decided about in no time") {
  World world({1000});
  for (uint64_t i = 1; i <= 100; ++i) world.add(i, Place::aside, 30);
  const auto began = std::chrono::steady_clock::now();
  world.run(Time(100'000));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  CHECK(world.moves.size() > 100);
  CHECK(took.count() / static_cast<double>(world.moves.size() + 1000) < 0.02);
}
