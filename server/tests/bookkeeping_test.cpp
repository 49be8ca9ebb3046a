// The pure parts of the server: what is granted, who is slowed down, what a worker's environment holds.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/process_name.h"
#include "base/rate_limit.h"
#include "server/front/device_lock.h"
#include "server/front/leases.h"
#include "server/front/memory_account.h"
#include "server/front/options.h"
#include "server/front/server_state.h"
#include "server/front/worker_child.h"
#include "server/tests/support.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("memory is reserved until the lease is removed, not until it is closed") {
  LeaseTable table(twoDevices());
  CHECK(grant(table, {1, 1}, 1, {0}, 5 * kGiB).empty());
  CHECK(contains(grant(table, {1, 2}, 2, {0}, 4 * kGiB), "bytes free"));
  CHECK(grant(table, {1, 3}, 3, {0, 1}, 3 * kGiB).empty());
  CHECK(table.reserved(0) == 8 * kGiB);
  CHECK(table.reserved(1) == 3 * kGiB);
  REQUIRE(table.close({1, 1}));
  CHECK(table.admissible({1, 1}) == nullptr);
  CHECK(table.contains({1, 1}));
  CHECK(table.reserved(0) == 8 * kGiB);
  CHECK(contains(grant(table, {1, 4}, 4, {0}, kGiB), "bytes free"));
  table.remove({1, 1});
  CHECK(table.reserved(0) == 3 * kGiB);
  CHECK(grant(table, {1, 4}, 4, {0}, kGiB).empty());
  CHECK(table.active() == std::vector<Id>{{1, 3}, {1, 4}});
}

TEST_CASE("only a higher epoch is admitted, device by device") {
  LeaseTable table(twoDevices());
  CHECK(grant(table, {1, 1}, 10, {0}, kGiB).empty());
  CHECK(contains(grant(table, {1, 2}, 10, {0}, kGiB), "not higher than 10"));
  CHECK(grant(table, {1, 2}, 5, {1}, kGiB).empty());
  CHECK(contains(grant(table, {1, 3}, 7, {0, 1}, kGiB), "not higher than 10"));
  // A refused grant changes nothing: device 1 still takes 6.
  CHECK(grant(table, {1, 4}, 6, {1}, kGiB).empty());
  table.close({1, 1});
  table.remove({1, 1});
  CHECK(contains(grant(table, {1, 5}, 9, {0}, kGiB), "not higher than 10"));
}

TEST_CASE("the same lease again is no second reservation; another epoch is another lease") {
  LeaseTable table(twoDevices());
  CHECK(grant(table, {1, 1}, 1, {0}, 5 * kGiB).empty());
  const std::string other(32, 'z');
  CHECK(grant(table, {1, 1}, 1, {0}, 5 * kGiB, other).empty());
  CHECK(table.reserved(0) == 5 * kGiB);
  CHECK(static_cast<char>(table.admissible({1, 1})->key[0]) == 'z');
  CHECK(contains(grant(table, {1, 1}, 2, {0}, 5 * kGiB), "another epoch"));
  table.close({1, 1});
  CHECK(contains(grant(table, {1, 1}, 1, {0}, 5 * kGiB), "being revoked"));
}

TEST_CASE("a suspended lease reserves what it keeps, and gets the rest back when it is free") {
  LeaseTable table(twoDevices());
  CHECK(grant(table, {1, 1}, 1, {0, 1}, 6 * kGiB).empty());
  table.pause({1, 1});
  CHECK(table.admissible({1, 1})->paused);
  CHECK(table.reserved(0) == 6 * kGiB);
  table.setSuspended({1, 1}, {{kGiB, 0}, 11 * kGiB, 1, 2});
  CHECK(table.reserved(0) == kGiB);
  CHECK(table.reserved(1) == 0);
  CHECK(table.promised(0) == 6 * kGiB);
  CHECK(table.suspended() == std::vector<std::pair<Id, std::vector<uint64_t>>>{{{1, 1}, {kGiB, 0}}});
  CHECK(table.active() == std::vector<Id>{{1, 1}});
  CHECK(grant(table, {1, 1}, 1, {0, 1}, 6 * kGiB).empty());  // a new key changes nothing of that
  CHECK(table.reserved(0) == kGiB);
  CHECK(grant(table, {1, 2}, 2, {0}, 3 * kGiB).empty());
  CHECK(table.reserveAgain({1, 1}) == "device 0 has 4294967296 bytes free, it wants 5368709120");
  CHECK(table.reserved(1) == 0);
  table.remove({1, 2});
  CHECK(table.reserveAgain({1, 1}) == std::nullopt);
  CHECK(table.reserved(0) == 6 * kGiB);
  CHECK(table.suspended().empty());  // all of it is reserved
  table.unpause({1, 1});
  CHECK(table.suspended().empty());
  CHECK_FALSE(table.admissible({1, 1})->paused);
  table.setSuspended({1, 1}, {{0, 0}, 0, 0, 0});
  table.close({1, 1});
  CHECK(table.suspended().empty());
  table.pause({7, 7});  // none
  CHECK(table.reserveAgain({7, 7}) == std::nullopt);
}

