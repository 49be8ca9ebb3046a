// A worker whose server dies, and the server's next life, which comes to its door.
#include <fcntl.h>
#include <sys/un.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "schema/convert.h"
#include "server/front/doors.h"
#include "server/tests/worker_process_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

struct Folder {
  Folder() {
    char name[] = "/tmp/gpupool-doors-XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// A worker with a door, and what its session's start has of it.
struct Visited {
  Folder folder;
  Doors doors{folder.path + "/" + std::string(120, 'd')};  // longer than a socket's address
  Worker worker;
  int client = -1, workersClient = -1;

  // rebuilds: from what its server has of it, and without a client.
  explicit Visited(const std::function<int(WorkerProcess&)>& body, uint32_t awayMs = 60'000,
                   bool rebuilds = false)
      : worker(body) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    client = ends[0];
    workersClient = ends[1];
    capnp::MallocMessageBuilder message;
    auto start = message.initRoot<schema::WorkerOrder>().initStart();
    start.initSession().setHigh(1);
    start.setEpoch(3);
    start.setTransport("shm");
    start.initDevices(2);
    auto kinds = start.initDescriptors(2);
    kinds.set(0, rebuilds ? schema::Descriptor::STATE : schema::Descriptor::CLIENT_SOCKET);
    start.setRebuild(rebuilds);
    start.setStream(rebuilds);
    start.setFiles(rebuilds);
    kinds.set(1, schema::Descriptor::DOOR);
    start.setAwayMs(awayMs);
    const kj::AutoCloseFd door = doors.make(worker.pid);
    REQUIRE(door.get() >= 0);
    const int descriptors[] = {ends[1], door.get()};
    worker.send(message, descriptors);
  }
  ~Visited() {
    close(client);
    if (workersClient >= 0) close(workersClient);
  }
  // The server dies, and its next life knocks, with an order for that session.
  void returnAs(Id session, uint64_t epoch, bool takesShares = true, bool held = false,
                bool takesWaiting = true) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    worker.socket = ends[0];
    Worker::serverEnds().insert(ends[0]);
    capnp::MallocMessageBuilder message;
    auto order = message.initRoot<schema::WorkerOrder>().initReadopt();
    schema::write(session, order.initSession());
    order.setEpoch(epoch);
    order.setShares(takesShares);
    order.setHeld(held);
    order.setWaits(takesWaiting);
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = words.asBytes();
    CHECK(doors.knock(worker.pid, std::as_bytes(std::span(bytes.begin(), bytes.size())), ends[1]) == 0);
    close(ends[1]);
  }
  // What it says of its memory being with the copier; "" if it does not come.
  std::string state() {
    capnp::word buffer[1024];
    const auto received = receiveWithDescriptors(worker.socket, std::as_writable_bytes(std::span(buffer)));
    for (int one : received.descriptors) close(one);
    if (received.bytes <= 0) return "";
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(buffer, static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    const auto said = reader.getRoot<schema::WorkerReport>().getReadopted();
    if (said.getChanging()) return "changing";
    if (!said.hasSuspended()) return "here";
    std::string text = said.getSuspended().getSuspended() ? "suspended" : "nonsense";
    for (const uint64_t kept : said.getSuspended().getKept()) text += " " + std::to_string(kept);
    return text + " of " + std::to_string(said.getSuspended().getMovedBytes());
  }
  // It is back, and has no client yet.
  bool waits() {
    capnp::word buffer[1024];
    const auto received = receiveWithDescriptors(worker.socket, std::as_writable_bytes(std::span(buffer)));
    if (received.bytes <= 0 || !received.descriptors.empty()) return false;
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(buffer, static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    return reader.getRoot<schema::WorkerReport>().getReadopted().getWaits();
  }
  void orderToSuspend() {
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().initSuspend().setDrainMs(1000);
    worker.send(message, client);  // any descriptor
  }
  void orderToResume() {
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().setResume();
    worker.send(message);
  }
  // What it says it has of each device; empty: it does not come.
  std::vector<uint64_t> taken() {
    capnp::word buffer[1024];
    const auto received = receiveWithDescriptors(worker.socket, std::as_writable_bytes(std::span(buffer)));
    for (int one : received.descriptors) close(one);
    if (received.bytes <= 0) return {};
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(buffer, static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    const auto report = reader.getRoot<schema::WorkerReport>();
    REQUIRE(report.isReadopted());
    CHECK(received.descriptors.size() == 1);  // its client's socket
    std::vector<uint64_t> all;
    for (const uint64_t one : report.getReadopted().getTaken()) all.push_back(one);
    return all;
  }
  void grant(const Worker::Memory& request) {
    capnp::MallocMessageBuilder message;
    auto answer = message.initRoot<schema::WorkerOrder>().initMemory();
    answer.setTicket(request.ticket);
    answer.setGranted(true);
    worker.send(message);
  }
};

}  // namespace

TEST_CASE(
    "a session goes on under its server's next life, and what it has told, taken and asked for counts") {
  Visited visited([](WorkerProcess& process) {
    if (!process.waitForSession()) return 1;
    process.watchServer([](const std::string&) { _exit(40); });
    if (!process.takeMemory(0, 100).granted || !process.takeMemory(1, 30).granted) return 2;
    process.inheritMemory(1, 7);
    process.giveMemory(0, 40);
    process.reportEnded("ready");
    // Asked of a server that does not answer any more: granted by the next one.
    if (!process.takeMemory(0, 1000).granted) return 3;
    process.giveMemory(0, 1);
    process.reportEnded("done");
    return 0;
  });
  visited.grant(visited.worker.memory());
  visited.grant(visited.worker.memory());
  CHECK(visited.worker.memory().give == 40);
  CHECK(visited.worker.report() == "ended: ready");
  CHECK(visited.worker.memory().take == 1000);
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3);
  CHECK(visited.taken() == std::vector<uint64_t>{60, 37});
  const auto again = visited.worker.memory();
  CHECK(again.take == 1000);
  CHECK(again.give == 0);
  // It dies before it answers.
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3);
  CHECK(visited.taken() == std::vector<uint64_t>{60, 37});
  visited.grant(visited.worker.memory());
  CHECK(visited.worker.memory().give == 1);
  CHECK(visited.worker.report() == "ended: done");
  CHECK(visited.worker.wait() == 0);
}

