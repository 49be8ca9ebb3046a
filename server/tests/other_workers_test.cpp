// Worker programs of other builds: what they say they are, and which of them a server takes.
#include "server/front/other_workers.h"

#include <sys/wait.h>

#include <algorithm>

#include "server/tests/support.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

constexpr std::chrono::seconds kLong(60);

struct Programs : Folder {
  // A script with that text.
  void add(const std::string& name, const std::string& text, bool executable = true) {
    std::ofstream(path + "/" + name) << "#!/bin/sh\n" << text << "\n";
    if (executable) std::filesystem::permissions(path + "/" + name, std::filesystem::perms::owner_all);
  }
  std::string why(const std::string& name, std::chrono::milliseconds bound = kLong) {
    try {
      identifyWorker(path + "/" + name, bound);
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  }
};

std::string line(uint32_t interface, const char* rows) {
  return "gpupool-worker interface=" + std::to_string(interface) + " rows=" + rows +
         " frames=4 release=0.0.8";
}

}  // namespace

TEST_CASE("what a worker program says of itself is read as it was written") {
  const WorkerIdentity said{3, 0x0123456789abcdef, 4, "0.2.0~rc1"};
  CHECK(textOf(said) == "gpupool-worker interface=3 rows=0123456789abcdef frames=4 release=0.2.0~rc1");
  const auto read = parseWorkerIdentity(textOf(said) + " later=words");
  REQUIRE(read);
  CHECK(read->interface == 3);
  CHECK(read->rows == said.rows);
  CHECK(read->frames == 4);
  CHECK(read->release == "0.2.0~rc1");
  for (const char* other :
       {"", "gpupool-worker", "gpupool 0.1.0", "gpupool-worker interface=x rows=1 frames=4 release=1",
        "gpupool-worker interface=1 rows=1g frames=4 release=1", "gpupool-worker interface=1 rows=1 frames=4",
        "gpupool-worker interface=1 rows=1 frames=4 release=\x1b[31m",
        "gpupool-worker interface=1 rows=11223344556677889 frames=4 release=1",
        "gpupool-worker interface=1 rows=1 frames=4 release=123456789012345678901234567890123"})
    CHECK_FALSE(parseWorkerIdentity(other));
}

TEST_CASE("a program that is none is told apart, and waited for no longer than the bound") {
  Programs programs;
  programs.add("good", "echo '" + line(kWorkerInterface, "77") + "'");
  programs.add("before", "echo unknown argument >&2; exit 1");
  programs.add("other", "echo hello");
  programs.add("endless", "yes | tr -d '\\n'");
  programs.add("mute", "exec sleep 1000");
  programs.add("data", "", false);
  CHECK(identifyWorker(programs.path + "/good", kLong).rows == 0x77);
  CHECK(contains(programs.why("before"), "a build from before that option"));
  CHECK(contains(programs.why("other"), "something else"));
  CHECK(contains(programs.why("endless"), "too long"));
  CHECK(contains(programs.why("data"), "Permission denied"));
  CHECK(contains(programs.why("nowhere"), "No such file"));
  CHECK(contains(programs.why("mute", std::chrono::milliseconds(50)), "does not answer"));
  CHECK(waitpid(-1, nullptr, WNOHANG) == -1);  // nobody is left
}

TEST_CASE("a server takes the programs that it can start, one for each kind of client") {
  Programs programs;
  programs.add("gpupool-worker-0.0.8", "echo '" + line(kWorkerInterface, "77") + "'");
  programs.add("gpupool-worker-0.0.7", "echo '" + line(kWorkerInterface, "66") + "'");
  programs.add("gpupool-worker-0.0.7-again", "echo '" + line(kWorkerInterface, "66") + "'");
  programs.add("gpupool-worker-0.0.9", "echo '" + line(kWorkerInterface, "1234") + "'");
  programs.add("gpupool-worker-9.0", "echo '" + line(kWorkerInterface + 1, "99") + "'");
  programs.add("gpupool-worker-0.0.1", "exit 1");
  const auto found = findWorkers(programs.path, kRows);
  REQUIRE(found.size() == 2);
  CHECK(found[0].identity.rows == 0x66);
  CHECK(found[0].program.path() == programs.path + "/gpupool-worker-0.0.7");
  CHECK(found[1].identity.rows == 0x77);
  CHECK(findWorkers(programs.path + "/nowhere", kRows).empty());
}
