// What a worker's shell is told and says: its arguments, the session's start, orders, and the lease's memory.
#include <fcntl.h>

#include <array>
#include <chrono>
#include <map>
#include <thread>

#include "server/driver.h"
#include "server/tests/worker_process_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

void fillStart(capnp::MessageBuilder& message) {
  auto start = message.initRoot<schema::WorkerOrder>().initStart();
  start.initSession().setHigh(1);
  start.setEpoch(3);
  start.setTransport("shm");
  auto device = start.initDevices(1)[0];
  device.initInfo().setOrdinal(5);
  device.setMemoryBytes(1024);
  start.initDescriptors(1).set(0, schema::Descriptor::CLIENT_SOCKET);
  start.setModuleCacheBytes(77);
  start.setClientPid(42);
}

}  // namespace

TEST_CASE("a session start arrives whole, with a blocking socket that programs started later do not get") {
  Worker worker([](WorkerProcess& process) {
    process.reportReady("/lib/driver.so");
    const auto start = process.waitForSession();
    if (!start || start->session != Id{1, 0} || start->epoch != 3 || start->transport != "shm") return 1;
    if (start->devices.size() != 1 || start->devices[0].info.ordinal != 5) return 2;
    if (start->devices[0].memoryBytes != 1024 || start->moduleCache != -1) return 3;
    if (start->moduleCacheBytes != 77) return 7;
    if (start->clientPid != 42) return 4;
    if ((fcntl(start->socket, F_GETFL) & O_NONBLOCK) != 0) return 5;
    if ((fcntl(start->socket, F_GETFD) & FD_CLOEXEC) == 0) return 6;
    process.reportEnded("client closed");
    return 0;
  });
  CHECK(worker.report() == "ready /lib/driver.so");
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  capnp::MallocMessageBuilder message;
  fillStart(message);
  worker.send(message, ends[1]);
  CHECK(worker.report() == "ended: client closed");
  CHECK(worker.wait() == 0);
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("a session's devices are found by their UUIDs where a worker has not all of the server") {
  const auto driver = Driver::load(FAKE_DRIVER);  // has two
  const auto uuid = [](int device) { return std::string(16, static_cast<char>(0x40 + device)); };
  SessionStart start;
  for (int device : {1, 0}) {
    LeasedDevice leased;
    leased.info.uuid = uuid(device);
    leased.info.ordinal = 6 + static_cast<uint32_t>(device);  // the server has six others ahead of them
    start.devices.push_back(leased);
  }
  CHECK(start.ordinal(0) == 7);
  findDevices(*driver, start);
  CHECK(start.ordinal(0) == 1);
  CHECK(start.ordinal(1) == 0);
  CHECK(start.devices[0].info.ordinal == 7);  // as before: the server's
  start.devices[1].info.uuid = uuid(9);
  CHECK_THROWS_WITH(findDevices(*driver, start), "this worker does not have GPU 6 of the server");
}

TEST_CASE("a worker that waits for a session ends with its server, or when told") {
  const auto body = [](WorkerProcess& process) { return process.waitForSession() ? 1 : 0; };
  Worker lost(body), told(body);
  lost.hangUp();
  CHECK(lost.wait() == 0);
  told.order("drained");
  CHECK(told.wait() == 0);
}

TEST_CASE("malformed starts are errors, not sessions") {
  const auto body = [](WorkerProcess& process) {
    process.waitForSession();
    return 0;
  };
  Worker odd(body), wild(body), socketless(body);
  odd.send(std::as_bytes(std::span("12345", 5)));
  CHECK(odd.wait() == 98);
  const uint64_t pointer[] = {0x0000'0001'0000'0000, 0x7fff'ffff'7fff'fffc};
  wild.send(std::as_bytes(std::span(pointer)));
  CHECK(wild.wait() == 98);
  capnp::MallocMessageBuilder message;
  fillStart(message);
  socketless.send(message);
  CHECK(socketless.wait() == 98);
}

TEST_CASE("a start to rebuild needs the state socket and no client's, any other the reverse") {
  using enum schema::Descriptor;
  const auto body = [](WorkerProcess& process) {
    const auto start = process.waitForSession();
    return start && start->rebuild == (start->state >= 0) && start->rebuild == (start->socket < 0) ? 0 : 1;
  };
  const auto status = [&](bool rebuild, std::vector<schema::Descriptor> kinds) {
    Worker worker(body);
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    capnp::MallocMessageBuilder message;
    fillStart(message);
    auto start = message.getRoot<schema::WorkerOrder>().getStart();
    start.setRebuild(rebuild);
    auto list = start.initDescriptors(static_cast<unsigned>(kinds.size()));
    for (unsigned i = 0; i < list.size(); ++i) list.set(i, kinds[i]);
    worker.send(message, std::span(ends).first(kinds.size()));
    const int status = worker.wait();
    close(ends[0]);
    close(ends[1]);
    return status;
  };
  CHECK(status(true, {STATE}) == 0);
  CHECK(status(false, {CLIENT_SOCKET}) == 0);
  CHECK(status(true, {CLIENT_SOCKET}) == 98);
  CHECK(status(true, {STATE, CLIENT_SOCKET}) == 98);
  CHECK(status(true, {}) == 98);
  CHECK(status(false, {STATE}) == 98);
  CHECK(status(false, {CLIENT_SOCKET, STATE}) == 98);
}

TEST_CASE("an order to move comes with its connections, and is answered") {
  Worker worker([](WorkerProcess& process) {
    process.onOrders(
        {.suspend = {},
         .resume = {},
         .move = [&](std::chrono::milliseconds drain, uint64_t epoch, int copier, int state, bool direct) {
           if ((copier >= 0 && write(copier, "copier", 6) != 6) || write(state, "state", 5) != 5) _exit(70);
           if ((fcntl(state, F_GETFL) & O_NONBLOCK) != 0 || (fcntl(state, F_GETFD) & FD_CLOEXEC) == 0)
             _exit(71);
           process.reportMoved({direct ? "a capture is open there" : "a capture is open", epoch,
                                static_cast<uint32_t>(drain.count()), 9});
           close(copier);
           close(state);
         }});
    process.watchServer([](const std::string&) { _exit(0); });
    for (;;) sleep(1);
    return 1;
  });
  int copier[2], state[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, copier) == 0);
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, state) == 0);
  capnp::MallocMessageBuilder message;
  auto move = message.initRoot<schema::WorkerOrder>().initMove();
  move.setDrainMs(55);
  move.setEpoch(4);
  worker.send(message, copier[1]);
  CHECK(worker.report() == "moved: the order came without its two connections 0 0 0");
  worker.send(message, std::array{copier[1], state[1]});
  CHECK(worker.report() == "moved: a capture is open 4 55 9");
  move.setDirect(true);
  worker.send(message, std::array{copier[1], state[1]});
  CHECK(worker.report() == "moved: a capture is open there 4 55 9");
  move.setDirect(false);
  // To a worker of another server: without a copier.
  move.setStream(true);
  worker.send(message, std::array{copier[1], state[1]});
  CHECK(worker.report() == "moved: the order came without its connection 0 0 0");
  worker.send(message, state[1]);
  CHECK(worker.report() == "moved: a capture is open 4 55 9");
  char text[16] = "";
  CHECK(read(copier[0], text, sizeof text) == 12);  // of both orders that had one
  for (int order = 0; order < 3; ++order) CHECK(read(state[0], text, 5) == 5);
  CHECK(std::string(text, 5) == "state");
  for (int end : {copier[0], copier[1], state[0], state[1]}) close(end);
}

