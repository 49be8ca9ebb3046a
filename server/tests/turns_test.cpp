// Who has the devices when leases take turns: single rules.
#include <algorithm>

#include "catch.h"
#include "server/tests/turns_world.h"

using namespace gpupool::server;
using namespace gpupool::server::test;

using Moves = std::vector<std::string>;

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
