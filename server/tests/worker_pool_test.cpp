// Warm workers and sessions, with real processes around a fake driver.
#include "server/front/worker_pool.h"

#include <fstream>

#include "server/front/inventory.h"
#include "server/front/sessions.h"
#include "server/tests/support.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

struct Bench {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  Folder folder;
  std::vector<std::pair<uint32_t, std::string>> lost;
  SessionTable sessions{
      timer,
      {.stop = 1 * kj::SECONDS, .exit = 300 * kj::MILLISECONDS},
      [this](uint32_t ordinal, const std::string& error) { lost.emplace_back(ordinal, error); }};

  WorkerPool::Settings settings(uint32_t warm) {
    WorkerPool::Settings settings;
    settings.program = FAKE_WORKER;
    settings.arguments = {"--driver", FAKE_DRIVER};
    settings.warm = warm;
    settings.rowsHash = kRows;
    settings.firstPause = 20 * kj::MILLISECONDS;
    settings.longestPause = 100 * kj::MILLISECONDS;
    return settings;
  }
  void until(std::function<bool()> condition) { eventually(timer, std::move(condition)).wait(io.waitScope); }
  kj::Own<WorkerChild> take(WorkerPool& pool, std::vector<int> ordinals = {0}) {
    return pool.take({std::move(ordinals)}, 5 * kj::SECONDS).wait(io.waitScope);
  }
  void stop(WorkerPool& pool) { pool.stop().wait(io.waitScope); }

  // A session on a worker of the pool; the client's end.
  Opening begin(WorkerPool& pool, Id lease, Id session) {
    auto worker = take(pool);
    auto [client, server] = connection(*io.lowLevelProvider);
    capnp::MallocMessageBuilder message;
    auto start = message.initRoot<gpupool::schema::WorkerOrder>().initStart();
    start.initDescriptors(1).set(0, gpupool::schema::Descriptor::CLIENT_SOCKET);
    schema::write(twoDevices()[1], start.initDevices(1)[0].initInfo());
    int descriptor = -1;
    KJ_IF_MAYBE (fd, server->getFd()) {
      descriptor = *fd;
    }
    REQUIRE(worker->send(message, std::span(&descriptor, 1)));
    sessions.add({session, lease, 1, 42, "test"}, kj::mv(worker), kj::AutoCloseFd(dup(descriptor)));
    Opening opening;
    opening.stream = kj::mv(client);
    return opening;
  }
  std::string endText(size_t index = 0) {
    capnp::MallocMessageBuilder message;
    auto results = message.initRoot<gpupool::schema::ServerControl::SessionsResults>();
    sessions.write([&](unsigned count) { return results.initSessions(count); });
    REQUIRE(index < results.getSessions().size());
    return results.getSessions()[index].getText().cStr();
  }
};

}  // namespace

TEST_CASE("workers are ready ahead of time, used once, and replaced") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(2));
  bench.until([&] { return pool.warm() == 2; });
  auto first = bench.take(pool), second = bench.take(pool), third = bench.take(pool);
  CHECK(first->pid() != second->pid());
  CHECK(second->pid() != third->pid());
  bench.until([&] { return pool.warm() == 2; });
  CHECK(pool.healthy());
  bench.stop(pool);
  CHECK(pool.warm() == 0);
}

TEST_CASE("a session gets a worker with a context on its own device, or with none") {
  Bench bench;
  auto settings = bench.settings(1);
  settings.contexts = {0, 1};  // the fake driver has no room on device 1
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return pool.warm() == 2; });
  const auto context = [](const WorkerChild& child) {
    std::ifstream file("/proc/" + std::to_string(child.pid()) + "/cmdline");
    const std::string words(std::istreambuf_iterator<char>(file), {});
    const size_t at = words.find("--warm-context");
    return at == std::string::npos ? -1 : words[at + 15] - '0';
  };
  auto first = bench.take(pool, {0});
  CHECK(context(*first) == 0);
  bench.until([&] { return pool.warm() == 2; });
  // Device 0's context is no use to a session on device 1, ready or waited for.
  auto second = bench.take(pool, {1}), third = bench.take(pool, {1}), fourth = bench.take(pool, {1});
  CHECK(context(*second) == -1);
  CHECK(context(*third) == -1);
  CHECK(context(*fourth) == -1);
  auto rebuilt = pool.take({{0}, false}, 20 * kj::SECONDS);
  CHECK(context(*rebuilt.wait(bench.io.waitScope)) == -1);  // though device 0's is there
  CHECK(context(*bench.take(pool, {1, 0})) == 0);
  CHECK(pool.healthy());
  CHECK(pool.lastFailure().empty());
  bench.stop(pool);
}

