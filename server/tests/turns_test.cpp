// Who has the devices when leases take turns: single rules, then random histories with a clock of their own.
#include "server/front/turns.h"

#include <algorithm>
#include <random>
#include <set>
#include <source_location>
#include <sstream>

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using Place = Turns::Place;
using Time = Turns::Time;

namespace {

constexpr Time kTick{100};

// Leases that do what they are told at once, unless a test says otherwise.
struct World {
  Turns turns;
  std::map<Id, Turns::Facts> leases;
  Time now{0};
  std::map<Id, std::string> failures;  // of those that do not go aside
  std::map<Id, Time> took;
  std::vector<std::string> moves;  // "2 aside at 1000"
  std::vector<Turns::Move> latest;

  explicit World(const std::vector<uint64_t>& memory = {100}) : turns(settings(memory)) {}
  static Turns::Settings settings(std::vector<uint64_t> memory) {
    Turns::Settings settings;
    settings.memory = std::move(memory);
    return settings;
  }
  static Id id(uint64_t number) { return {0, number}; }
  Turns::Facts& operator[](uint64_t number) { return leases.at(id(number)); }
  void add(uint64_t number, Place place, uint64_t bytes, bool wants = true, uint32_t share = 0,
           int priority = 0) {
    leases[id(number)] = {place, wants, share, priority, {{0, bytes, 0}}};
  }
  // One decision, carried out.
  void step() {
    turns.see(leases, now);
    latest = turns.decide(now);
    for (const auto& move : latest) {
      if (!move.back && failures.contains(move.lease)) {
        turns.failed(move.lease, failures[move.lease], now);
        moves.push_back(std::to_string(move.lease.low) + " stays at " + std::to_string(now.count()));
        continue;
      }
      leases[move.lease].place = move.back ? Place::resident : Place::aside;
      turns.moved(move.lease, move.back, took[move.lease]);
      moves.push_back(std::to_string(move.lease.low) + (move.back ? " back at " : " aside at ") +
                      std::to_string(now.count()));
    }
  }
  // Until nothing more happens at this moment.
  void settle() {
    do step();
    while (!latest.empty());
  }
  void run(Time time) {
    for (const Time end = now + time; now < end; now += kTick) settle();
  }
  std::vector<std::string> takeMoves() { return std::exchange(moves, {}); }
};

using Moves = std::vector<std::string>;

}  // namespace

