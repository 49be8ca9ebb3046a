// Sessions that move to other devices of their server, and what becomes of the lease's devices then.
#include <fstream>
#include <list>
#include <utility>

#include "server/front/device_lock.h"
#include "server/tests/session_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

// A lease on device 0 that may move to device 1.
struct TargetBench : SessionBench {
  explicit TargetBench(SideSettings settings = {}) : SessionBench(std::move(settings)) {
    REQUIRE(grant(kLease, 1, kGiB, {0}) == "");
    REQUIRE(addTarget(2, {1}) == "");
  }
  ~TargetBench() {
    stop();
    CHECK(children().empty());
  }
  static MoveTarget target(uint64_t epoch = 2) { return {epoch, {kServer, "", 0}}; }
  // One session's course; its new connection.
  Opening follow(Opening& old, uint64_t epoch = 2) {
    CHECK(hear(old) == "moved " + std::to_string(epoch));
    Opening after;
    REQUIRE(open(after, old.session.low, epoch) == "");
    worker(after);  // it has its client
    CHECK(order(old, 'L').empty());
    return after;
  }
  std::string settleFails(bool moved) {
    return failure([&] { migration.settle(kLease, moved).wait(io.waitScope); });
  }
  void settle(bool moved) { migration.settle(kLease, moved).wait(io.waitScope); }
  std::vector<std::string> devicesInUse() {
    std::vector<std::string> uuids;
    for (const auto& worker : sessions.workers())
      uuids.insert(uuids.end(), worker.devices.begin(), worker.devices.end());
    return uuids;
  }
};

}  // namespace

TEST_CASE("a lease's sessions move to other devices, new ones begin on its own until that is settled") {
  TargetBench bench;
  Opening one = bench.session(1), two = bench.session(2);
  CHECK(bench.order(one, 'e') == "e0");
  auto order = bench.migrate(1000, TargetBench::target());
  Opening first = bench.follow(one), second = bench.follow(two);
  CHECK(order.wait(bench.io.waitScope).sessions == 2);
  CHECK(bench.order(first, 'e') == "e1");
  CHECK(bench.order(second, 'e') == "e1");
  CHECK(contains(bench.settleFails(false), "still on the devices that it was to have"));
  Opening third = bench.session(3);
  CHECK(bench.order(third, 'e') == "e0");
  CHECK(contains(bench.settleFails(true), "still on the devices that it had"));
  CHECK_FALSE(bench.paused());
  // Once more: those that are there stay.
  order = bench.migrate(1000, TargetBench::target());
  Opening fourth = bench.follow(third);
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  CHECK(bench.migrate(1000, TargetBench::target()).wait(bench.io.waitScope).sessions == 0);
  bench.settle(true);
  CHECK_FALSE(bench.paused());
  CHECK(bench.leases.reserved(0) == 0);
  CHECK(bench.leases.reserved(1) == kGiB);
  CHECK(bench.devicesInUse() == std::vector<std::string>(3, uuid(1)));
  Opening fifth = bench.session(4);
  CHECK(bench.order(fifth, 'e') == "e1");
  bench.settle(false);  // there is nothing to settle any more
  CHECK(bench.leases.reserved(1) == kGiB);
  // Without a target they stay on the devices that they have now.
  order = bench.migrate();
  for (Opening* session : {&first, &second, &fourth}) {
    Opening next = bench.follow(*session, 3);
    CHECK(contains(bench.order(next, 'q'), "client closed"));
  }
  Opening last = bench.follow(fifth, 2);
  CHECK(order.wait(bench.io.waitScope).sessions == 4);
  CHECK(bench.order(last, 'e') == "e1");
}

TEST_CASE("without a target a session that has moved to other devices stays on them") {
  TargetBench bench;
  Opening one = bench.session(1), other = bench.session(2);
  bench.misbehave(other, '1');
  auto order = bench.migrate(1000, TargetBench::target());
  Opening first = bench.follow(one);
  CHECK(contains(bench.fails(order), "a stream capture is open"));
  order = bench.migrate();
  // In the order in which they have come to their workers.
  Opening stayed = bench.follow(other, 2);
  Opening second = bench.follow(first, 3);
  CHECK(order.wait(bench.io.waitScope).sessions == 2);
  CHECK(bench.order(second, 'e') == "e1");
  CHECK(bench.order(stayed, 'e') == "e0");
  // Back to the devices that it had.
  order = bench.migrate(1000, TargetBench::target(1));
  Opening third = bench.follow(second, 4);
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  CHECK(bench.order(third, 'e') == "e0");
  bench.settle(false);
  CHECK(bench.leases.reserved(1) == 0);
}

