// `gpupool migrate` and `gpupool drain` as a user sees them, with two servers.
#include "tool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

// Two servers, and a program with a lease on the first one.
struct Moves : ToolFixture {
  Moves() {
    begin(program);
    other = kj::heap<FakeServer>(io, "b", 2, folder.path + "/other");
    other->join(address);
    other->joined().wait(io.waitScope);
    lease = service->pool().leases().begin()->first;
    id = lease.text();
  }
  void begin(Program& program) {
    start(program, {TOOL, "run", "--", APPLICATION, "sleep", "60"});
    sleeper(program);
  }
  void moveSome() {
    server->refuseMigrate = "a capture is open";
    other->living = {lease};
    CHECK(contains(tool(1, {"migrate", "--to", "b:1", id}), "may have sessions in both places"));
    server->refuseMigrate.clear();
  }
  bool onlyOnB() {
    return until([&] { return server->leases.empty(); }, 20'000) && other->leases.contains(lease);
  }

  Program program;
  kj::Own<FakeServer> other;
  Id lease;
  std::string id;
};

}  // namespace

TEST_CASE_METHOD(Moves, "a lease is moved to where --to says, and the tool says where it is") {
  const std::string name = "gpupool: lease " + id.substr(0, 8), moved = ": 2 sessions moved with 3.0 GiB; ";
  SECTION("nowhere") {
    CHECK(tool(0, {"migrate", id}) == name + moved + "the longest pause was 0.7 s; it is on a GPU 0\n");
    CHECK(server->movedTo.empty());
  }
  SECTION("another server") {
    CHECK(contains(tool(0, {"migrate", "--to", "b", id}),
                   moved + "the longest pause was 0.7 s; it is on b GPU 0"));
    CHECK(onlyOnB());
    const std::string log = said({"audit", "--lease", id});
    CHECK(contains(log, "  moving   " + id.substr(0, 8) + "  a GPU 0 "));
    CHECK(contains(log, "  to b GPU 0\n"));
    CHECK(contains(log, "  moved    " + id.substr(0, 8) + "  b GPU 0 "));
    CHECK(contains(log, "  all of its sessions are there\n"));
  }
  SECTION("a GPU of another server") {
    CHECK(contains(tool(0, {"migrate", "--to=b:1", id}), "it is on b GPU 1"));
    CHECK(onlyOnB());
    SECTION("and from there to another GPU") {
      CHECK(contains(tool(0, {"migrate", "--to", "0", id}), "it is on b GPU 0"));
      CHECK(other->leases.at(lease).devices.at(0).info.ordinal == 0);
    }
  }
  SECTION("where there is nothing") {
    CHECK(contains(tool(1, {"migrate", "--to", "3", id}), "a: there is no such GPU"));
    CHECK(contains(tool(1, {"migrate", "--to", "z", id}), "there is no server named z"));
    CHECK(contains(tool(1, {"migrate", "--to", "b:0,1", id}), "it has 1 GPU(s), and 2 are named"));
  }
  SECTION("what is no place") {
    for (const char* to : {"b:", "b:x", ":1", "b:1,", "b:1,,2", "b:-1"})
      CHECK(contains(tool(2, {"migrate", "--to", to, id}),
                     "is neither GPU[,GPU...], SERVER nor SERVER:GPU[,GPU...]"));
  }
}

TEST_CASE_METHOD(Moves, "who interrupts a move hears that it goes on") {
  server->muteMigrate = true;
  Program moving;
  start(moving, {TOOL, "migrate", id});
  REQUIRE(until([&] { return !server->migrations.empty(); }));
  ::kill(moving.pid, SIGINT);
  finish(moving);
  CHECK(moving.signal() == SIGINT);
  CHECK(moving.text == "gpupool: interrupted, but lease " + id.substr(0, 8) +
                           " goes on being moved; `gpupool leases` shows what becomes of it\n");
}

TEST_CASE_METHOD(Moves, "who waits until a lease is resumed is told so") {
  tool(0, {"suspend", id});
  Program another, waiting;
  start(another, {TOOL, "run", "--server", "a", "--memory", "1GiB", "--", APPLICATION, "sleep", "60"});
  sleeper(another);
  start(waiting, {TOOL, "resume", "--wait", "1m", id});
  const std::string told = "gpupool: waiting (--wait 1m): lease " + id.substr(0, 8) +
                           " wants room on a; `gpupool devices` shows who has it\n";
  CHECK(until([&] {
    waiting.poll();
    return contains(waiting.text, told);
  }));
  ::kill(another.pid, SIGTERM);
  finish(another);
  finish(waiting);
  CHECK(waiting.text == told + "gpupool: lease " + id.substr(0, 8) + " runs\n");
}