TEST_CASE("while nobody waits nothing is moved, and who wants nothing stays aside") {
  World world;
  world.add(1, Place::resident, 60);
  world.add(2, Place::aside, 60, false);
  world.run(Time(100'000));
  CHECK(world.moves.empty());
  CHECK_FALSE(world.turns.waiting());
}

TEST_CASE("where there is room a lease comes back at once") {
  World world;
  world.add(1, Place::resident, 40);
  world.add(2, Place::aside, 60);
  world.step();
  CHECK(world.moves == Moves{"2 back at 0"});
}

TEST_CASE("two leases of which one fits have equal turns") {
  World world;
  world.add(1, Place::resident, 60);
  world.add(2, Place::aside, 60);
  world.run(Time(30'100));
  CHECK(world.moves == Moves{"1 aside at 10000", "2 back at 10000", "2 aside at 20000", "1 back at 20000",
                             "1 aside at 30000", "2 back at 30000"});
  CHECK(world.turns.report(World::id(1))->turns == 1);
  CHECK(world.turns.report(World::id(1))->served == Time(20'000));
}

TEST_CASE("a lease that has been alone for long goes when another wants its devices") {
  World world;
  world.add(1, Place::resident, 60);
  world.add(2, Place::aside, 60, false);
  world.run(Time(50'000));
  world[2].wants = true;
  world.step();
  CHECK(world.moves == Moves{"1 aside at 50000"});
}

TEST_CASE("a quiet lease yields after half a second, and after what its own move takes") {
  for (const auto& [took, at] : {std::pair{Time(0), "3500"}, {Time(2'000), "5000"}}) {
    World world;
    world.took[World::id(1)] = took;
    world.add(1, Place::aside, 60);
    world.run(Time(1'000));
    world.add(2, Place::aside, 60);
    world.run(Time(2'000));
    world[1].wants = false;
    world.takeMoves();
    world.run(Time(3'000));
    CHECK(world.moves == Moves{std::string("1 aside at ") + at, std::string("2 back at ") + at});
  }
}

TEST_CASE("only those go aside that are needed, quiet ones first, and none if that makes no room") {
  World world;
  world.add(1, Place::resident, 30);
  world.add(2, Place::resident, 30, false);
  world.add(3, Place::resident, 40);
  world.run(Time(20'000));
  world.add(4, Place::aside, 25);
  world.step();
  CHECK(world.takeMoves() == Moves{"2 aside at 20000"});  // both others' turns are over
  world.settle();
  world[2].wants = world[4].wants = false;
  world.add(5, Place::aside, 90);
  world.run(Time(400));
  CHECK(world.takeMoves() == Moves{"4 back at 20000"});  // of 4 it is not known yet that it is quiet
  world.run(Time(200));
  CHECK(world.takeMoves() ==
        Moves{"4 aside at 20500", "1 aside at 20500", "3 aside at 20500", "5 back at 20500"});
}

TEST_CASE("turns are as long as the shares say") {
  World world;
  world.add(1, Place::resident, 60, true, 25);
  world.add(2, Place::aside, 60);
  world.step();
  CHECK(world.turns.turn(World::id(1)) == Time(10'000));
  CHECK(world.turns.turn(World::id(2)) == Time(30'000));
  world.add(3, Place::aside, 60, true, 99);
  world.step();
  CHECK(world.turns.turn(World::id(2)) == Time(10'000));  // one percent is left
  CHECK(world.turns.turn(World::id(3)) == Time(990'000));
}

TEST_CASE("turns are ten times as long as what the most costly of them takes to move") {
  World world;
  world.took[World::id(1)] = Time(2'000);
  world.add(1, Place::resident, 60);
  world.add(2, Place::aside, 60);
  world.run(Time(20'000));
  CHECK(world.turns.turn(World::id(1)) == Time(20'000));  // it has gone, and not come back yet
  world.run(Time(20'000));
  CHECK(world.turns.turn(World::id(1)) == Time(40'000));
  CHECK(world.turns.turn(World::id(2)) == Time(40'000));
}

TEST_CASE("what a lease had too much of one turn the others have in theirs") {
  World world;
  world.add(1, Place::resident, 60);
  world.add(2, Place::aside, 60);
  world.failures[World::id(1)] = "a kernel runs";
  world.run(Time(13'500));  // it was asked at 10, 11 and 13 s
  CHECK(world.takeMoves() == Moves{"1 stays at 10000", "1 stays at 11000", "1 stays at 13000"});
  world.failures.clear();
  world.run(Time(30'000));
  CHECK(world.moves == Moves{"1 aside at 17000", "2 back at 17000", "2 aside at 34000", "1 back at 34000"});
}

TEST_CASE("who has a higher priority goes first, and keeps its devices while it wants them") {
  World world;
  world.add(1, Place::resident, 60, true, 0, 1);
  world.add(2, Place::aside, 60, true, 0, 1);
  world.run(Time(2'000));
  world.add(3, Place::aside, 60, true, 0, 2);
  world.run(Time(100'000));
  CHECK(world.takeMoves() == Moves{"1 aside at 2000", "3 back at 2000"});
  world[3].wants = false;
  world.run(Time(1'000));
  CHECK(world.takeMoves() == Moves{"3 aside at 102500", "2 back at 102500"});
  world[3].wants = true;  // what has just come back has a second
  world.run(Time(1'000));
  CHECK(world.takeMoves() == Moves{"2 aside at 103500", "3 back at 103500"});
}

TEST_CASE("behind a lease that will get room nobody overtakes, behind one that will not everybody may") {
  World world;
  world.add(1, Place::resident, 50);
  world.run(Time(5'000));
  world.add(2, Place::resident, 30);
  world.step();
  world.add(3, Place::aside, 100);
  world.step();
  world.add(4, Place::aside, 20);
  world.run(Time(9'900));
  CHECK(world.takeMoves().empty());  // 20 are free
  world.run(Time(200));
  CHECK(world.takeMoves() == Moves{"1 aside at 15000", "2 aside at 15000", "3 back at 15000"});

  World other;
  other.add(1, Place::resident, 50, true, 0, 2);
  other.add(3, Place::aside, 100);
  other.step();
  other.add(4, Place::aside, 20);
  other.step();
  CHECK(other.moves == Moves{"4 back at 0"});
}

TEST_CASE("one that cannot be put aside is asked again later, and others are tried meanwhile") {
  World world;
  world.add(1, Place::resident, 50);
  world.step();
  world.add(2, Place::resident, 50);
  world.run(Time(1'000));
  world.failures[World::id(1)] = "a kernel runs";
  world.add(3, Place::aside, 40);
  world.run(Time(9'100));
  CHECK(world.takeMoves() == Moves{"1 stays at 10000", "2 aside at 10000", "3 back at 10000"});
  CHECK(world.turns.report(World::id(1))->note == "a kernel runs");
  world.failures.clear();
  world.run(Time(1'000));
  CHECK(world.takeMoves() == Moves{"1 aside at 11000", "2 back at 11000"});
  CHECK(world.turns.report(World::id(1))->note.empty());
}

TEST_CASE("one that seemed quiet and could not be put aside has its turn; the pauses double") {
  World world;
  world.add(1, Place::resident, 60, false);
  world.add(2, Place::aside, 60);
  world.failures[World::id(1)] = "a kernel runs";
  world.run(Time(600));
  CHECK(world.latest.empty());
  CHECK(world.takeMoves() == Moves{"1 stays at 500"});
  world.run(Time(100'000));
  CHECK(world.moves == Moves{"1 stays at 10500", "1 stays at 12500", "1 stays at 16500", "1 stays at 24500",
                             "1 stays at 40500", "1 stays at 70500", "1 stays at 100500"});
}

TEST_CASE("one of high priority that could not be put aside once yields when it does nothing any more") {
  World world;
  world.add(1, Place::resident, 60, false, 0, 2);
  world.add(2, Place::aside, 60);
  world.failures[World::id(1)] = "a kernel runs";
  world.run(Time(600));
  CHECK(world.takeMoves() == Moves{"1 stays at 500"});
  world.failures.clear();
  world.run(Time(9'000));
  CHECK(world.moves.empty());
  world.run(Time(2'000));
  CHECK(world.moves == Moves{"1 aside at 10500", "2 back at 10500"});
}

TEST_CASE("beside one that could not be put aside nobody goes in vain") {
  World world;
  world.add(1, Place::resident, 50);
  world.add(2, Place::resident, 50);
  world.run(Time(20'000));
  world.add(3, Place::aside, 90);
  world.failures[World::id(1)] = "a kernel runs";
  world.run(Time(30'000));
  REQUIRE(world.moves.size() >= 6);
  CHECK(std::count(world.moves.begin(), world.moves.end(), "2 aside at 20000") == 1);
  CHECK(std::none_of(world.moves.begin() + 3, world.moves.end(),
                     [](const std::string& move) { return move[0] == '2'; }));
  world.failures.clear();
  world.takeMoves();
  world.run(Time(31'000));
  REQUIRE(world.moves.size() >= 3);
  world.moves.resize(3);
  CHECK(world.moves[0].starts_with("1 aside"));
  CHECK(world.moves[1].starts_with("2 aside"));
  CHECK(world.moves[2].starts_with("3 back"));
}

TEST_CASE("a quiet lease has a short time to finish what runs, one whose turn is over a long one") {
  for (const bool over : {false, true}) {
    World world;
    world.add(1, Place::resident, 60, over);
    world.run(Time(20'000));
    world.add(2, Place::aside, 60);
    world.turns.see(world.leases, world.now);
    CHECK(world.turns.decide(world.now) ==
          std::vector<Turns::Move>{{World::id(1), false, Time(over ? 30'000 : 200)}});
  }
}

TEST_CASE("a lease that cannot be brought back is tried again, and keeps nobody waiting meanwhile") {
  World world;
  world.add(1, Place::aside, 60);
  world.add(2, Place::aside, 60);
  world.turns.see(world.leases, Time(0));
  CHECK(world.turns.decide(Time(0)) == std::vector<Turns::Move>{{World::id(1), true, Time(0)}});
  CHECK(world.turns.decide(Time(0)).empty());  // one at a time
  world.turns.failed(World::id(1), "no memory", Time(0));
  world.run(Time(11'000));
  CHECK(world.moves == Moves{"2 back at 0", "2 aside at 10000", "1 back at 10000"});
}

TEST_CASE("what a lease keeps on its devices is learned, and not tried again and again") {
  World world;
  world.add(1, Place::resident, 60);
  world.add(2, Place::aside, 60);
  world.run(Time(10'000));
  world.step();
  world[1].parts[0].left = 50;  // so much stays there
  world.run(Time(10'000));
  CHECK(world.takeMoves() == Moves{"1 aside at 10000", "1 back at 10000"});
  world[1].parts[0].left = 0;
  world.run(Time(280'000));
  CHECK(world.moves.empty());
  world.run(Time(20'000));
  CHECK(world.moves == Moves{"1 aside at 310000", "2 back at 310000"});
}

TEST_CASE("leases of several devices and of one: disjoint ones move side by side, others wait") {
  World world({100, 100});
  world.add(1, Place::resident, 60);
  world.add(2, Place::resident, 60);
  world[2].parts = {{1, 60, 0}};
  world.run(Time(20'000));
  world.add(3, Place::aside, 60);
  world.add(4, Place::aside, 60);
  world[4].parts = {{1, 60, 0}};
  world.step();
  CHECK(world.takeMoves() == Moves{"1 aside at 20000", "2 aside at 20000"});
  world[1].place = world[2].place = Place::moving;
  world.step();
  CHECK(world.takeMoves().empty());
  world[1].place = Place::aside;
  world[1].wants = false;
  world.add(5, Place::aside, 60);
  world[5].parts = {{0, 60, 0}, {1, 60, 0}};
  world.step();
  CHECK(world.takeMoves() == Moves{"3 back at 20000"});
}

TEST_CASE("who sleeps saves up no time, and who comes late owes none") {
  World world;
  world.add(1, Place::resident, 60);
  world.add(2, Place::aside, 60);
  world.add(3, Place::aside, 60, false);
  world.run(Time(200'000));
  world[3].wants = true;
  world.takeMoves();
  world.run(Time(60'100));
  std::string back;
  for (const auto& move : world.moves)
    if (move.find("back") != std::string::npos) back += move[0];
  CHECK(back == "1231231");
}

// ---- random histories ----

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