TEST_CASE("with overcommit a lease without room is aside, and is no suspended one") {
  LeaseTable table(twoDevices(), {}, 200);
  CHECK(grant(table, {1, 1}, 1, {0, 1}, 4 * kGiB).empty());
  CHECK(table.reserved(0) == 5 * kGiB);  // what a context and code take counts
  CHECK(grant(table, {1, 2}, 2, {0}, 3 * kGiB).empty());
  const Grant& second = *table.admissible({1, 2});
  CHECK(second.aside);
  CHECK(second.paused);
  CHECK(table.reserved(0) == 5 * kGiB);  // it has no context yet
  CHECK(table.left(second, 0) == 0);
  CHECK(table.suspended().empty());
  CHECK(table.active() == std::vector<Id>{{1, 1}, {1, 2}});
  CHECK(table.reserveAgain({1, 2}) == "device 0 has 3221225472 bytes free, it wants 4294967296");
  table.pause({1, 1}, true);
  table.admissible({1, 1})->sessionEpochs[{2, 2}] = 1;
  table.setSuspended({1, 1}, {{kGiB, 0}, 0, 0, 0});
  CHECK(table.admissible({1, 1})->aside);
  CHECK(table.reserved(0) == 2 * kGiB);
  CHECK(table.reserved(1) == kGiB);
  CHECK(table.reserveAgain({1, 2}) == std::nullopt);
  table.unpause({1, 2});
  CHECK_FALSE(second.aside);
  CHECK(table.reserved(0) == 6 * kGiB);
  table.pause({1, 1});  // by order from here on
  CHECK(table.suspended() == std::vector<std::pair<Id, std::vector<uint64_t>>>{{{1, 1}, {kGiB, 0}}});
  CHECK(table.crowded({1, 1}) == std::nullopt);
}

TEST_CASE("with overcommit no more is granted than can take turns") {
  auto devices = twoDevices();
  devices[1].software = true;  // no overhead there
  LeaseTable table(devices, {}, 200);
  CHECK(grant(table, {1, 1}, 1, {1}, 8 * kGiB).empty());
  CHECK(grant(table, {1, 2}, 2, {1}, 8 * kGiB).empty());
  CHECK(grant(table, {1, 3}, 3, {1}, 1) ==
        "device 1 has 0 of 17179869184 bytes left to lease (overcommit), "
        "it wants 1");
  // Whole GPUs do not take turns on a real one: each leaves something there.
  CHECK(grant(table, {2, 1}, 1, {0}, 8 * kGiB).empty());
  CHECK(contains(grant(table, {2, 2}, 2, {0}, 8 * kGiB), "more"));
  CHECK(contains(grant(table, {2, 2}, 2, {0}, 1), "leave there while others have their turn"));
  table.remove({2, 1});
  CHECK(grant(table, {2, 2}, 2, {0}, 5 * kGiB).empty());
  CHECK(grant(table, {2, 3}, 3, {0}, 5 * kGiB).empty());
  CHECK(contains(grant(table, {2, 4}, 4, {0}, 5 * kGiB), "4294967296 of 17179869184 bytes left to lease"));
  CHECK(grant(table, {2, 4}, 4, {0}, kGiB).empty());
  CHECK(contains(grant(table, {2, 5}, 5, {0}, ~uint64_t{0}), "left to lease"));
  // A lease that is suspended by order takes no turns. It cannot come back to those where there are too many.
  table.pause({1, 2});
  table.setSuspended({1, 2}, {{0}, 0, 0, 0});
  CHECK(grant(table, {1, 3}, 3, {1}, 2 * kGiB).empty());
  CHECK(contains(table.crowded({1, 2}).value_or(""), "6442450944 of 17179869184 bytes left to lease"));
  table.remove({1, 3});
  CHECK(table.crowded({1, 2}) == std::nullopt);
}