TEST_CASE("with devices of its own, a worker serves sessions on exactly these") {
  Bench bench;
  auto settings = bench.settings(2);
  settings.gpus = {{0, "0000:3b:00.0"}, {1, "0000:5e:00.0"}};
  settings.contexts = {0};
  settings.rdma = true;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  const auto word = [](const WorkerChild& child, const std::string& option) {
    std::ifstream file("/proc/" + std::to_string(child.pid()) + "/cmdline");
    for (std::string word; std::getline(file, word, '\0');)
      if (word == option && std::getline(file, word, '\0')) return word;
    return std::string();
  };
  const std::string both = "0000:3b:00.0,0000:5e:00.0,rdma", first = "0000:3b:00.0,rdma",
                    second = "0000:5e:00.0,rdma";
  bench.until([&] { return pool.warm() == 3; });  // two for all devices, one with a context
  auto all = bench.take(pool, {1, 0});
  CHECK(word(*all, "--devices") == both);
  CHECK(word(*all, "--warm-context") == "");
  auto context = bench.take(pool, {0});
  CHECK(word(*context, "--devices") == first);
  CHECK(word(*context, "--warm-context") == "0");
  // Nothing waits for it: one is started, and from then on one waits.
  auto other = bench.take(pool, {1});
  CHECK(word(*other, "--devices") == second);
  CHECK(word(*other, "--warm-context") == "");
  auto rebuilt = pool.take({{0}, false}, 20 * kj::SECONDS).wait(bench.io.waitScope);
  CHECK(word(*rebuilt, "--devices") == first);
  CHECK(word(*rebuilt, "--warm-context") == "");
  // The latest two: of all devices none waits any more, and that is no failure.
  bench.until([&] { return pool.warm() == 3 && children().size() == 4 + 3; });
  // A lease of both is here: one waits for its sessions. A context that will be there is enough for one's.
  pool.expect({0});
  pool.expect({1, 0});
  const auto waits = [&](const std::string& devices) {
    for (pid_t pid : children()) {
      std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
      const std::string words(std::istreambuf_iterator<char>(file), {});
      if (pid != all->pid() && words.find(std::string("--devices") + '\0' + devices) != words.npos)
        return true;
    }
    return false;
  };
  bench.until([&] { return waits(both) && pool.warm() == 3; });
  CHECK(pool.healthy());
  CHECK(pool.lastFailure().empty());
  bench.stop(pool);
}

TEST_CASE("a context on the second device is the first of a worker that has no other") {
  Bench bench;
  auto settings = bench.settings(0);
  settings.gpus = {{4, "0000:3b:00.0"}, {5, "0000:5e:00.0"}};
  settings.contexts = {5};
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return pool.warm() == 1; });  // the fake driver has room on device 0 alone
  CHECK(pool.lastFailure().empty());
  bench.stop(pool);
}

TEST_CASE("a context is made ahead only while nobody has its memory") {
  Bench bench;
  bool room = false;
  auto settings = bench.settings(1);
  settings.contexts = {0};
  settings.contextCheck = 20 * kj::MILLISECONDS;
  settings.mayHold = [&](int ordinal) { return ordinal == 0 && room; };
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return pool.warm() == 1; });
  bench.timer.afterDelay(100 * kj::MILLISECONDS).wait(bench.io.waitScope);
  CHECK(pool.warm() == 1);
  room = true;
  bench.until([&] { return pool.warm() == 2; });
  bench.stop(pool);
}

TEST_CASE("without warm workers one is started for who asks") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(0));
  auto worker = bench.take(pool);
  CHECK(alive(worker->pid()));
  CHECK(pool.warm() == 0);
  bench.stop(pool);
}

TEST_CASE("a worker that nobody wants any more is no zombie for long") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(0));
  const pid_t pid = bench.take(pool)->pid();
  bench.until([&] { return ::kill(pid, 0) != 0; });  // succeeds for a zombie
  bench.stop(pool);
}