TEST_CASE(
    "a move to other devices that fails on its way leaves each session on one side, and goes on later") {
  TargetBench bench;
  Opening one = bench.session(1), two = bench.session(2);
  bench.misbehave(two, '5');
  auto order = bench.migrate(1000, TargetBench::target());
  Opening first = bench.follow(one);
  CHECK(contains(bench.fails(order), "could not rebuild"));
  CHECK(bench.order(first, 'e') == "e1");
  CHECK(bench.order(two, 'e') == "e0");
  CHECK(contains(bench.settleFails(true), "still on the devices"));
  CHECK(contains(bench.settleFails(false), "still on the devices"));
  CHECK(bench.leases.reserved(0) == kGiB);
  CHECK(bench.leases.reserved(1) == kGiB);
  order = bench.migrate(1000, TargetBench::target());
  Opening second = bench.follow(two);
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  bench.settle(true);
  CHECK(bench.order(second, 'e') == "e1");
}

TEST_CASE("what a session has of its lease's memory is on the account of its own devices") {
  TargetBench bench;
  Opening one = bench.session(1), two = bench.session(2);
  CHECK(bench.order(one, 'm') == "taken, others have 0 MiB");
  auto order = bench.migrate(1000, TargetBench::target());
  REQUIRE(bench.hear(one) == "moved 2");
  // While it moves both accounts have it.
  CHECK(bench.order(two, 'm') == "refused, others have 600 MiB");
  Opening first;
  REQUIRE(bench.open(first, 1, 2).empty());
  CHECK(bench.order(first, 'e') == "e1");
  CHECK(bench.order(one, 'L').empty());
  REQUIRE(bench.hear(two) == "moved 2");
  bench.say(two, 'S');
  CHECK(contains(bench.fails(order), "could not reach"));
  CHECK(bench.order(first, 'm') == "refused, others have 0 MiB");
  CHECK(bench.order(two, 'm') == "taken, others have 0 MiB");
  // The lease has so much on the other devices no more.
  order = bench.migrate(1000, TargetBench::target());
  CHECK(contains(bench.fails(order), "its other sessions' already"));
  CHECK(bench.order(two, 'e') == "e0");
  CHECK(bench.order(first, 'g') == "given");
  CHECK(bench.order(first, 'm') == "taken, others have 0 MiB");
  CHECK(bench.order(first, 'g') == "given");
  order = bench.migrate(1000, TargetBench::target());
  Opening second = bench.follow(two);
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  CHECK(bench.order(first, 'm') == "refused, others have 600 MiB");
  CHECK(bench.order(second, 'g') == "given");
  CHECK(bench.order(first, 'm') == "taken, others have 0 MiB");
  Opening third = bench.session(3);
  CHECK(bench.order(third, 'm') == "taken, others have 0 MiB");  // on the devices that the others have left
}

TEST_CASE("what a session takes while it moves is on both accounts, and after a move that failed on one") {
  TargetBench bench;
  Opening one = bench.session(1);
  auto order = bench.migrate(1000, TargetBench::target());
  REQUIRE(bench.hear(one) == "moved 2");
  CHECK(bench.order(one, 'm') == "taken, others have 0 MiB");
  bench.say(one, 'S');
  CHECK(contains(bench.fails(order), "could not reach"));
  order = bench.migrate(1000, TargetBench::target());
  Opening two = bench.follow(one);
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  CHECK(bench.order(two, 'm') == "refused, others have 0 MiB");
  CHECK(bench.order(two, 'g') == "given");
  CHECK(bench.order(two, 'm') == "taken, others have 0 MiB");
}

TEST_CASE("a worker holds the locks of the devices on which its session is") {
  Folder folder;
  DeviceLock locks[] = {{folder.path, uuid(0)}, {folder.path, uuid(1)}};
  for (DeviceLock& lock : locks) REQUIRE(lock.take({}));
  SideSettings settings;
  settings.admission = [&](Admission::Settings& admission) {
    admission.starts.deviceLock = [&](size_t device) { return locks[device].descriptor(); };
  };
  TargetBench bench(std::move(settings));
  const auto isFree = [&](int device) {
    DeviceLock probe(folder.path, uuid(device));
    const bool free = probe.take({});
    probe.release();
    return free;
  };
  Opening one = bench.session(1);
  auto order = bench.migrate(1000, TargetBench::target());
  Opening two = bench.follow(one);
  CHECK(order.wait(bench.io.waitScope).sessions == 1);
  bench.settle(true);
  for (DeviceLock& lock : locks) lock.release();
  bench.until([&] { return isFree(0); });  // a worker that is just being started has copies until its exec
  CHECK_FALSE(isFree(1));
  const pid_t worker = bench.worker(two);
  CHECK(contains(bench.order(two, 'q'), "client closed"));
  bench.until([&] { return !alive(worker) && isFree(1); });
}

