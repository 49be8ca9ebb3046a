// Claims as a scheduler and the programs of its job use them.
#include <signal.h>

#include <nlohmann/json.hpp>

#include "tool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;
using Fixture = ToolFixture;
using nlohmann::json;

namespace {

std::string line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace

TEST_CASE_METHOD(Fixture, "a claim that waits for another one whose name begins as its own says so") {
  said({"claim", "create", "--job", "alps:1:10"});
  const std::string waited = tool(3, {"claim", "create", "--job", "alps:1:1", "--wait", "3s"});
  CHECK(contains(waited, "gpupool: waiting (--wait 3s): 1 device is wanted, none is free"));
  said({"claim", "release", "alps:1:10"});
}

TEST_CASE_METHOD(Fixture, "programs of a job use its claim, at once and one after the other") {
  const std::string id = line(said({"claim", "create", "--job", "alps:1:0", "--reason", "a job"}));
  REQUIRE(Id::parse(id));
  CHECK(line(said({"claim", "create", "--job", "alps:1:0"})) == id);
  CHECK(contains(said({"claim", "list"}), "alps:1:0"));
  CHECK(contains(said({"leases"}), "claim alps:1:0 of "));
  CHECK(contains(tool(3, {"claim", "create", "--job", "alps:2:0"}), "none is free"));
  const std::string waited = tool(3, {"claim", "create", "--job", "alps:2:0", "--wait", "3s"});
  CHECK(contains(waited, "gpupool: waiting (--wait 3s): 1 device is wanted, none is free"));

  Program one, two;
  start(one, {TOOL, "run", "--claim", "alps:1:0", "--", APPLICATION, "sleep", "60"});
  environment.push_back("GPUPOOL_CLAIM=" + id);
  start(two, {TOOL, "run", "--", APPLICATION, "sleep", "60"});
  const pid_t first = sleeper(one), second = sleeper(two);
  CHECK(contains(said({"claim", "list", "-o", "wide"}), "  SHARE  PRIORITY  "));
  json claims = json::parse(said({"claim", "list", "-o", "json"}));
  REQUIRE(claims.size() == 1);
  CHECK(claims[0]["claim"]["usedBy"].size() == 2);
  CHECK(service->pool().leases().size() == 1);
  ::kill(first, SIGKILL);
  finish(one);
  ::kill(second, SIGKILL);
  finish(two);
  REQUIRE(
      until([&] { return json::parse(said({"claim", "list", "--json"}))[0]["claim"]["usedBy"].empty(); }));

  Program next;
  run(next, {"true"});
  CHECK(next.exitStatus() == 0);
  CHECK(service->pool().leases().size() == 1);
  CHECK(contains(said({"claim", "release", "alps:1:0"}), "claim alps:1:0 is over"));
  REQUIRE(soonFree());
  said({"claim", "release", "alps:1:0"});
  Program late;
  run(late, {"true"});
  CHECK(late.exitStatus() == 125);
  CHECK(contains(late.text, "gpupool: claim " + id + " has ended: released"));
  CHECK(contains(tool(1, {"claim", "create", "--job", "alps:1:0"}), "has ended: released"));
  const std::string audit = said({"audit"});
  CHECK(contains(audit, " adopted "));
  CHECK(contains(audit, " left "));
}

TEST_CASE_METHOD(Fixture, "a claim that no program uses ends; of one in use the release is told") {
  said({"claim", "create", "--job", "alps:1:0", "--unused", "1s"});
  REQUIRE(soonFree());
  CHECK(server->revokeReasons == std::vector<std::string>{"no program has used the claim for 1 s"});
  said({"claim", "create", "--job", "alps:1:1"});
  Program used;
  start(used, {TOOL, "run", "--claim", "alps:1:1", "--", APPLICATION, "sleep", "60"});
  const pid_t sleeping = sleeper(used);
  said({"claim", "release", "alps:1:1"});
  REQUIRE(until([&] {
    used.poll();
    return contains(used.text, "gpupool: the lease has ended: released");
  }));
  ::kill(sleeping, SIGKILL);
  finish(used);
}

TEST_CASE_METHOD(Fixture, "a claim that no program uses is kept as long as it is renewed") {
  const std::string id = line(said({"claim", "create", "--job", "alps:1:0", "--unused", "3s"}));
  const auto longer = std::chrono::steady_clock::now() + std::chrono::seconds(4);
  while (std::chrono::steady_clock::now() < longer) said({"claim", "renew", id.substr(0, 8)});
  CHECK(contains(said({"claim", "list"}), "alps:1:0"));
  CHECK(said({"claim", "renew", "alps:1:0"}).empty());
  CHECK(contains(tool(1, {"claim", "renew", "1234", id}),
                 "there is no claim 1234, and `gpupool audit` knows of none"));
  CHECK(contains(tool(1, {"claim", "renew", "zzzz"}), "'zzzz' names no claim"));
  REQUIRE(soonFree());
  for (const std::string& name : {id, id.substr(0, 8), std::string("alps:1:0")}) {
    const std::string text = tool(1, {"claim", "renew", name});
    CHECK(contains(text, "gpupool: claim " + name + " has ended (expired 2"));  // a date
    CHECK(contains(text, "): no program has used the claim for 3 s"));
  }
  CHECK(contains(tool(1, {"claim", "renew", "alps:1"}), "there is no claim alps:1,"));
}

TEST_CASE_METHOD(Fixture, "what the claim commands do not take") {
  CHECK(contains(tool(2, {"claim"}), "create, list, renew or release?"));
  CHECK(contains(tool(2, {"claim", "create"}), "a job is named CLUSTER:ID:RESTARTS"));
  CHECK(contains(tool(2, {"claim", "create", "--job", "alps:1"}), "a job is named CLUSTER:ID:RESTARTS"));
  CHECK(
      contains(tool(2, {"claim", "create", "--job", "alps:1:0", "--unused", "10ms"}), "--unused: 1s to 1h"));
  CHECK(contains(tool(1, {"claim", "release", "1234"}), "there is no claim 1234"));
  CHECK(contains(tool(2, {"claim", "release", "123"}), "'123' is too short for the id of a claim"));
  CHECK(contains(tool(2, {"claim", "create", "--job", "alps:1:0", "--for", std::string(65, 't')}),
                 "--for: at most 64 bytes, and these are 65"));
  CHECK(contains(tool(4, {"claim", "create", "--job", "alps:1:0", "--gpus", "8"}), "8 devices"));
  CHECK(contains(tool(2, {"claim", "create", "--job", "alps:1:0", "--gpus", "9"}),
                 "--gpus: 1 to 8, and these are 9"));
  CHECK(contains(said({"claim", "create", "--help"}), "usage: gpupool claim create"));
  Program none;
  run(none, {"--claim", "alps:3:0", "true"});
  CHECK(none.exitStatus() == 125);
  CHECK(contains(none.text, "gpupool: there is no claim alps:3:0"));
}
