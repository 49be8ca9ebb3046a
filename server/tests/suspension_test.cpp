// Leases suspended and resumed, with real processes: workers and a copier that do what a test says.
#include <fstream>

#include "server/tests/session_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

SideSettings suspending(std::function<void(Suspension::Settings&)> adjust,
                        std::function<void(CopierChild::Settings&)> adjustCopier) {
  SideSettings settings;
  if (adjust) settings.suspension = std::move(adjust);
  if (adjustCopier) settings.copier = std::move(adjustCopier);
  return settings;
}

struct Bench : SessionBench {
  explicit Bench(SideSettings settings) : SessionBench(std::move(settings)) {
    REQUIRE(grant(kLease, 1, 4 * kGiB) == "");
  }
  explicit Bench(std::function<void(Suspension::Settings&)> adjust = {},
                 std::function<void(CopierChild::Settings&)> adjustCopier = {})
      : SessionBench(suspending(std::move(adjust), std::move(adjustCopier))) {
    REQUIRE(grant(kLease, 1, 4 * kGiB) == "");
  }
  // Asks until the session says so.
  bool becomes(Opening& session, const std::string& state) {
    for (int attempt = 0; attempt < 1000; ++attempt) {
      if (order(session, 's') == state) return true;
      timer.afterDelay(10 * kj::MILLISECONDS).wait(io.waitScope);
    }
    return false;
  }
  Suspended suspend(uint32_t drainMs = 1000) {
    return suspension.suspend(kLease, drainMs).wait(io.waitScope);
  }
  void resume() { suspension.resume(kLease).wait(io.waitScope); }
  std::string suspendFails() {
    return failure([&] { suspend(); });
  }
  std::string resumeFails() {
    return failure([&] { resume(); });
  }
  // The running copiers, by their command line.
  static std::map<pid_t, std::string> copiers() {
    std::map<pid_t, std::string> found;
    for (const pid_t pid : children()) {
      std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
      std::string words(std::istreambuf_iterator<char>(file), {});
      std::replace(words.begin(), words.end(), '\0', ' ');
      if (contains(words, "--copier")) found[pid] = words.substr(words.find("--copier"));
    }
    return found;
  }
};

}  // namespace

TEST_CASE("all sessions of a lease are suspended and resumed together, and run on") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2);
  const Suspended done = bench.suspend();
  CHECK(done.kept == std::vector<uint64_t>{6 * kMiB, 12 * kMiB});
  CHECK(done.movedBytes == 2 * kGiB);
  CHECK(done.drainMs == 5);
  CHECK(done.moveMs == 7);
  CHECK(bench.leases.reserved(0) == 6 * kMiB);
  CHECK(bench.leases.reserved(1) == 12 * kMiB);
  CHECK(bench.leases.promised(0) == 4 * kGiB);
  CHECK(bench.leases.suspended() ==
        std::vector<std::pair<Id, std::vector<uint64_t>>>{{kLease, {6 * kMiB, 12 * kMiB}}});
  CHECK(bench.order(one, 's') == "suspended 1");
  CHECK(bench.order(two, 's') == "suspended 1");
  CHECK(bench.suspend().movedBytes == 2 * kGiB);  // the same again
  CHECK(bench.order(one, 's') == "suspended 1");

  bench.resume();
  CHECK(bench.leases.reserved(0) == 4 * kGiB);
  CHECK(bench.leases.suspended().empty());
  CHECK(bench.order(one, 's') == "running 1");
  CHECK(bench.order(two, 's') == "running 1");
  bench.resume();  // nothing
  Opening three = bench.session(3);
  CHECK(bench.order(three, 'e') == "e01");
  CHECK(Bench::copiers().size() == 1);
}