TEST_CASE("with overcommit a new lease does not take what another waits for") {
  LeaseTable table(twoDevices(), {}, 200);
  table.onWaitedFor([](size_t device) { return device == 1; });
  CHECK(grant(table, {1, 1}, 1, {0}, kGiB).empty());
  CHECK(grant(table, {1, 2}, 2, {0, 1}, kGiB).empty());
  CHECK_FALSE(table.admissible({1, 1})->aside);
  CHECK(table.admissible({1, 2})->aside);
}

TEST_CASE("the options of turns are checked") {
  const auto percent = [](const std::string& overcommit, const std::string& memory = "1GiB") {
    ServerOptions options;
    options.name = "node1";
    options.state = "/tmp";
    options.suspendMemory = memory;
    options.overcommit = overcommit;
    options.complete();
    return options.overcommitPercent;
  };
  CHECK(percent("1.0") == 100);
  CHECK(percent("1") == 100);
  CHECK(percent("2.25") == 225);
  CHECK(percent("8") == 800);
  for (const char* text : {"", "0.9", "8.1", "two", "2x", "-2", "nan", "inf", "1e9"})
    CHECK_THROWS_WITH(percent(text), Catch::Contains("is not a number from 1.0 to 8.0"));
  CHECK_THROWS_WITH(percent("2", "0"), Catch::Contains("where --suspend-memory is 0"));
  CHECK(percent("1", "0") == 100);
  ServerOptions options;
  options.turnTime = std::chrono::milliseconds(99);
  CHECK_THROWS_WITH(options.complete(), Catch::Contains("--turn-time: 99ms is less than 100ms"));
}

TEST_CASE("the budget for suspended memory is what was said, or a quarter of the machine's") {
  const auto completed = [](const std::string& memory, const std::string& ahead = "0") {
    ServerOptions options;
    options.name = "node1";
    options.state = "/tmp";
    options.suspendMemory = memory;
    options.suspendMemoryAhead = options::parseBytes(ahead);
    options.suspendFolder = "spare";
    options.complete();
    CHECK(options.suspendFolder[0] == '/');
    return options.suspendBytes;
  };
  CHECK(completed("3GiB") == 3 * kGiB);
  CHECK(completed("0") == 0);
  CHECK(completed("") > uint64_t{64} << 20);
  CHECK(completed("2GiB", "2GiB") == 2 * kGiB);
  CHECK_THROWS_WITH(completed("much"), Catch::Contains("--suspend-memory: "));
  CHECK_THROWS_WITH(completed("1GiB", "2GiB"), Catch::Contains("--suspend-memory-ahead: 2GiB is more than"));
}

TEST_CASE("nonsense is not granted") {
  LeaseTable table(twoDevices());
  CHECK(contains(grant(table, {1, 1}, 1, {0}, kGiB, "short"), "session key has 5 bytes"));
  CHECK(contains(grant(table, {1, 1}, 1, {}, kGiB), "names no device"));
  CHECK(contains(grant(table, {1, 1}, 1, {7}, kGiB), "no device of the uuid"));
  CHECK(contains(grant(table, {1, 1}, 1, {1, 1}, kGiB), "twice"));
  CHECK(contains(grant(table, {1, 1}, 1, {0}, ~uint64_t{0}), "bytes free"));
  CHECK(contains(grant(table, {1, 1}, 0, {0}, kGiB), "not higher than 0"));
  CHECK(table.active().empty());
  CHECK(grant(table, {1, 1}, 1, {0}, 0).empty());
  CHECK(table.reserved(0) == 8 * kGiB);
}

TEST_CASE("failures fill a bucket that drains; peers do not share it") {
  using namespace std::chrono_literals;
  gpupool::FailureLimit limit(3, 1000ms);
  auto now = gpupool::FailureLimit::Clock::now();
  for (int i = 0; i < 3; ++i) {
    CHECK(limit.allowed("a", now));
    limit.failed("a", now);
  }
  CHECK_FALSE(limit.allowed("a", now));
  CHECK(limit.allowed("b", now));
  CHECK_FALSE(limit.allowed("a", now - 0ms));
  CHECK(limit.allowed("a", now + 1100ms));
  for (int i = 0; i < 100; ++i) limit.failed("a", now);
  CHECK_FALSE(limit.allowed("a", now + 3900ms));
  CHECK(limit.allowed("a", now + 4100ms));  // the bucket is bounded: nobody is shut out for long
}

