// Leases that take turns, with real processes: workers and a copier that do what a test says.
#include "server/front/turn_taker.h"

#include <fstream>

#include "server/front/admission.h"
#include "server/front/control.h"
#include "server/front/copier_child.h"
#include "server/tests/support.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

struct Told {
  schema::TurnPlace place = schema::TurnPlace::RESIDENT;
  uint64_t servedMs = 0;
  uint32_t turns = 0;
  std::string note;
  size_t kept = 0;  // of so many devices
};

constexpr auto kResident = schema::TurnPlace::RESIDENT;
constexpr auto kAside = schema::TurnPlace::ASIDE;
constexpr auto kWaiting = schema::TurnPlace::WAITING;

std::vector<Device> twoSoftwareDevices() {
  auto devices = twoDevices();
  for (Device& device : devices) device.software = true;
  return devices;
}

// Leases 1, 2, ... of 5 GiB of 8 on each of both devices, and their holders.
struct Bench {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  LeaseTable leases{twoSoftwareDevices(), {}, 300};
  SessionTable sessions{
      timer, {.stop = 1 * kj::SECONDS, .exit = 1 * kj::SECONDS}, [](uint32_t, const std::string&) {}};
  WorkerPools pool;
  CopierChild copier;
  Suspension suspension;
  TurnTaker turns;
  Admission admission;