TEST_CASE("a lease without sessions is suspended without a copier, and an unknown one is not") {
  Bench bench;
  CHECK(bench.suspend().kept == std::vector<uint64_t>{0, 0});
  CHECK(bench.leases.reserved(0) == 0);
  CHECK(Bench::copiers().empty());
  bench.resume();
  CHECK(bench.leases.reserved(0) == 4 * kGiB);
  CHECK(contains(failure([&] { bench.suspension.suspend({7, 7}, 1).wait(bench.io.waitScope); }),
                 "is not known"));
  CHECK(contains(failure([&] { bench.suspension.resume({7, 7}).wait(bench.io.waitScope); }), "is not known"));
}

TEST_CASE("if one session cannot be suspended the others run on, and the reason names it") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2, "stubborn");
  bench.order(two, 'r');
  const std::string said = bench.suspendFails();
  CHECK(contains(said, "stubborn (process "));
  CHECK(contains(said, "a kernel did not end"));
  CHECK(bench.order(one, 's') == "running 1");
  CHECK(bench.order(two, 's') == "running 0");
  CHECK_FALSE(bench.paused());
  CHECK(bench.leases.suspended().empty());
  CHECK(bench.leases.reserved(0) == 4 * kGiB);
  bench.suspend();
  CHECK(bench.order(one, 's') == "suspended 2");
  CHECK(bench.order(two, 's') == "suspended 1");
}

TEST_CASE("a session that dies meanwhile counts as gone") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2);
  bench.order(two, 'd');
  CHECK(bench.suspend().kept == std::vector<uint64_t>{3 * kMiB, 6 * kMiB});
  CHECK(bench.sessions.living(kLease) == 1);
  CHECK(contains(bench.endText(), "killed by signal 6"));
  bench.order(one, 'd');
  bench.resume();
  CHECK(bench.sessions.living(kLease) == 0);
  CHECK_FALSE(bench.paused());
}

TEST_CASE("a worker that never answers is ended at the bound, and the order goes on without it") {
  Bench bench([](Suspension::Settings& settings) { settings.bound = 300 * kj::MILLISECONDS; });
  Opening one = bench.session(1);
  bench.order(one, 'n');
  CHECK(bench.suspend(10).kept == std::vector<uint64_t>{0, 0});
  CHECK(bench.endText() == "the session's worker did not answer the order to be suspended");
  CHECK(contains(one.hear().wait(bench.io.waitScope), "did not answer the order to be suspended"));
}

TEST_CASE(
    "a worker that is stopped holds up an order no longer than it reads nothing, and the others go on") {
  SideSettings settings;
  settings.bounds.reads = 600 * kj::MILLISECONDS;
  Bench bench(settings);
  Opening one = bench.session(1), two = bench.session(2, "stuck");
  const pid_t worker = bench.worker(two);
  REQUIRE(kill(worker, SIGSTOP) == 0);
  const std::string said = bench.suspendFails();
  CHECK(contains(said, "stuck (process "));
  CHECK(contains(said, "is stopped or hangs"));
  CHECK(bench.order(one, 's') == "running 1");
  CHECK_FALSE(bench.paused());
  while (bench.sessions.living(kLease) == 2)
    bench.timer.afterDelay(kj::MILLISECONDS).wait(bench.io.waitScope);
  CHECK(contains(bench.endText(), "the session's worker was stopped or hung"));
  bench.suspend();  // without it
  CHECK(bench.order(one, 's') == "suspended 2");
}

TEST_CASE("a worker's nonsense is a failure, and its wild bytes are its end") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2);
  bench.order(one, 'w');
  CHECK(contains(bench.suspendFails(), "answered nonsense: it keeps memory on 7 devices of 2"));
  CHECK(bench.order(one, 's') == "running 1");
  CHECK(bench.order(two, 's') == "running 1");
  bench.order(one, 'b');
  CHECK(bench.suspend().kept == std::vector<uint64_t>{3 * kMiB, 6 * kMiB});
  CHECK(bench.sessions.living(kLease) == 1);
}