TEST_CASE("a flood of peers is forgotten, the worst one last") {
  gpupool::FailureLimit limit(2, std::chrono::milliseconds(1000));
  const auto now = gpupool::FailureLimit::Clock::now();
  for (int i = 0; i < 4; ++i) limit.failed("worst", now);
  for (int i = 0; i < 10000; ++i) limit.failed("peer " + std::to_string(i), now);
  CHECK(limit.peers() <= 4096);
  CHECK_FALSE(limit.allowed("worst", now));
}

TEST_CASE("a worker's environment holds no tokens and no pool addresses") {
  const char* given[] = {"PATH=/bin",
                         "HOME=/root",
                         "GPUPOOL_TOKEN=t",
                         "GPUPOOL_MANAGER=m:1",
                         "GPUPOOL_HOLDER=/x",
                         "AWS_SECRET_KEY=s",
                         "CUDA_VISIBLE_DEVICES=1",
                         "GPUPOOL_LOG=info",
                         "LD_LIBRARY_PATH=/l",
                         "GPUPOOL_SESSION_KEY=k",
                         nullptr};
  CHECK(workerEnvironment(const_cast<char**>(given)) ==
        std::vector<std::string>{"PATH=/bin", "HOME=/root", "CUDA_VISIBLE_DEVICES=1", "GPUPOOL_LOG=info",
                                 "LD_LIBRARY_PATH=/l"});
}

TEST_CASE("options that depend on the machine are filled in") {
  ServerOptions options;
  options.name = "n";
  options.state = "/run/x";
  options.complete();
  CHECK(options.local == "/run/x/server-n.sock");
  CHECK(contains(options.worker, "/gpupool-worker"));
  options.local = "none";
  options.complete();
  CHECK(options.local.empty());
  for (const char* name : {"a/b", "a:1", "..", "-a", "a b", "\xc3\xa4"}) {
    options.name = name;
    CHECK_THROWS_WITH(options.complete(), Catch::Contains("is no name for a server"));
  }
  options.name = "Node-7_b.example.org";
  options.warm = 257;
  CHECK_THROWS_WITH(options.complete(), Catch::Contains("--warm: 257 is more than 256"));
  options.warm = 256;
  CHECK_NOTHROW(options.complete());
}

TEST_CASE("etc/server.yaml holds every option at its default") {
  ServerOptions options;
  const gpupool::options::Set set(options.table(), ServerOptions::kPrefix);
  std::ifstream file(SERVER_YAML);
  std::string text(std::istreambuf_iterator<char>(file), {});
  // Its two own options make sense on the command line only; they are in main.cpp's table alone.
  CHECK(text == set.yaml(ServerOptions::kIntroduction));
}

TEST_CASE("the sessions of a lease share what it has of each device") {
  MemoryAccount account({100, 50});
  CHECK(account.take(1, 0, 60));
  CHECK_FALSE(account.take(2, 0, 41));
  CHECK(account.take(2, 0, 40));
  CHECK(account.take(2, 1, 50));
  CHECK_FALSE(account.take(1, 0, 1));
  CHECK_FALSE(account.take(1, 2, 0));  // no such place
  CHECK_FALSE(account.take(1, 1, ~uint64_t{0}));
  CHECK(account.others(1, 0) == 40);
  CHECK(account.others(2, 0) == 60);
  account.give(1, 0, 1000);  // no more than it had
  CHECK(account.freeBytes(0) == 60);
  account.forget(2);
  CHECK(account.freeBytes(0) == 100);
  CHECK(account.freeBytes(1) == 50);
  account.give(2, 0, 10);
  CHECK(account.freeBytes(0) == 100);
}