  explicit Bench(Turns::Time turn = Turns::Time(300), kj::Duration bound = 60 * kj::SECONDS,
                 uint32_t warm = 1)
      : pool(io.unixEventPort, timer, workers(warm)),
        copier(io.unixEventPort, timer, {FAKE_WORKER, FAKE_DRIVER, 30 * kGiB}),
        suspension(timer, leases, sessions, settings(bound)),
        turns(timer, leases, sessions, suspension, turnSettings(turn)),
        admission(timer, leases, sessions, pool, admissionSettings()) {}
  ~Bench() {
    turns.stop();
    sessions.endAll("test over").wait(io.waitScope);
    pool.stop().wait(io.waitScope);
    copier.stop().wait(io.waitScope);
  }
  static WorkerPool::Settings workers(uint32_t warm) {
    WorkerPool::Settings workers;
    workers.program = FAKE_WORKER;
    workers.arguments = {"--driver", FAKE_DRIVER};
    workers.warm = warm;
    workers.rowsHash = kRows;
    return workers;
  }
  Suspension::Settings settings(kj::Duration bound) {
    Suspension::Settings settings;
    settings.copier = [this] { return copier.connect(); };
    settings.bound = bound;
    return settings;
  }
  TurnTaker::Settings turnSettings(Turns::Time turn) {
    TurnTaker::Settings settings;
    settings.turns.turn = turn;
    settings.turns.quiet = Turns::Time(100);
    settings.turns.minimum = Turns::Time(50);
    settings.turns.firstPause = Turns::Time(50);
    settings.turns.drain = Turns::Time(1'000);
    settings.tick = 10 * kj::MILLISECONDS;
    settings.closest = 1 * kj::MILLISECONDS;
    settings.patience = 500 * kj::MILLISECONDS;
    settings.opening = [this](const Id& lease) { return admission.opening(lease); };
    return settings;
  }
  Admission::Settings admissionSettings() {
    Admission::Settings settings;
    settings.server = kServer;
    settings.told = [this](const Id& lease) { turns.asked(lease); };
    settings.starts.reportActivity = true;
    return settings;
  }

  static Id lease(uint64_t number) { return {1, number}; }
  void grant(uint64_t number, uint64_t memory = 5 * kGiB,
             schema::Priority priority = schema::Priority::NORMAL) {
    capnp::MallocMessageBuilder message;
    auto root = message.initRoot<gpupool::schema::Lease>();
    fillLease(root, lease(number), number, {0, 1}, memory);
    root.initTerms().setPriority(priority);
    CHECK_FALSE(leases.grant(root.asReader()).has_value());
  }
  void revoke(uint64_t number) {
    leases.close(lease(number));
    sessions.end(lease(number), "revoked").wait(io.waitScope);
    leases.remove(lease(number));
  }
  // As a holder does it: until the lease is there.
  // late: it was told to wait by somebody who had let it in before.
  Opening open(uint64_t number, bool* late = nullptr) {
    static uint64_t session = 1;
    const size_t before = sessions.living(lease(number));
    for (int attempt = 0; attempt < 200; ++attempt) {
      Opening one;
      one.lease = lease(number);
      one.session = {2, session++};
      auto [client, server] = connection(*io.lowLevelProvider);
      admission.admit(kj::mv(server), "uid 1");
      const kj::TimePoint began = timer.now();
      one.run(kj::mv(client)).wait(io.waitScope);
      if (late != nullptr && !one.error.empty() && timer.now() - began > 500 * kj::MILLISECONDS) *late = true;
      if (one.error.empty()) {
        until([&] { return sessions.living(lease(number)) > before; });
        return one;
      }
      CHECK(one.error == "the lease waits for its turn");
      REQUIRE(one.suspended);
      timer.afterDelay(50 * kj::MILLISECONDS).wait(io.waitScope);
    }
    FAIL("no session in ten seconds");
    return {};
  }
  std::string order(Opening& session, char letter) { return session.order(letter).wait(io.waitScope); }
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }
  void pause(kj::Duration time) { timer.afterDelay(time).wait(io.waitScope); }
  Told told(uint64_t number) {
    capnp::MallocMessageBuilder message;
    auto beat = message.initRoot<schema::Manager::BeatParams>();
    turns.report([&](unsigned count) { return beat.initTurns(count); });
    for (auto turn : beat.getTurns())
      if (schema::read(turn.getId()) == lease(number))
        return {turn.getPlace(), turn.getServedMs(), turn.getTurns(), turn.getNote().cStr(),
                turn.getKept().size()};
    return {kAside, 0, 0, "not told of", 0};
  }
  // As a holder does that waits for a session.
  void askUntil(uint64_t number, std::function<bool()> condition) {
    until([this, number, condition = std::move(condition)] {
      turns.asked(lease(number));
      return condition();
    });
  }
  bool is(uint64_t number, schema::TurnPlace place) { return told(number).place == place; }
  void becomes(uint64_t number, schema::TurnPlace place) {
    until([&] { return is(number, place); });
  }
  // Never more on a device than it has: as often as the event loop looks.
  void checkMemory() {
    for (size_t device = 0; device < 2; ++device) CHECK(leases.reserved(device) <= 8 * kGiB);
  }
  pid_t copierPid() {
    for (const pid_t pid : children()) {
      std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
      std::string words(std::istreambuf_iterator<char>(file), {});
      if (words.find("--copier") != std::string::npos) return pid;
    }
    return 0;
  }
};

}  // namespace

TEST_CASE("two leases of which one fits take turns, and nothing is told as suspended") {
  Bench bench;
  bench.grant(1);
  Opening one = bench.open(1);
  bench.grant(2);
  CHECK(bench.is(2, kAside));
  Opening two = bench.open(2);  // its holder's asking brings it back
  for (int i = 0; i < 2000 && (bench.told(1).turns < 3 || bench.told(2).turns < 3); ++i) {
    bench.checkMemory();
    CHECK(bench.leases.suspended().empty());
    bench.pause(30 * kj::MILLISECONDS);
  }
  CHECK(bench.told(1).turns >= 3);
  CHECK(bench.told(2).turns >= 3);
  CHECK(bench.told(1).servedMs > 0);
  CHECK(bench.told(1).note.empty());
  CHECK(bench.told(1).kept == 2);
  bench.turns.stop();
  CHECK(bench.leases.active().size() == 2);
}