namespace {

// A server's part in what a session shares.
struct Sharing {
  Visited& visited;

  // Answers the next request, as an offer of that key or as an opening; with a receipt unless it is empty.
  void answer(uint64_t key, uint64_t opening, const std::string& receipt) const {
    capnp::word buffer[1024];
    const auto received =
        receiveWithDescriptors(visited.worker.socket, std::as_writable_bytes(std::span(buffer)));
    for (int one : received.descriptors) close(one);
    REQUIRE(received.bytes > 0);
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(buffer, static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    capnp::MallocMessageBuilder message;
    auto answer = message.initRoot<schema::WorkerOrder>().initShare();
    answer.setTicket(reader.getRoot<schema::WorkerReport>().getShare().getTicket());
    answer.initKey().initKey().setLow(key);
    answer.setOpening(opening);
    answer.setReceipt({reinterpret_cast<const kj::byte*>(receipt.data()), receipt.size()});
    visited.worker.send(message);
  }
  // What it says again: "piece RECEIPT", with "+" behind it where its descriptor came, "offer KEY of PIECE at
  // OFFSET", "opening NUMBER RECEIPT". Anything else: what it is.
  std::string again() const {
    capnp::word buffer[1024];
    const auto received =
        receiveWithDescriptors(visited.worker.socket, std::as_writable_bytes(std::span(buffer)));
    const bool hasDescriptor = !received.descriptors.empty();
    for (int one : received.descriptors) close(one);
    if (received.bytes <= 0) return "nothing";
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(buffer, static_cast<size_t>(received.bytes) / sizeof(capnp::word)));
    const auto report = reader.getRoot<schema::WorkerReport>();
    if (report.isReadopted()) return std::to_string(report.getReadopted().getShares()) + " follow";
    if (report.isEnded()) return report.getEnded();
    if (!report.isShare() || !report.getShare().isAgain()) return "something else";
    const auto again = report.getShare().getAgain();
    const std::string receipt(reinterpret_cast<const char*>(again.getReceipt().begin()),
                              again.getReceipt().size());
    if (again.getOpening() != 0) return "opening " + std::to_string(again.getOpening()) + " " + receipt;
    if (!receipt.empty()) return "piece " + receipt + (hasDescriptor ? "+" : "");
    return "offer " + std::to_string(again.getKey().getKey().getLow()) + " of " +
           std::to_string(again.getPiece()) + " at " + std::to_string(again.getOffset());
  }
};

}  // namespace