TEST_CASE("a server's state outlives it, and workers do not outlive the machine") {
  Folder folder;
  const std::string path = folder.path + "/server-x.state";
  const StoredSession session{{5, 6}, 3, 7, 42, "train", "ucx", 99, true};
  const StoredGrant lease{{1, 2},
                          7,
                          std::vector(32, std::byte{'k'}),
                          {{uuid(0), 1000}},
                          "eve",
                          "tenant",
                          25,
                          schema::Priority::HIGH,
                          60'000,
                          5000};
  StoredGrant aside = lease;
  aside.id = {3, 4};
  aside.aside = StoredAside{.byTurns = true, .changing = true, .kept = {5, 6}, .movedBytes = 77};
  StoredGrant moving = lease;
  moving.id = {3, 5};
  moving.target = StoredTarget{9, {{uuid(1), 1000}}};
  StoredGrant ending = lease;
  ending.id = {3, 6};
  ending.ending = true;
  const ServerState state{
      {{uuid(0), 7}, {uuid(1), 9}},
      {{12, 345, {1, 2}, {uuid(0)}}, {13, 345, {1, 2}, {uuid(0)}, session, 4'294'967'297}},
      {{{1, 2}, {3, 4}, "monday", "x"}},
      {lease, moving, aside, ending},
      StoredCopier{14, 346},
      StoredSharing{{7, 8}, std::vector(32, std::byte{'s'}), 3, {5, 6}}};
  CHECK(StateFile(path, "boot").read() == ServerState{});
  StateFile(path, "boot").write(state);
  std::ofstream(path + ".new") << "half";  // of a server that was killed while it wrote
  CHECK(StateFile(path, "boot").read() == state);
  CHECK_FALSE(std::filesystem::exists(path + ".new"));
  const ServerState later = StateFile(path, "another boot").read();
  CHECK(later.epochs == state.epochs);
  CHECK(later.workers.empty());
  CHECK(later.leases.empty());
  CHECK_FALSE(later.copier);
  CHECK_FALSE(later.sharing);
  struct stat file{};
  REQUIRE(stat(path.c_str(), &file) == 0);
  CHECK((file.st_mode & 0777) == 0600);  // it has keys
  CHECK(later.holds.empty());
  std::filesystem::resize_file(path, 20);
  CHECK(StateFile(path, "boot").read() == ServerState{});
}

TEST_CASE("a lock comes back with the descriptor of a worker that holds it, and with no other") {
  Folder folder;
  const LockOwner me{"me", "/run/me", getpid(), gpupool::processStartTicks(getpid())};
  auto earlier = std::make_unique<DeviceLock>(folder.path, uuid(0));
  REQUIRE(earlier->take(me));
  kj::AutoCloseFd workers(fcntl(earlier->descriptor(), F_DUPFD_CLOEXEC, 0));
  earlier.reset();
  DeviceLock next(folder.path, uuid(0)), another(folder.path, uuid(1));
  CHECK_FALSE(next.take(me));
  kj::AutoCloseFd none(open("/dev/null", O_RDWR | O_CLOEXEC)),
      same(open((folder.path + "/gpupool-" + uuidText(uuid(0)) + ".lock").c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(same.get() >= 0);
  CHECK_FALSE(next.takeBack(none, me));
  CHECK_FALSE(next.takeBack(same, me));        // the file, and not the lock
  CHECK_FALSE(another.takeBack(workers, me));  // another GPU's
  REQUIRE(next.takeBack(workers, me));
  CHECK(workers.get() < 0);
  next.release();
  CHECK(DeviceLock(folder.path, uuid(0)).take(me));
}

TEST_CASE("a lock is held by whoever has its descriptor, also when its server is gone") {
  Folder folder;
  const LockOwner me{"me", "/run/me", getpid(), gpupool::processStartTicks(getpid())};
  auto server = std::make_unique<DeviceLock>(folder.path, uuid(0));
  REQUIRE(server->take(me));
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t worker = fork();  // inherits the descriptor
  if (worker == 0) {
    char byte;
    close(ends[1]);
    _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);
  }
  server.reset();
  DeviceLock next(folder.path, uuid(0));
  CHECK_FALSE(next.take(me));
  CHECK(next.holder().server == "me");
  close(ends[0]);
  close(ends[1]);
  REQUIRE(waitpid(worker, nullptr, 0) == worker);
  CHECK(next.take(me));
  next.release();
  CHECK(std::filesystem::is_empty(folder.path));
}

TEST_CASE("a lock is no link and no pipe, and its text is not believed") {
  Folder folder;
  const std::string path = folder.path + "/gpupool-" + uuidText(uuid(0)) + ".lock";
  const LockOwner me{"me", "/run/me", getpid(), 1};
  DeviceLock lock(folder.path, uuid(0));
  SECTION("a link") {
    std::filesystem::create_symlink("/etc/passwd", path);
    CHECK(contains(failure([&] { lock.take(me); }), "--device-locks"));
  }
  SECTION("a pipe") {
    REQUIRE(mkfifo(path.c_str(), 0666) == 0);
    CHECK(contains(failure([&] { lock.take(me); }), "--device-locks"));
  }
  SECTION("nonsense") {
    std::ofstream(path) << "1\x1b[2J\t2\n";
    DeviceLock other(folder.path, uuid(0));
    REQUIRE(other.take(me));
    std::ofstream(path) << "12\t3\te\x1b[2Jvil\tx\n";
    CHECK_FALSE(lock.take(me));
    CHECK(lock.holder().server == "e?[2Jvil");
  }
}