TEST_CASE("a lease whose sessions move to other workers is left alone, and has its turns later") {
  Bench bench;
  bench.grant(1);
  Opening one = bench.open(1);
  bench.leases.pauseToMove(bench.lease(1));
  bench.grant(2);
  const kj::TimePoint until = bench.timer.now() + 500 * kj::MILLISECONDS;
  bench.askUntil(2, [&] { return bench.timer.now() >= until; });
  CHECK(bench.is(2, kWaiting));
  CHECK(bench.order(one, 's') == "running 0");
  bench.leases.unpause(bench.lease(1));
  Opening two = bench.open(2);
  bench.until([&] { return bench.order(one, 's') != "running 0"; });
}

TEST_CASE("a lease that does nothing yields, and comes back when it has something to do") {
  Bench bench(Turns::Time(3'600'000));
  bench.grant(1);
  Opening one = bench.open(1);
  bench.grant(2);
  CHECK(bench.order(one, 'Q') == "told");
  Opening two = bench.open(2);
  bench.becomes(1, kAside);
  CHECK(bench.order(two, 'Q') == "told");
  bench.pause(300 * kj::MILLISECONDS);
  CHECK(bench.is(2, kResident));  // nobody waits
  CHECK(bench.order(one, 's') == "suspended 1");
  bench.order(one, 'W');
  bench.becomes(1, kResident);
  bench.becomes(2, kAside);
  CHECK(bench.order(one, 's') == "running 1");
  CHECK(bench.order(two, 's') == "suspended 1");
  bench.order(one, 'B');
  bench.order(two, 'W');
  bench.becomes(2, kWaiting);
  bench.pause(300 * kj::MILLISECONDS);
  CHECK(bench.is(2, kWaiting));  // the turn of 1 lasts an hour
  bench.revoke(1);
  bench.becomes(2, kResident);
}

TEST_CASE("what has been said before a lease went aside does not bring it back") {
  Bench bench;
  bench.grant(1);
  Opening one = bench.open(1);
  bench.order(one, 'B');
  bench.grant(2);
  Opening two = bench.open(2);
  bench.order(two, 'B');
  bench.becomes(1, kAside);
  bench.pause(600 * kj::MILLISECONDS);
  CHECK(bench.is(1, kAside));
  CHECK(bench.order(two, 's') == "running 0");
}

TEST_CASE("of several sessions the busiest counts") {
  Bench bench(Turns::Time(3'600'000));
  bench.grant(1);
  Opening one = bench.open(1), another = bench.open(1);
  bench.order(one, 'Q');
  bench.order(another, 'B');
  bench.grant(2);
  bench.turns.asked(Bench::lease(2));
  bench.pause(300 * kj::MILLISECONDS);
  CHECK(bench.is(1, kResident));
  bench.order(another, 'Q');
  bench.askUntil(2, [&] { return bench.is(2, kResident); });
  bench.order(another, 'W');
  bench.becomes(1, kResident);  // the holder of 2 has not asked again
}

TEST_CASE("a lease whose holder asks for a session is not put aside again before it can have one") {
  Bench bench(Turns::Time(100));
  bench.grant(1);
  Opening one = bench.open(1);
  bench.grant(2);
  Opening two = bench.open(2);
  CHECK(bench.sessions.living(Bench::lease(2)) == 1);
  Opening three = bench.open(1);
  CHECK(bench.sessions.living(Bench::lease(1)) == 2);
}