TEST_CASE("the next server hears what a session shares still, with the receipts of the last one") {
  using What = ShareReport::What;
  int gate[2], told[2];
  REQUIRE(pipe2(gate, O_CLOEXEC) == 0);
  REQUIRE(pipe2(told, O_CLOEXEC) == 0);
  Visited visited([&](WorkerProcess& process) {
    if (!process.waitForSession()) return 1;
    process.watchServer([](const std::string&) { _exit(40); });
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const auto offers = [&](uint64_t piece, uint64_t offset) {
      return process.share({What::offer, {piece, 0, 64, offset, 8}, {}, 0}, null).error ==
             ShareAnswer::Error::none;
    };
    const auto opens = [&] {
      return process.share({What::open, {}, {}, 0}).error == ShareAnswer::Error::none;
    };
    if (!offers(1, 0) || !offers(1, 8) || !offers(2, 16) || !offers(3, 24)) return 2;
    if (!opens() || !opens()) return 3;
    close(null);
    process.tellShare({What::endOffer, {}, {{}, {0, 11}}, 0});
    process.tellShare({What::endPiece, {}, {}, 3});
    process.tellShare({What::close, {}, {}, 21});
    process.reportEnded("ready");
    char go;
    if (read(gate[0], &go, 1) != 1) return 4;  // there is no server now
    process.tellShare({What::endPiece, {}, {}, 2});
    if (write(told[1], "x", 1) != 1) return 5;
    for (;;) sleep(1);
    return 0;
  });
  const Sharing sharing{visited};
  sharing.answer(11, 0, "one");
  sharing.answer(12, 0, "one");
  sharing.answer(13, 0, "two");
  sharing.answer(14, 0, "three");
  sharing.answer(0, 21, "others");
  sharing.answer(0, 22, "others");
  for (int i = 0; i < 3; ++i) CHECK(sharing.again() == "something else");  // what has ended
  CHECK(sharing.again() == "ready");
  for (int life = 0; life < 2; ++life) {
    visited.worker.hangUp();
    visited.returnAs({1, 0}, 3);
    CHECK(sharing.again() == "5 follow");
    CHECK(sharing.again() == "piece one+");
    CHECK(sharing.again() == "piece two+");
    CHECK(sharing.again() == "offer 12 of 1 at 8");
    CHECK(sharing.again() == "offer 13 of 2 at 16");
    CHECK(sharing.again() == "opening 22 others");
  }
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3, false);
  CHECK(sharing.again() == "nothing");  // that one would not know what is shared
  visited.worker.hangUp();
  REQUIRE(write(gate[1], "x", 1) == 1);
  char go;
  REQUIRE(read(told[0], &go, 1) == 1);
  visited.returnAs({1, 0}, 3);
  CHECK(sharing.again() == "3 follow");
  for (const int end : {gate[0], gate[1], told[0], told[1]}) close(end);
}