TEST_CASE("a worker that cannot move its session says so") {
  Worker worker([](WorkerProcess& process) {
    process.watchServer([](const std::string&) { _exit(0); });
    for (;;) sleep(1);
    return 1;
  });
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().initMove();
  worker.send(message, std::array{STDERR_FILENO, STDERR_FILENO});
  CHECK(worker.report() == "moved: this worker cannot move its session 0 0 0");
}

TEST_CASE("the client's socket of a session that moved here is waited for within a bound") {
  using namespace std::chrono_literals;
  Worker worker([](WorkerProcess& process) {
    process.watchServer([](const std::string&) {}, 10s);
    if (process.waitForClient(20ms)) return 1;
    process.reportRebuilt("");
    const auto client = process.waitForClient(20s);
    if (!client || (fcntl(*client, F_GETFL) & O_NONBLOCK) != 0) return 2;
    process.reportRebuilt("first");
    if (process.waitForClient(500ms)) return 3;  // another one is nobody's
    char byte;
    process.reportRebuilt(read(*client, &byte, 1) == 1 ? std::string(1, byte) : "nothing");
    if (process.waitForClient(20s)) return 4;  // until the session is to end
    return process.stopping() ? 0 : 5;
  });
  int client[2], other[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, client) == 0);
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, other) == 0);
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setClient();
  CHECK(worker.report() == "rebuilt: ");
  worker.send(message);  // without a socket
  worker.send(message, client[1]);
  CHECK(worker.report() == "rebuilt: first");
  worker.send(message, other[1]);
  REQUIRE(write(client[0], "x", 1) == 1);
  CHECK(worker.report() == "rebuilt: x");
  close(other[1]);
  char byte;
  CHECK(read(other[0], &byte, 1) == 0);  // the worker has closed it
  worker.order("enough");
  CHECK(worker.wait() == 0);
  for (int end : {client[0], client[1], other[0]}) close(end);
}