TEST_CASE("if one session cannot be resumed the others are suspended again") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2, "large");
  bench.suspend();
  bench.order(two, 'R');
  const std::string said = bench.resumeFails();
  CHECK(contains(said, "large (process "));
  CHECK(contains(said, "no memory for 4 GiB"));
  CHECK(bench.order(one, 's') == "suspended 2");
  CHECK(bench.order(two, 's') == "suspended 1");
  CHECK(bench.leases.reserved(0) == 6 * kMiB);
  CHECK(bench.leases.suspended().size() == 1);
  CHECK(bench.suspend().movedBytes == 2 * kGiB);
  bench.resume();
  CHECK(bench.order(one, 's') == "running 2");
  CHECK(bench.order(two, 's') == "running 1");
}

TEST_CASE("a session that cannot come back is ended where the others cannot go away again either") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2);
  bench.suspend();
  bench.order(one, 'a');
  bench.order(two, 'R');
  bench.resume();
  CHECK(bench.order(one, 's') == "running 1");
  CHECK(contains(two.hear().wait(bench.io.waitScope), "could not be brought back to its devices"));
  CHECK(bench.sessions.living(kLease) == 1);
  CHECK_FALSE(bench.paused());
  CHECK(bench.leases.reserved(0) == 4 * kGiB);
}

TEST_CASE("a session that says of its resuming what cannot be is suspended still") {
  Bench bench;
  Opening one = bench.session(1);
  bench.suspend();
  bench.order(one, 'w');
  CHECK(contains(bench.resumeFails(), "answered nonsense: it is suspended and says nothing of why"));
  CHECK(bench.leases.suspended().size() == 1);
}

TEST_CASE("what a suspended lease has left is leased to others, and is had again only when they are gone") {
  Bench bench;
  Opening one = bench.session(1);
  CHECK(contains(bench.grant({1, 2}, 2, 5 * kGiB), "bytes free"));
  bench.suspend();
  CHECK(bench.grant({1, 2}, 2, 5 * kGiB, {1}) == "");
  const std::string said = bench.resumeFails();
  CHECK(contains(said, "cannot be resumed: device 1 has "));
  CHECK(contains(said, "bytes free, it wants "));
  CHECK(bench.order(one, 's') == "suspended 1");
  CHECK(bench.leases.reserved(0) == 3 * kMiB);
  bench.leases.remove({1, 2});
  bench.resume();
  CHECK(bench.order(one, 's') == "running 1");
}

TEST_CASE("a revoke ends a lease that is being suspended, and the order fails") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2);
  bench.order(one, 'n');
  auto order = bench.suspension.suspend(kLease, 1000).eagerlyEvaluate(nullptr);
  CHECK(bench.becomes(two, "suspended 1"));
  bench.leases.close(kLease);
  bench.sessions.end(kLease, "revoked").wait(bench.io.waitScope);
  bench.leases.remove(kLease);
  CHECK(contains(failure([&] { order.wait(bench.io.waitScope); }), "ended while it was being suspended"));
  CHECK(bench.leases.reserved(0) == 0);
  CHECK(bench.sessions.living() == 0);
}

TEST_CASE("a revoke ends a suspended lease, and one that is being resumed") {
  for (const bool resuming : {false, true}) {
    Bench bench;
    Opening one = bench.session(1);
    bench.suspend();
    kj::Maybe<kj::Promise<void>> order;
    if (resuming) {
      bench.order(one, 'n');
      order = bench.suspension.resume(kLease).eagerlyEvaluate(nullptr);
      bench.until([&] { return bench.leases.reserved(0) == 4 * kGiB; });
    }
    bench.leases.close(kLease);
    bench.sessions.end(kLease, "revoked").wait(bench.io.waitScope);
    bench.leases.remove(kLease);
    KJ_IF_MAYBE (promise, order)
      CHECK(
          contains(failure([&] { promise->wait(bench.io.waitScope); }), "ended while it was being resumed"));
    CHECK(bench.endText() == "revoked");
  }
}