TEST_CASE("a session that shares by a server that gives no receipts ends with that") {
  Visited visited([](WorkerProcess& process) {
    if (!process.waitForSession()) return 1;
    process.watchServer([](const std::string& said) {
      _exit(said.ends_with("does not outlive it: it shares memory or events with other processes") ? 41 : 42);
    });
    process.share({ShareReport::What::open, {}, {}, 0});
    for (;;) sleep(1);
    return 0;
  });
  Sharing{visited}.answer(0, 1, "");
  visited.worker.hangUp();
  CHECK(visited.worker.wait() == 41);
}

TEST_CASE("what comes to a door and is no server of the session changes nothing") {
  Visited visited([](WorkerProcess& process) {
    if (!process.waitForSession()) return 1;
    process.watchServer([](const std::string&) { _exit(40); });
    return process.takeMemory(0, 5).granted ? 0 : 2;
  });
  CHECK(visited.worker.memory().take == 5);
  visited.worker.hangUp();
  for (const auto& [session, epoch] : {std::pair(Id{1, 1}, uint64_t{3}), std::pair(Id{1, 0}, uint64_t{2})}) {
    visited.returnAs(session, epoch);
    CHECK(visited.taken().empty());
    visited.worker.hangUp();
  }
  const std::string nonsense(64, 'x');
  CHECK(visited.doors.knock(visited.worker.pid, std::as_bytes(std::span(nonsense)), visited.client) == 0);
  visited.returnAs({1, 0}, 3);
  CHECK(visited.taken() == std::vector<uint64_t>{0, 0});
  visited.grant(visited.worker.memory());
  CHECK(visited.worker.wait() == 0);
}

TEST_CASE("a server that does not come back in time, or whose session cannot wait, ends the session") {
  static std::string reason;
  const auto body = [](const std::string& why, const std::string& expected) {
    return [why, expected](WorkerProcess& process) {
      if (!process.waitForSession()) return 1;
      process.onOrders({.suspend = {}, .resume = {}, .stays = [why] { return why; }});
      process.watchServer([expected](const std::string& said) { _exit(said == expected ? 41 : 42); });
      for (;;) sleep(1);
      return 0;
    };
  };
  Visited late(body("",
                    "the GPU server died: its process was killed or crashed, and was not started again "
                    "within 50 ms"),
               50);
  Visited aside(body("it is being moved",
                     "the GPU server died: its process was killed or crashed, and its session "
                     "does not outlive it: it is being moved"));
  Visited none(body("", "the GPU server died: its process was killed or crashed"), 0);
  for (Visited* one : {&late, &aside, &none}) {
    one->worker.hangUp();
    CHECK(one->worker.wait() == 41);
  }
}

TEST_CASE(
    "the next server hears where a session's memory is, and what has come of an order of the last one") {
  int gate[2];
  REQUIRE(pipe2(gate, O_CLOEXEC) == 0);
  Visited visited([&](WorkerProcess& process) {
    if (!process.waitForSession()) return 1;
    static std::atomic<int> orders{0};
    process.onOrders({.suspend =
                          [](auto, int copier) {
                            close(copier);
                            ++orders;
                          },
                      .resume = [] { ++orders; }});
    process.watchServer([](const std::string&) { _exit(40); });
    SuspendOutcome outcome;
    outcome.suspended = true;
    outcome.kept = {5, 0};
    outcome.movedBytes = 77;
    while (orders < 1) usleep(1000);
    process.reportSuspended(outcome);
    while (orders < 2) usleep(1000);
    char go;
    if (read(gate[0], &go, 1) != 1) return 2;
    process.reportSuspended({});
    for (;;) sleep(1);
    return 0;
  });
  visited.orderToSuspend();
  CHECK(visited.worker.report() == "suspended");
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3);
  CHECK(visited.state() == "suspended 5 0 of 77");
  visited.orderToResume();
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3);
  CHECK(visited.state() == "changing");
  REQUIRE(write(gate[1], "x", 1) == 1);
  CHECK(visited.worker.report() == "not suspended");
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3);
  CHECK(visited.state() == "here");
  for (const int end : gate) close(end);
}

