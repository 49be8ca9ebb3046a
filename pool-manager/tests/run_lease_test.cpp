// `gpupool lease`: a lease that outlives the command, for the programs of a shell.
#include <signal.h>

#include <nlohmann/json.hpp>

#include "tool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;
using nlohmann::json;

namespace {

struct Lease : ToolFixture {
  // What a shell prints that runs these commands; it ends well.
  std::string shell(const std::string& commands) {
    Program program;
    start(program, {"/bin/sh", "-c", commands});
    REQUIRE(until([&] { return program.poll(); }, 20'000));
    INFO(program.text);
    CHECK(program.exitStatus() == 0);
    return program.text;
  }
  const std::string tool_ = TOOL, application = APPLICATION;
};

}  // namespace

TEST_CASE_METHOD(Lease, "the programs of a shell use its lease, one after the other, until it is released") {
  const std::string text =
      shell("set -e; eval \"$(" + tool_ + " lease --reason 'a shell')\"; echo is $GPUPOOL_LEASE; " +
            application + " open; " + application + " open; echo path $LD_LIBRARY_PATH; " + tool_ +
            " leases -v; " + tool_ + " release $GPUPOOL_LEASE");
  const std::string id = text.substr(text.find("is ") + 3, 32);
  CHECK(contains(text, "gpupool: lease " + id.substr(0, 8) + ", 1 GPU; `gpupool release " + id.substr(0, 8)));
  CHECK(contains(text, "path " + folder.path + "/lib:/before\n"));
  CHECK(contains(text, " gpupool lease"));  // who holds it
  CHECK(contains(text, "is for: a shell"));
  CHECK(contains(text, "gpupool: lease " + id + " is over"));
  const size_t holder = text.find(" pid ");
  REQUIRE(holder != std::string::npos);
  const auto pid = static_cast<pid_t>(std::stol(text.substr(holder + 5)));
  CHECK(until([&] { return ::kill(pid, 0) != 0; }, 20'000));  // without a manager it would never know
  const size_t first = text.find("session on a by shm");
  REQUIRE(first != std::string::npos);
  CHECK(text.find("session on a by shm", first + 1) != std::string::npos);
  CHECK(server->sessions == 2);
  CHECK(soonFree());
}

TEST_CASE_METHOD(Lease, "a lease is renewed when the command has ended, and its holder ends with it") {
  const std::string text = said({"lease", "--ttl", "2s", "-o", "json"});
  const json told = json::parse(text.substr(0, text.find("gpupool: lease ")));
  const std::string id = told["lease"];
  CHECK(told["environment"]["GPUPOOL_LEASE"] == id);
  pause(3500);  // past its time to live
  REQUIRE(service->pool().leases().size() == 1);
  environment.push_back("GPUPOOL_HOLDER=" + told["environment"]["GPUPOOL_HOLDER"].get<std::string>());
  Program uses;
  start(uses, {application, "open"});
  finish(uses);
  CHECK(uses.exitStatus() == 0);
  said({"release", id});
  CHECK(soonFree());
  CHECK(until([&] {
    Program late;
    start(late, {application, "open"});
    finish(late);
    return contains(late.text, "application: no holder");
  }));
}

TEST_CASE_METHOD(Lease, "a lease that cannot be had, or that nobody hears of, is none") {
  CHECK(contains(tool(1, {"lease", "--gpus", "2"}), "no server has more than 1"));
  CHECK(contains(tool(2, {"lease", "true"}), "no program is run"));
  CHECK(contains(tool(2, {"lease", "-o", "table"}), "is not shell or json"));
  CHECK(contains(tool(2, {"lease", "--claim", "alps:1:0"}), "there is no such option"));
  Program closed;
  start(closed, {"/bin/sh", "-c", tool_ + " lease > /dev/full"});
  finish(closed);
  CHECK(closed.exitStatus() == 1);
  CHECK(contains(closed.text, "it is given back"));
  CHECK(soonFree());
}

TEST_CASE_METHOD(Lease, "the holder gives the lease back when it is told to end") {
  said({"lease"});
  REQUIRE(service->pool().leases().size() == 1);
  const std::string holder = service->pool().leases().begin()->second.holder;
  REQUIRE(contains(holder, " pid "));
  ::kill(static_cast<pid_t>(std::stol(holder.substr(holder.find(" pid ") + 5))), SIGTERM);
  CHECK(soonFree());
}