TEST_CASE("orders for one lease come one after the other, whoever waits for them") {
  Bench bench;
  Opening one = bench.session(1);
  auto first = bench.suspension.suspend(kLease, 1000).eagerlyEvaluate(nullptr);
  bench.suspension.resume(kLease).eagerlyEvaluate(nullptr) = nullptr;  // who asked is gone
  auto third = bench.suspension.suspend(kLease, 1000).eagerlyEvaluate(nullptr);
  third.wait(bench.io.waitScope);
  CHECK(bench.order(one, 's') == "suspended 2");
  bench.resume();
}

TEST_CASE("a session that is just beginning is suspended too") {
  Bench bench;
  auto token = bench.sessions.beginning(kLease);
  bool done = false;
  auto order =
      bench.suspension.suspend(kLease, 1000).then([&](Suspended) { done = true; }).eagerlyEvaluate(nullptr);
  bench.until([&] { return bench.paused(); });
  bench.timer.afterDelay(50 * kj::MILLISECONDS).wait(bench.io.waitScope);
  CHECK_FALSE(done);
  token = nullptr;
  order.wait(bench.io.waitScope);
  CHECK(done);
}

TEST_CASE("a beginning that does not get on fails the order") {
  Bench bench([](Suspension::Settings& settings) { settings.beginBound = 50 * kj::MILLISECONDS; });
  auto token = bench.sessions.beginning(kLease);
  CHECK(contains(bench.suspendFails(), "is beginning, and does not get on"));
  CHECK_FALSE(bench.paused());
}

TEST_CASE("a suspended lease begins no session, and only who has its key learns why") {
  Bench bench;
  bench.suspend();
  Opening holder, stranger, later;
  bench.opening(holder, {2, 1}).wait(bench.io.waitScope);
  CHECK(holder.error == "the lease is suspended");
  CHECK(holder.suspended);
  stranger.key = std::string(32, 'x');
  bench.opening(stranger, {2, 2}).wait(bench.io.waitScope);
  CHECK(contains(stranger.error, "proof of the session key is wrong"));
  CHECK_FALSE(stranger.suspended);
  CHECK(bench.sessions.living() == 0);
  bench.resume();
  bench.opening(later, {2, 1}).wait(bench.io.waitScope);
  CHECK(later.error == "");
}

TEST_CASE("a lease that is suspended while its session awaits a worker begins none") {
  Environment slow("GPUPOOL_FAKE_WORKER", "/tmp/nothing-" + std::to_string(getpid()));
  Bench bench;  // its workers fail, until that file exists
  Folder folder;
  Opening holder;
  auto opened = bench.opening(holder, {2, 1}).eagerlyEvaluate(nullptr);
  bench.timer.afterDelay(300 * kj::MILLISECONDS).wait(bench.io.waitScope);
  bench.suspend();
  std::ofstream(slow.value).close();
  opened.wait(bench.io.waitScope);
  std::filesystem::remove(slow.value);
  CHECK(holder.suspended);
  CHECK(bench.sessions.living() == 0);
}

TEST_CASE("what a worker says unasked changes nothing") {
  Bench bench;
  Opening one = bench.session(1);
  bench.order(one, 'u');
  bench.order(one, 'm');  // the server has read what came before
  CHECK(bench.leases.suspended().empty());
  bench.suspend();
  CHECK(bench.order(one, 's') == "suspended 1");
  bench.resume();
}

TEST_CASE("a session is disturbed where that is asked for, else not") {
  for (const bool disturb : {true, false}) {
    Bench bench([&](Suspension::Settings& settings) { settings.disturb = disturb; });
    Opening one = bench.session(1), two = bench.session(2);
    bench.order(one, 't');
    CHECK(bench.becomes(one, disturb ? "running 1" : "running 0"));
    CHECK(bench.order(two, 's') == "running 0");
    CHECK(bench.leases.suspended().empty());
    bench.suspend();
    bench.order(one, 't');  // of a suspended session: nothing
    bench.order(one, 'm');  // the server has read what came before
    bench.resume();
    CHECK(bench.order(one, 's') == (disturb ? "running 2" : "running 1"));
  }
}

