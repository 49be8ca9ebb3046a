// What `gpupool run` can name, and `gpupool explain` and `audit`, as a user sees them.
#include <signal.h>

#include <nlohmann/json.hpp>

#include "tool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;
using Fixture = ToolFixture;
using nlohmann::json;

TEST_CASE_METHOD(Fixture, "explain says what a request would get, in words and as JSON") {
  const std::string name = server->facts.devices[0].name;
  CHECK(contains(said({"explain"}), "gpupool: it would be leased now: a GPU 0\n"));
  const json now = json::parse(said({"explain", "--json", "--gpu", name, "--time", "1h"}));
  CHECK(now["outlook"] == "now");
  CHECK(now["servers"][0]["devices"][0]["fits"] == true);
  const std::string never = tool(4, {"explain", "--gpu", "b200"});
  CHECK(contains(never,
                 "gpupool: it can never be served: 1 device 'b200' is wanted, but the most that any "
                 "server could give is 0"));
  CHECK(contains(never, "is not 'b200'"));
  CHECK(contains(tool(2, {"explain", "--gpu", "memory>1"}), "a condition has >= or <="));
  CHECK(contains(tool(2, {"explain", "true"}), "no program is run"));
  Program holds;
  start(holds, {TOOL, "run", "--", APPLICATION, "sleep", "60"});
  sleeper(holds);
  const std::string waits = tool(3, {"explain"});
  CHECK(contains(waits, "gpupool: it would wait until GPUs are free: 1 device is wanted, none is free"));
  CHECK(contains(waits, "is held by "));
  CHECK(contains(tool(3, {"explain", "--server", "a"}), "is held by "));
  CHECK(contains(tool(4, {"explain", "--server", "z"}), "there is no server named z"));
}

TEST_CASE_METHOD(Fixture, "a lease's reason and time limit are shown, and its end is told ahead") {
  Program holds;
  start(holds, {TOOL, "run", "--time", "5s", "--reason", "nightly tests", "--", APPLICATION, "sleep", "60"});
  sleeper(holds);
  const std::string listed = said({"leases", "-v"});
  CHECK((contains(listed, " is for: nightly tests\n") || service->pool().leases().empty()));
  REQUIRE(until(
      [&] {
        holds.poll();
        return contains(holds.text,
                        "gpupool: the lease ends in 500ms: its time limit (--time 5s) is over then\n");
      },
      30'000));
  REQUIRE(until([&] { return service->pool().leases().empty(); }, 30'000));
  CHECK(server->revokeReasons == std::vector<std::string>{"its time limit of 5 s is over"});
  CHECK(contains(said({"audit"}), "its time limit of 5 s is over"));
  Program bad;
  run(bad, {"--time", "10ms", "true"});
  CHECK(contains(bad.text, "--time: at least 1s"));
}

TEST_CASE_METHOD(Fixture, "audit lists what has happened, of one lease, lately, and as JSON") {
  Program first, second;
  run(first, {"--reason", "one", "--", "true"});
  REQUIRE(soonFree());
  run(second, {"--", "true"});
  REQUIRE(soonFree());
  said({"cordon", "--reason", "a new fan", "a"});
  json all = json::parse(said({"audit", "--json"}));
  REQUIRE(all.size() == 6);
  CHECK(all[0]["event"] == "server-alive");
  all.erase(0);
  CHECK(all[0]["event"] == "granted");
  CHECK(all[0]["reason"] == "one");
  CHECK(all[0]["where"] == "a GPU 0");
  CHECK(all[0]["by"] == "the operator");
  CHECK(all[1]["event"] == "released");
  CHECK(all[1]["lease"] == all[0]["lease"]);
  CHECK(all[4]["event"] == "cordoned");
  CHECK(all[4]["lease"] == "");
  const std::string lease = all[0]["lease"];
  const json one = json::parse(said({"audit", "--json", "--since", "1h", "--lease", lease.substr(0, 8)}));
  CHECK(one.size() == 2);
  const std::string table = said({"audit"});
  CHECK(contains(table, "TIME "));
  CHECK(contains(table, "  granted       " + lease.substr(0, 8) + "  a GPU 0"));
  CHECK(contains(table, "cordoned      -         a "));
  CHECK(contains(table, "a new fan"));
  CHECK(json::parse(said({"audit", "-o", "json"})).size() == 6);
  const std::string wide = said({"audit", "-o", "wide"});
  CHECK(contains(wide, "NUMBER  TIME "));
  CHECK(contains(wide, "  granted       " + lease + "  a GPU 0"));
  CHECK(contains(tool(2, {"audit", "-o", "xml"}), "is not table, wide or json"));
  CHECK(contains(tool(2, {"audit", "--lease", "xyz"}), "is no lease's id"));
}

TEST_CASE_METHOD(Fixture, "a long log comes in several answers") {
  for (int i = 0; i < 700; ++i) {
    service->pool().cordon({}, "a", {std::to_string(i), "", 0}, [](const std::string&) {});
    while (store->deliver()) {
    }
  }
  const json all = json::parse(said({"audit", "--json"}));
  REQUIRE(all.size() == 701);  // and that the server is there
  CHECK(all[1]["reason"] == "0");
  CHECK(all[700]["reason"] == "699");
}

TEST_CASE_METHOD(Fixture, "explain has a table and JSON, and slips are pointed out") {
  CHECK(json::parse(said({"explain", "-o", "json"})) == json::parse(said({"explain", "--json"})));
  CHECK(contains(tool(2, {"explain", "-o", "wide"}), "'wide' is not table or json"));
  CHECK(contains(tool(2, {"explain", "--gpus", "h200"}),
                 "--gpus: 'h200' is not a whole number: it says how many; which GPUs says --gpu"));
  CHECK(contains(tool(2, {"explain", "--memroy", "1GiB"}), "did you mean --memory?"));
}