TEST_CASE_METHOD(Moves, "a lease that has sessions in both places is shown, and goes on") {
  moveSome();
  const std::string shown = tool(0, {"leases", "-v"});
  CHECK(contains(shown, "  moving  "));
  CHECK(contains(shown, id.substr(0, 8) + " is moving to b GPU 1"));
  CHECK(contains(tool(0, {"leases", "--json"}), "\"movesTo\": \"b GPU 1\""));
  CHECK(contains(tool(0, {"devices"}), "b       1"));
  CHECK(contains(tool(1, {"migrate", "--to", "b:0", id}), "is moving to b GPU 1 already"));
  CHECK(contains(tool(0, {"migrate", id}), "it is on b GPU 1"));
  CHECK(onlyOnB());
}

TEST_CASE_METHOD(Moves, "drain moves what can be moved, and says what stays") {
  const std::string name = "gpupool: lease " + id.substr(0, 8);
  SECTION("all") {
    const std::string said = tool(0, {"drain", "a"});
    CHECK(contains(said, name + " moved to b GPU 0\n"));
    CHECK(contains(said, "server a is cordoned and has no leases"));
    CHECK(server->leases.empty());
    CHECK(other->leases.contains(lease));
    CHECK(contains(tool(0, {"drain", "a"}), "has no leases"));
  }
  SECTION("what has moved in part goes on") {
    moveSome();
    CHECK(contains(tool(0, {"drain", "a"}), name + " moved to b GPU 1\n"));
  }
  SECTION("what cannot") {
    server->refuseMigrate = "kernels of the program may use the device's heap";
    const std::string said = tool(1, {"drain", "a"});
    CHECK(contains(said, name + " stays: server a: kernels of the program may use the device's heap\n"));
    CHECK(contains(said, "server a is cordoned and has 1 lease still:"));
    CHECK(server->leases.contains(lease));
  }
  SECTION("where there is no room") {
    Program second, third;
    begin(second), begin(third);
    CHECK(contains(tool(1, {"drain", "a"}), name + " stays: it cannot be moved: b: GPU 0"));
  }
  SECTION("what is moving there") {
    moveSome();
    CHECK(contains(tool(1, {"drain", "b"}), "server b is cordoned and has 1 lease still:"));
  }
  SECTION("not at all") {
    const std::string said = tool(1, {"drain", "--no-move", "a"});
    CHECK_FALSE(contains(said, name));
    CHECK(contains(said, "server a is cordoned and has 1 lease still:"));
    CHECK(server->migrations.empty());
  }
  SECTION("as long as it waits, and not when it is interrupted") {
    server->refuseMigrate = "no";
    const auto goesOn = [&] {
      auto asked = service->managerFor({}).drainStateRequest();
      asked.setServer("a");
      return asked.send().wait(io.waitScope).getState().getGoesOn();
    };
    Program draining;
    start(draining, {TOOL, "drain", "--wait", "10m", "a"});
    REQUIRE(until(
        [&] {
          draining.poll();
          return contains(draining.text, "waiting for the end of 1 lease");
        },
        20'000));
    CHECK(goesOn());
    const int signal = GENERATE(SIGINT, SIGTERM, SIGKILL);
    ::kill(draining.pid, signal);
    REQUIRE(until([&] { return draining.poll(); }, 20'000));
    CHECK(draining.signal() == signal);
    CHECK(goesOn() == (signal == SIGKILL));
    CHECK(contains(draining.text, "interrupted: no further lease is moved; server a stays cordoned") ==
          (signal != SIGKILL));
    CHECK(service->pool().cordons().contains("a"));
    CHECK(server->leases.contains(lease));
    tool(0, {"uncordon", "a"});
    CHECK_FALSE(goesOn());
  }
  SECTION("what ends meanwhile") {
    server->refuseMigrate = "no";
    Program draining;
    start(draining, {TOOL, "drain", "--wait", "1m", "a"});
    REQUIRE(until(
        [&] {
          draining.poll();
          return contains(draining.text, "waiting for the end of 1 lease");
        },
        20'000));
    CHECK(contains(draining.text, name + " stays: server a: no\n"));
    ::kill(program.pid, SIGTERM);
    finish(program);
    REQUIRE(until([&] { return draining.poll(); }, 20'000));
    CHECK(draining.exitStatus() == 0);
    CHECK(draining.text.find("stays") == draining.text.rfind("stays"));
  }
}