TEST_CASE("who asks to be disturbed is answered also where that cannot be") {
  Environment how("GPUPOOL_FAKE_COPIER", "crash");
  Bench bench([](Suspension::Settings& settings) { settings.disturb = true; });
  Opening one = bench.session(1);
  bench.order(one, 'd');  // shows that there is an order
  bench.order(one, 't');
  bench.until([&] { return bench.sessions.living(kLease) == 0; });
}

TEST_CASE("where suspending is off the order is refused") {
  Bench bench([](Suspension::Settings& settings) { settings.refusal = "it is off"; });
  CHECK(bench.suspendFails() == "it is off");
  CHECK_FALSE(bench.paused());
}

TEST_CASE("the copier is told its budget, its folder and the rest") {
  Bench bench({}, [](CopierChild::Settings& settings) {
    settings.folder = "/var/spare";
    settings.aheadBytes = 77;
    settings.verify = true;
  });
  bench.copier.startAhead();
  bench.until([] { return Bench::copiers().size() == 1; });
  bench.copier.connect().wait(bench.io.waitScope);
  const auto found = Bench::copiers();
  REQUIRE(found.size() == 1);
  CHECK(found.begin()->second == "--copier --driver " FAKE_DRIVER
                                 " --budget 5368709120 --folder /var/spare --touch-ahead 77 --verify ");
  bench.copier.stop().wait(bench.io.waitScope);
  CHECK(Bench::copiers().empty());
  CHECK(contains(failure([&] { bench.copier.connect().wait(bench.io.waitScope); }), "shutting down"));
}

TEST_CASE("a copier that does not start fails the suspension with its reason, and is tried again") {
  Bench bench;
  Opening one = bench.session(1);
  {
    Environment how("GPUPOOL_FAKE_COPIER", "fail");
    CHECK(contains(bench.suspendFails(), "failed to start: no memory can be pinned"));
  }
  {
    Environment how("GPUPOOL_FAKE_COPIER", "crash");
    CHECK(contains(bench.suspendFails(), "was killed by signal 6"));
  }
  CHECK_FALSE(bench.paused());
  CHECK(bench.order(one, 's') == "running 0");
  bench.until([] { return Bench::copiers().empty(); });
  bench.suspend();
  CHECK(bench.order(one, 's') == "suspended 1");
}

TEST_CASE("a copier that does not get ready is killed at the bound") {
  Environment how("GPUPOOL_FAKE_COPIER", "mute");
  Bench bench({}, [](CopierChild::Settings& settings) { settings.startBound = 200 * kj::MILLISECONDS; });
  Opening one = bench.session(1);
  CHECK(contains(bench.suspendFails(), "did not get ready"));
  CHECK_FALSE(bench.paused());
  CHECK(bench.order(one, 's') == "running 0");
  bench.until([] { return Bench::copiers().empty(); });
}

TEST_CASE("a copier that dies takes with it what it kept, and no more") {
  Bench bench;
  Opening one = bench.session(1);
  bench.suspend();
  const auto first = Bench::copiers();
  REQUIRE(first.size() == 1);
  const pid_t pid = first.begin()->first;
  kill(pid, SIGKILL);
  CHECK(contains(one.hear().wait(bench.io.waitScope), "the copier is gone"));
  bench.until([&] { return bench.sessions.living(kLease) == 0; });
  bench.until([&] { return ::kill(pid, 0) != 0; });  // the server knows
  bench.resume();
  Opening two = bench.session(2);
  bench.suspend();
  CHECK(bench.order(two, 's') == "suspended 1");
  CHECK(Bench::copiers().size() == 1);
  CHECK(Bench::copiers() != first);
  bench.resume();
  CHECK(bench.order(two, 's') == "running 1");
}

TEST_CASE("a copier that dies before it has a session's memory fails the order alone") {
  Environment how("GPUPOOL_FAKE_COPIER", "crash on take");
  Bench bench;
  Opening one = bench.session(1);
  CHECK(contains(bench.suspendFails(), "the copier is gone"));
  CHECK(bench.order(one, 's') == "running 0");
  CHECK_FALSE(bench.paused());
}