TEST_CASE("a worker that cannot start is reported with its reason and tried again") {
  Bench bench;
  const std::string flag = bench.folder.path + "/ready";
  Environment fail("GPUPOOL_FAKE_WORKER", flag);
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
  bench.until([&] { return !pool.healthy(); });
  CHECK(contains(pool.lastFailure(), "told to fail"));
  CHECK(contains(failure([&] { pool.take({{0}}, 50 * kj::MILLISECONDS).wait(bench.io.waitScope); }),
                 "told to fail"));
  std::ofstream(flag).close();
  CHECK(alive(bench.take(pool)->pid()));
  CHECK(pool.healthy());
  bench.stop(pool);
}

TEST_CASE("a worker that crashes at its start, or cannot even be executed, says so") {
  Bench bench;
  {
    Environment crash("GPUPOOL_FAKE_WORKER", "crash");
    WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
    bench.until([&] { return !pool.healthy(); });
    CHECK(contains(pool.lastFailure(), "killed by signal 6"));
    bench.stop(pool);
  }
  auto settings = bench.settings(1);
  settings.program = bench.folder.path + "/nothing";
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return !pool.healthy(); });
  CHECK(contains(pool.lastFailure(), "cannot be run"));
  bench.stop(pool);
}

TEST_CASE("another worker that is installed meanwhile is not used before the server is started again") {
  Bench bench;
  const std::string path = bench.folder.path + "/gpupool-worker";
  std::filesystem::copy_file(FAKE_WORKER, path);
  auto settings = bench.settings(1);
  settings.program = path;
  std::filesystem::copy_file("/bin/false", path + ".new");
  std::filesystem::rename(path + ".new", path);
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  for (int i = 0; i < 2; ++i) CHECK_FALSE(bench.take(pool)->gone());
  bench.stop(pool);
  settings.program = path;
  WorkerPool later(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return !later.healthy(); });
  bench.stop(later);
}

TEST_CASE("a worker that never gets ready is killed at the bound") {
  Bench bench;
  Environment mute("GPUPOOL_FAKE_WORKER", "mute");
  auto settings = bench.settings(1);
  settings.startBound = 100 * kj::MILLISECONDS;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return contains(pool.lastFailure(), "did not get ready in time"); });
  bench.stop(pool);
}

TEST_CASE("a worker built from other rows is not used") {
  Bench bench;
  auto settings = bench.settings(1);
  settings.rowsHash = kRows + 1;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return contains(pool.lastFailure(), "other call rows"); });
  CHECK(pool.warm() == 0);
  bench.stop(pool);
}

TEST_CASE("a worker without a wall that this server's workers have is not used") {
  Bench bench;
  auto settings = bench.settings(1);
  settings.walls = {"seccomp"};
  WorkerPool pool(bench.io.unixEventPort, bench.timer, settings);
  bench.until([&] { return contains(pool.lastFailure(), "has no wall 'seccomp'"); });
  CHECK(pool.warm() == 0);
  bench.stop(pool);
}

TEST_CASE("a waiting worker that dies is replaced") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
  bench.until([&] { return pool.warm() == 1; });
  const auto pids = children();
  REQUIRE(pids.size() == 1);
  kill(pids[0], SIGKILL);
  bench.until([&] { return contains(pool.lastFailure(), "a waiting worker was killed by signal 9"); });
  bench.until([&] { return pool.warm() == 1; });
  CHECK(children() != pids);
  bench.stop(pool);
}

TEST_CASE("a session ends by itself, and its reason is kept") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
  auto client = bench.begin(pool, {1, 1}, {2, 1});
  CHECK(client.order('e').wait(bench.io.waitScope) == "e1");
  CHECK(bench.sessions.living({1, 1}) == 1);
  CHECK(contains(client.order('q').wait(bench.io.waitScope), "client closed"));  // from the server
  CHECK(client.hear().wait(bench.io.waitScope) == "");
  bench.until([&] { return bench.sessions.living() == 0; });
  CHECK(bench.endText() == "client closed");
  bench.stop(pool);
}

TEST_CASE("the reason is not lost when report and exit are seen together") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
  for (uint64_t i = 0; i < 5; ++i) {
    auto client = bench.begin(pool, {1, 1}, {2, i});
    const pid_t pid = std::stoi(client.order('p').wait(bench.io.waitScope));
    client.stream = nullptr;
    while (alive(pid)) usleep(500);  // reported and exited before the event loop looks
    bench.until([&] { return bench.sessions.living() == 0; });
    CHECK(bench.endText() == "client lost");
  }
  bench.stop(pool);
}