TEST_CASE("the lease's memory is asked for, granted or refused, and given back") {
  Worker worker([](WorkerProcess& process) {
    process.watchServer([](const std::string&) {});
    std::thread other([&] { process.takeMemory(7, 70); });
    const auto granted = process.takeMemory(0, 100);
    const auto refused = process.takeMemory(1, 200);
    other.join();
    process.giveMemory(0, 50);
    if (!granted.granted || granted.othersBytes != 1100) return 1;
    if (refused.granted || refused.error != "no") return 2;
    process.reportEnded("done");
    return 0;
  });
  std::map<uint32_t, uint64_t> taken;
  for (int i = 0; i < 3; ++i) {
    capnp::MallocMessageBuilder message;
    const auto request = worker.memory();
    taken[request.place] += request.take;
    auto answer = message.initRoot<schema::WorkerOrder>().initMemory();
    answer.setTicket(request.ticket);
    answer.setGranted(request.place != 1);
    answer.setOthersBytes(1000 + request.take);
    answer.setError(request.place != 1 ? "" : "no");
    worker.send(message);
  }
  CHECK(taken == std::map<uint32_t, uint64_t>{{0, 100}, {1, 200}, {7, 70}});
  const auto back = worker.memory();
  CHECK(back.ticket == 0);
  CHECK(back.give == 50);
  CHECK(worker.report() == "ended: done");
  CHECK(worker.wait() == 0);
}

TEST_CASE("a worker started by hand says whose it is") {
  CHECK_THROWS_WITH(WorkerProcess(STDERR_FILENO),
                    "descriptor 2 is not the server's socket: gpupool-worker is started by gpupool-server");
}

TEST_CASE("a worker's arguments") {
  const auto parse = [](std::vector<std::string> words) {
    std::vector<char*> list{const_cast<char*>("gpupool-worker")};
    for (auto& word : words) list.push_back(word.data());
    return parseWorkerArguments(static_cast<int>(list.size()), list.data());
  };
  CHECK(parse({"--inventory", "--driver", "/d"}).inventory);
  CHECK(parse({"--driver", "/d"}).driver == "/d");
  CHECK(parse({"--warm-context", "3"}).warmDevice == 3);
  CHECK(parse({}).warmDevice == -1);
  CHECK(parse({"--disturb", "3"}).disturb == 3);
  CHECK_FALSE(parse({"--disturb", "3"}).disturbMoves);
  CHECK(parse({"--disturb-moves", "4"}).disturb == 4);
  CHECK(parse({"--disturb-moves", "4"}).disturbMoves);
  CHECK_FALSE(parse({"--disturb-moves", "4"}).disturbStreams);
  CHECK(parse({"--disturb-streams", "5"}).disturb == 5);
  CHECK(parse({"--disturb-streams", "5"}).disturbStreams);
  CHECK_THROWS_WITH(parse({"--driver"}), "--driver needs a value");
  CHECK_THROWS_WITH(parse({"--warm-context", "x"}), "--warm-context: 'x' is no device ordinal");
  CHECK_THROWS_WITH(parse({"--turbo"}), "unknown argument '--turbo'");
}