TEST_CASE("a lease whose session waits for a worker to start is not put aside before it has begun") {
  Environment slow("GPUPOOL_FAKE_WORKER", "slow");
  Bench bench(Turns::Time(2'500), 60 * kj::SECONDS, 0);
  bench.grant(1);
  Opening one = bench.open(1);
  bench.grant(2);
  bool refused = false;
  Opening two = bench.open(2, &refused);
  CHECK(bench.told(2).turns == 1);
  CHECK_FALSE(refused);
}

TEST_CASE("a lease that ends while it is aside leaves nothing") {
  Bench bench(Turns::Time(3'600'000));
  bench.grant(1);
  Opening one = bench.open(1);
  bench.order(one, 'Q');
  bench.grant(2);
  Opening two = bench.open(2);
  bench.becomes(1, kAside);
  SECTION("it is revoked") {
    bench.revoke(1);
    CHECK(bench.told(1).note == "not told of");
  }
  SECTION("its program ends") {
    one.stream = nullptr;
    bench.until([&] { return bench.sessions.living(Bench::lease(1)) == 0; });
    CHECK(bench.is(1, kAside));
    bench.revoke(1);
  }
  CHECK(bench.leases.reserved(0) == 5 * kGiB);
  CHECK(bench.sessions.living() == 1);
  bench.grant(3, 3 * kGiB);
  CHECK(bench.is(3, kResident));
}

TEST_CASE("an order suspends a lease that is aside without moving it, and resumes it when it may be") {
  Bench bench(Turns::Time(3'600'000));
  bench.grant(1);
  Opening one = bench.open(1);
  bench.order(one, 'Q');
  bench.grant(2);
  Opening two = bench.open(2);
  bench.order(two, 'B');
  bench.becomes(1, kAside);
  const Suspended done = bench.suspension.suspend(Bench::lease(1), 1000).wait(bench.io.waitScope);
  CHECK(done.movedBytes == kGiB);
  CHECK(bench.leases.suspended().size() == 1);
  CHECK(bench.told(1).note == "not told of");
  CHECK(bench.order(one, 's') == "suspended 1");
  bench.order(one, 'W');
  bench.order(two, 'Q');
  bench.pause(400 * kj::MILLISECONDS);
  CHECK(bench.is(2, kResident));  // 1 does not wait: it is suspended
  SECTION("there is no room: it is one that waits from then on") {
    bench.order(two, 'B');
    bench.pause(50 * kj::MILLISECONDS);
    bench.suspension.resume(Bench::lease(1)).wait(bench.io.waitScope);
    CHECK(bench.leases.suspended().empty());
    CHECK(bench.is(1, kWaiting));
    bench.order(two, 'Q');
    bench.becomes(1, kResident);
    CHECK(bench.order(one, 's') == "running 1");
  }
  SECTION("there is room") {
    bench.revoke(2);
    bench.suspension.resume(Bench::lease(1)).wait(bench.io.waitScope);
    CHECK(bench.is(1, kResident));
    CHECK(bench.order(one, 's') == "running 1");
  }
  SECTION("too much has been leased since") {
    for (const uint64_t number : {3, 4, 5, 6}) bench.grant(number, 4 * kGiB);
    CHECK(contains(failure([&] { bench.suspension.resume(Bench::lease(1)).wait(bench.io.waitScope); }),
                   "cannot be resumed: device 0 has 3221225472 of 25769803776 bytes left to lease"));
    CHECK(bench.leases.suspended().size() == 1);
  }
}

TEST_CASE("an order suspends a lease that has its turn, and its devices are the others'") {
  Bench bench(Turns::Time(3'600'000));
  bench.grant(1);
  Opening one = bench.open(1);
  bench.order(one, 'Q');
  bench.grant(2);
  Opening two = bench.open(2);
  bench.order(one, 'W');
  bench.becomes(1, kWaiting);
  bench.suspension.suspend(Bench::lease(2), 1000).wait(bench.io.waitScope);
  bench.becomes(1, kResident);
  CHECK(bench.leases.suspended().size() == 1);
}

TEST_CASE("a lease whose kernel runs on is asked again, and the reason is told") {
  Bench bench;
  bench.grant(1);
  Opening one = bench.open(1);
  bench.order(one, 'a');
  bench.grant(2);
  bench.askUntil(2, [&] { return !bench.told(1).note.empty(); });
  CHECK(contains(bench.told(1).note, "a kernel did not end"));
  CHECK(bench.is(1, kResident));
  CHECK(bench.order(one, 's') == "running 0");
  bench.order(one, 'R');  // from now on it obeys, but for the next order to come back
  Opening two = bench.open(2);
  bench.order(two, 'Q');
  bench.until([&] { return contains(bench.told(1).note, "no memory for 4 GiB"); });
  bench.becomes(1, kResident);
  CHECK(bench.told(1).note.empty());
}

TEST_CASE("a worker that dies of being moved ends its session alone, and the others get on") {
  for (const bool back : {false, true}) {
    Bench bench;
    bench.grant(1);
    Opening one = bench.open(1);
    if (!back) bench.order(one, 'd');
    bench.grant(2);
    Opening two = bench.open(2);
    if (back) {
      bench.order(one, 'd');
      bench.until([&] { return bench.sessions.living(Bench::lease(1)) == 0; });
    }
    CHECK(bench.sessions.living(Bench::lease(1)) == 0);
    CHECK(bench.sessions.living(Bench::lease(2)) == 1);
    Opening three = bench.open(1);
    CHECK(bench.order(three, 'e') == "e01");
    bench.checkMemory();
  }
}

TEST_CASE("a copier that dies takes those with it that are aside, and the next one serves the others") {
  Bench bench(Turns::Time(3'600'000));
  bench.grant(1);
  Opening one = bench.open(1);
  bench.order(one, 'Q');
  bench.grant(2);
  Opening two = bench.open(2);
  bench.becomes(1, kAside);
  const pid_t copier = bench.copierPid();
  REQUIRE(copier != 0);
  kill(copier, SIGKILL);
  CHECK(contains(one.hear().wait(bench.io.waitScope), "the copier is gone"));
  bench.until([&] { return ::kill(copier, 0) != 0; });  // the server knows
  bench.order(two, 'Q');
  Opening again = bench.open(1);
  CHECK(bench.order(two, 's') == "suspended 1");
  bench.order(again, 'Q');
  bench.order(two, 'W');
  bench.becomes(2, kResident);
  CHECK(bench.order(two, 's') == "running 1");
}

TEST_CASE("a revoke ends a lease that is being moved") {
  for (const bool back : {false, true}) {
    Bench bench(Turns::Time(3'600'000));
    bench.grant(1);
    Opening one = bench.open(1), two;
    if (!back) bench.order(one, 'n');
    bench.order(one, 'Q');
    bench.grant(2);
    if (back) {
      two = bench.open(2);
      bench.order(one, 'n');
      bench.order(one, 'W');
      bench.order(two, 'Q');
      bench.until([&] { return bench.leases.admissible(Bench::lease(1))->resuming; });
    } else {
      bench.askUntil(2, [&] { return bench.leases.admissible(Bench::lease(1))->paused; });
    }
    bench.revoke(1);
    CHECK(bench.told(1).note == "not told of");
    bench.askUntil(2, [&] { return bench.is(2, kResident); });
    CHECK(bench.leases.reserved(0) == 5 * kGiB);
  }
}

TEST_CASE("a server that stops while a lease is moved waits for nothing") {
  Bench bench;
  bench.grant(1);
  Opening one = bench.open(1);
  bench.order(one, 'n');
  bench.grant(2);
  bench.askUntil(2, [&] { return bench.leases.admissible(Bench::lease(1))->paused; });
  bench.turns.stop();
  bench.sessions.endAll("the GPU server is shutting down").wait(bench.io.waitScope);
  bench.copier.stop().wait(bench.io.waitScope);
  bench.pool.stop().wait(bench.io.waitScope);
  CHECK(children().empty());
}

TEST_CASE("a lease of high priority has its devices while it wants them") {
  Bench bench(Turns::Time(200));
  bench.grant(1);
  Opening one = bench.open(1);
  bench.grant(2, 5 * kGiB, schema::Priority::HIGH);
  Opening two = bench.open(2);
  bench.pause(600 * kj::MILLISECONDS);
  CHECK(bench.is(1, kWaiting));
  bench.order(two, 'Q');
  bench.becomes(1, kResident);
}

TEST_CASE("reports without end cost a decision now and then, and nobody his turn") {
  Bench bench;
  bench.grant(1);
  Opening one = bench.open(1);
  bench.grant(2);
  Opening two = bench.open(2);
  for (int i = 0; i < 2000; ++i) bench.order(one, i % 2 == 0 ? 'W' : 'B');
  bench.order(one, 'W');
  bench.becomes(1, kResident);
  bench.becomes(2, kResident);
}