TEST_CASE("a worker that crashes ends its session alone") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(2));
  auto unlucky = bench.begin(pool, {1, 1}, {2, 1});
  auto other = bench.begin(pool, {1, 2}, {2, 2});
  CHECK(contains(unlucky.order('c').wait(bench.io.waitScope), "the worker was killed by signal 6"));
  CHECK(unlucky.hear().wait(bench.io.waitScope) == "");
  bench.until([&] { return bench.sessions.living() == 1; });
  CHECK(contains(bench.endText(1), "killed by signal 6"));
  CHECK(other.order('e').wait(bench.io.waitScope) == "e1");
  bench.sessions.endAll("test over").wait(bench.io.waitScope);
  bench.stop(pool);
}

TEST_CASE("a client that goes away ends its session") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
  auto client = bench.begin(pool, {1, 1}, {2, 1});
  client.stream = nullptr;
  bench.until([&] { return bench.sessions.living() == 0; });
  CHECK(bench.endText() == "client lost");
  bench.stop(pool);
}

TEST_CASE("a worker that hangs after its session is killed at the bound") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
  auto client = bench.begin(pool, {1, 1}, {2, 1});
  CHECK(contains(client.order('h').wait(bench.io.waitScope), "hanging from here"));
  bench.until([&] { return bench.sessions.living() == 0; });
  CHECK(contains(bench.endText(), "hanging from here; the worker was killed by signal 9"));
  bench.stop(pool);
}

TEST_CASE("ending a lease tells its clients why, and waits for the processes") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(2));
  auto one = bench.begin(pool, {1, 1}, {2, 1});
  auto two = bench.begin(pool, {1, 1}, {2, 2});
  auto other = bench.begin(pool, {1, 2}, {2, 3});
  const pid_t pid = std::stoi(one.order('p').wait(bench.io.waitScope));
  CHECK(getpgid(pid) == pid);
  CHECK(getsid(pid) == pid);
  bench.sessions.end({1, 1}, "the tenant's quota is used up").wait(bench.io.waitScope);
  CHECK_FALSE(alive(pid));
  CHECK(bench.sessions.living() == 1);
  CHECK(one.hear().wait(bench.io.waitScope) == "stop: the tenant's quota is used up");
  CHECK(other.order('e').wait(bench.io.waitScope) == "e1");
  bench.sessions.end({9, 9}, "no such lease").wait(bench.io.waitScope);
  bench.sessions.endAll("test over").wait(bench.io.waitScope);
  bench.stop(pool);
}

TEST_CASE("a worker deaf to the order is killed") {
  Bench bench;
  WorkerPool pool(bench.io.unixEventPort, bench.timer, bench.settings(1));
  auto client = bench.begin(pool, {1, 1}, {2, 1});
  const pid_t pid = std::stoi(client.order('p').wait(bench.io.waitScope));
  kill(pid, SIGSTOP);
  bench.sessions.end({1, 1}, "revoked").wait(bench.io.waitScope);
  CHECK_FALSE(alive(pid));
  bench.stop(pool);
}

TEST_CASE("the inventory comes from a child, whose crash is an error and no more") {
  Bench bench;
  const auto take = [&](const std::string& driver) {
    return takeInventory(bench.io.unixEventPort, bench.timer, FAKE_WORKER, driver).wait(bench.io.waitScope);
  };
  const Inventory inventory = take(FAKE_DRIVER);
  CHECK(inventory.driver == FAKE_DRIVER);
  CHECK(inventory.rowsHash == kRows);
  REQUIRE(inventory.devices.size() == 2);
  CHECK(inventory.devices[1].uuid == uuid(1));
  CHECK(inventory.devices[1].name == "Fake GPU 1");
  CHECK(inventory.devices[1].memoryBytes == 8 * kGiB);
  CHECK(contains(failure([&] { take("/nonexistent/libcuda.so.1"); }), "/nonexistent/libcuda.so.1"));
  Environment crash("GPUPOOL_FAKE_INVENTORY", "crash");
  CHECK(contains(failure([&] { take(FAKE_DRIVER); }), "killed by signal 6"));
}