TEST_CASE("a lease moves to other devices only where they are its own and work") {
  TargetBench bench;
  Opening one = bench.session(1);
  auto order = bench.migrate(1000, TargetBench::target(7));
  CHECK(contains(bench.fails(order), "were not reserved for it"));
  bench.leases.setBroken(1, "it fell off the bus");
  order = bench.migrate(1000, TargetBench::target());
  CHECK(bench.fails(order) == "device 1: it fell off the bus");
  CHECK_FALSE(bench.paused());
  CHECK(bench.order(one, 'e') == "e0");
  CHECK(
      contains(failure([&] { bench.suspension.suspend(kLease, 1).wait(bench.io.waitScope); }), "is moving"));
  bench.settle(false);
  bench.suspension.suspend(kLease, 1000).wait(bench.io.waitScope);
  CHECK(bench.order(one, 's') == "suspended 1");
}

TEST_CASE("a device that breaks under a session that has moved to it is the one that is broken") {
  TargetBench bench;
  Opening one = bench.session(1);
  auto order = bench.migrate(1000, TargetBench::target());
  Opening two = bench.follow(one);
  order.wait(bench.io.waitScope);
  bench.say(two, 'l');
  bench.until([&] { return !bench.leases.problem(1).empty(); });
  CHECK(bench.leases.problem(0).empty());
  bench.until([&] { return bench.known() == 0; });
  bench.settle(false);
  Opening three = bench.session(2);
  CHECK(bench.order(three, 'e') == "e0");
}

TEST_CASE("a revoke in the middle of a move to other devices ends all, on either side") {
  TargetBench bench;
  Opening one = bench.session(1), two = bench.session(2);
  auto order = bench.migrate(1000, TargetBench::target());
  Opening first = bench.follow(one);
  REQUIRE(bench.hear(two) == "moved 2");
  bench.revoke();
  CHECK(bench.known() == 0);
  CHECK(bench.fails(order) == "the lease ended while its sessions moved");
  CHECK(contains(bench.hear(first), "revoked"));
  CHECK(contains(bench.hear(two), "revoked"));
  CHECK(bench.leases.reserved(0) + bench.leases.reserved(1) == 0);
  bench.settle(true);  // of a lease that is no more: nothing
}

TEST_CASE("settling waits for a worker that its session has left") {
  TargetBench bench;
  Opening one = bench.session(1);
  const pid_t old = bench.worker(one);
  auto order = bench.migrate(1000, TargetBench::target());
  Opening two = bench.follow(one);
  order.wait(bench.io.waitScope);
  bench.settle(true);
  CHECK_FALSE(alive(old));
  CHECK(bench.leases.reserved(0) == 0);
}

TEST_CASE("a session that begins while its lease is settled begins on the devices that the lease has then") {
  Folder folder;
  TargetBench bench;
  bench.until([&] { return bench.pool.warm() == 1; });
  Environment slow("GPUPOOL_FAKE_WORKER", folder.path + "/go");
  Opening one = bench.session(1);
  auto order = bench.migrate(1000, TargetBench::target());  // there is no worker yet
  Opening late;
  auto opened = bench.opening(late, {2, 9}).eagerlyEvaluate(nullptr);
  opened.wait(bench.io.waitScope);
  CHECK(late.suspended);
  std::ofstream(folder.path + "/go").close();
  Opening two = bench.follow(one);
  order.wait(bench.io.waitScope);
  std::filesystem::remove(folder.path + "/go");
  // One that waits for a worker through all of it.
  std::list<Opening> taken;
  Opening waits;
  kj::Promise<void> waiting = nullptr;
  // Workers that were being started before may still come.
  for (bool stays = false; !stays;) {
    while (bench.pool.warm() != 0) taken.push_back(bench.session(20 + taken.size()));
    const auto opened = std::make_shared<bool>(false);
    waiting = bench.opening(waits, {2, 50 + taken.size()}).then([opened] { *opened = true; });
    waiting = waiting.eagerlyEvaluate(nullptr);
    bench.until([&] { return *opened || bench.admission.opening(kLease); });
    bench.timer.afterDelay(500 * kj::MILLISECONDS).wait(bench.io.waitScope);
    stays = !*opened;
    if (*opened) taken.push_back(std::exchange(waits, {}));
  }
  for (Opening& session : taken) CHECK(contains(bench.order(session, 'q'), "client closed"));
  bench.until([&] { return bench.known() == 1; });
  bench.settle(true);
  std::ofstream(folder.path + "/go").close();
  waiting.wait(bench.io.waitScope);
  CHECK(waits.error == "");
  CHECK(bench.order(waits, 'e') == "e1");
}