TEST_CASE("SIGTERM and the client's end still end a session that waits for a server") {
  const auto body = [](WorkerProcess& process) {
    const auto start = process.waitForSession();
    if (!start) return 1;
    process.watchServer(
        [](const std::string& why) { _exit(why == "the GPU server is shutting down" ? 41 : 42); },
        std::chrono::milliseconds(100), start->socket);
    for (;;) sleep(1);
    return 0;
  };
  Visited told(body), left(body);
  for (Visited* one : {&told, &left}) one->worker.hangUp();
  usleep(50'000);
  kill(told.worker.pid, SIGTERM);
  CHECK(told.worker.wait() == 41);
  close(std::exchange(left.workersClient, -1));
  shutdown(left.client, SHUT_RDWR);
  CHECK(left.worker.wait() == WorkerProcess::kExitStopped);
}

TEST_CASE("a worker reaches nobody by its door") {
  Folder folder;
  const Doors doors(folder.path + "/doors");
  const kj::AutoCloseFd own = doors.make(1), other = doors.make(2);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "%s/doors/2", folder.path.c_str());
  const auto* to = reinterpret_cast<const sockaddr*>(&address);
  CHECK(sendto(own, "x", 1, MSG_NOSIGNAL, to, sizeof address) < 0);
  CHECK(errno == EPIPE);
  const bool joined = connect(own, to, sizeof address) == 0;
  CHECK(send(own, "x", 1, MSG_NOSIGNAL) < 0);
  CHECK(joined);
  char byte;
  CHECK(recv(other, &byte, 1, MSG_DONTWAIT) < 0);
  CHECK((std::filesystem::status(folder.path + "/doors").permissions() & std::filesystem::perms::all) ==
        std::filesystem::perms::owner_all);
  {
    const auto name = doors.nameOf(2);
  }
  CHECK(doors.knock(2, {}, 0) != 0);
  doors.sweep({});
  CHECK(std::filesystem::is_empty(folder.path + "/doors"));
}

TEST_CASE(
    "a session whose lease is held in files goes there if it was about to, and its worker says no else") {
  const bool goes = GENERATE(false, true);
  Visited visited([goes](WorkerProcess& process) {
    if (!process.waitForSession()) return 1;
    process.onOrders({.suspend = {}, .resume = {}, .decided = [goes](bool held) { return !held || goes; }});
    process.watchServer([](const std::string&) { _exit(40); });
    for (;;) sleep(1);
    return 0;
  });
  for (int life = 0; life < 2; ++life) {
    visited.worker.hangUp();
    visited.returnAs({1, 0}, 3, true, true);
    if (!goes) CHECK(visited.taken().empty());
  }
  // It has said nothing, and follows that server.
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3);
  CHECK(visited.taken() == std::vector<uint64_t>{0, 0});
}

TEST_CASE("a session that waits for its client when its server dies waits for it under the next one") {
  Visited visited(
      [](WorkerProcess& process) {
        const auto start = process.waitForSession();
        if (!start || !start->files) return 1;
        process.watchServer([](const std::string&) { _exit(40); });
        process.reportEnded("ready");
        if (!process.waitForClient(std::chrono::seconds(60))) return 2;
        if (!process.outlivesServer()) return 3;
        process.reportEnded("came");
        for (;;) sleep(1);
        return 0;
      },
      60'000, true);
  CHECK(visited.worker.report() == "ended: ready");
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3, true, false,
                   false);  // of an earlier build: it would take a lock for the client
  CHECK_FALSE(visited.waits());
  for (int life = 0; life < 2; ++life) {
    visited.worker.hangUp();
    visited.returnAs({1, 0}, 3);
    CHECK(visited.waits());
  }
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setClient();
  visited.worker.send(message, visited.client);
  CHECK(visited.worker.report() == "ended: came");
  visited.worker.hangUp();
  visited.returnAs({1, 0}, 3);
  CHECK(visited.taken() == std::vector<uint64_t>{0, 0});  // with its client
}
