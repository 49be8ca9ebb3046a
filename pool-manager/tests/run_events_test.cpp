// `gpupool events`: what happens is printed as it happens, also behind a manager that was started again.
#include <signal.h>

#include <nlohmann/json.hpp>

#include "tool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;
using nlohmann::json;

namespace {

struct Events : ToolFixture {
  // Follows, from now on: what it begins with has been asked for when the headline is there.
  void follow(Program& program, std::vector<std::string> words = {}) {
    words.insert(words.begin(), {TOOL, "events"});
    start(program, words);
    REQUIRE(until([&] { return seen(program, "TIME ") || program.ended; }));
  }
  bool seen(Program& program, const std::string& what) {
    program.poll();
    return contains(program.text, what);
  }
  void interrupt(Program& program) {
    ::kill(program.pid, SIGINT);
    finish(program);
    CHECK(program.exitStatus() == 0);
  }
};

}  // namespace

TEST_CASE_METHOD(Events, "events prints leases, cordons and servers as they change, until Ctrl-C") {
  Program before, watched, one;
  run(before, {"--reason", "before", "--", "true"});
  REQUIRE(soonFree());
  follow(watched);
  run(one, {"--reason", "nightly tests", "--", "true"});
  REQUIRE(soonFree());
  said({"cordon", "--reason", "a new fan", "a"});
  REQUIRE(until([&] { return seen(watched, "a new fan"); }));
  CHECK(contains(watched.text, " granted "));
  CHECK(contains(watched.text, "a GPU 0"));
  CHECK(contains(watched.text, "nightly tests"));
  CHECK(contains(watched.text, " released "));
  CHECK_FALSE(contains(watched.text, "before"));
  server->leave().wait(io.waitScope);
  REQUIRE(until([&] { return seen(watched, "server-left") || seen(watched, "server-lost"); }));
  server->join(address);
  REQUIRE(until([&] { return seen(watched, "server-alive"); }));
  interrupt(watched);
}

TEST_CASE_METHOD(Events, "events goes on when the manager was started again, and misses nothing") {
  Program watched;
  follow(watched);
  said({"cordon", "--reason", "the first", "a"});
  REQUIRE(until([&] { return seen(watched, "the first"); }));
  stopManager();
  REQUIRE(until([&] { return seen(watched, "gpupool: the manager does not answer, and is asked again: "); }));
  startManager();
  said({"uncordon", "a"});
  REQUIRE(until([&] { return service->pool().servers().contains("a"); }));  // it comes back by itself
  said({"cordon", "--reason", "the second", "a"});
  REQUIRE(until([&] { return seen(watched, "the second"); }));
  CHECK(contains(watched.text, "gpupool: the manager answers again"));
  CHECK(contains(watched.text, " uncordoned "));
  const size_t first = watched.text.find("the first");
  CHECK(watched.text.find("the first", first + 1) == std::string::npos);
  CHECK_FALSE(contains(watched.text, "server-left"));  // it comes back, a moment later than the manager
  interrupt(watched);
}

TEST_CASE_METHOD(Events, "events of one lease or of one server, from some time on, as JSON") {
  Program first, second;
  run(first, {"--", "true"});
  REQUIRE(soonFree());
  run(second, {"--", "true"});
  REQUIRE(soonFree());
  said({"cordon", "--reason", "a new fan", "a"});
  const auto lines = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"events", "--no-follow", "--since", "1h", "-o", "json"});
    std::istringstream text(said(words));
    std::vector<json> all;
    for (std::string line; std::getline(text, line);) all.push_back(json::parse(line));
    return all;
  };
  auto all = lines({});
  REQUIRE(all.size() == 6);
  CHECK(all[0]["event"] == "server-alive");
  all.erase(all.begin());
  CHECK(all[0]["event"] == "granted");
  CHECK(all[4]["event"] == "cordoned");
  CHECK(all[4]["reason"] == "a new fan");
  const std::string lease = all[0]["lease"];
  const auto ofLease = lines({"--lease", lease.substr(0, 8)});
  REQUIRE(ofLease.size() == 2);
  CHECK(ofLease[1]["event"] == "released");
  CHECK(ofLease[1]["lease"] == lease);
  CHECK(lines({"--server", "a"}).size() == 6);
  CHECK(lines({"--server", "z"}).empty());
}

TEST_CASE_METHOD(Events, "events needs a manager at first, and options that make sense") {
  CHECK(contains(tool(2, {"events", "--lease", "xyz"}), "is no lease's id"));
  CHECK(contains(tool(2, {"events", "--no-follow"}), "--since says from when on"));
  CHECK(contains(tool(2, {"events", "-o", "xml"}), "is not table, wide or json"));
  stopManager();
  CHECK(contains(tool(1, {"events"}), "no pool manager is reachable"));
}
