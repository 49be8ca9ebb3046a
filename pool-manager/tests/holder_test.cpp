// The holder between an application and the pool, all on one event loop: a Service, a server that speaks the
// handshake, and a socket as the client library would hold it.
#include "pool-manager/cli/holder.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "base/descriptor_passing.h"
#include "catch.h"
#include "fake_server.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/convert.h"
#include "pool-manager/service.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::cli;
using namespace gpupool::pool;
using namespace gpupool::test;
using holder::OpenReply;
using holder::OpenRequest;
using holder::Status;

namespace {

struct Opened {
  OpenReply reply;
  kj::AutoCloseFd session;
  bool answered = false;
};

bool connectTo(int socket, const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  return ::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
}

struct Fixture {
  Fixture()
      : io(kj::setupAsyncIo()),
        store(makeMemoryStore()),
        address("unix:" + folder.path + "/manager"),
        server(kj::heap<FakeServer>(io, "a", 2, folder.path + "/server")) {
    settings.addresses = {address};
    settings.request.holder = "tester";
    settings.request.ttlMs = 1000;
    settings.connectLimit = 500 * kj::MILLISECONDS;
    settings.sessionLimit = 500 * kj::MILLISECONDS;
  }
  void startManager() {
    PoolTimes times;
    times.beatMs = 100;
    ServiceLimits limits;
    limits.tick = 10 * kj::MILLISECONDS;
    limits.call = 500 * kj::MILLISECONDS;
    service = kj::heap<Service>(io.provider->getTimer(), *store, times, limits, bootTimeMs);
    ::unlink((folder.path + "/manager").c_str());
    auto parsed = io.provider->getNetwork().parseAddress(address.c_str()).wait(io.waitScope);
    service->serve(parsed->listen(), true);
    housekeeping = service->run().eagerlyEvaluate(nullptr);
  }
  void stopManager() {
    housekeeping = nullptr;
    service = nullptr;
  }
  void startAll() {
    startManager();
    server->join(address);
    server->joined().wait(io.waitScope);
  }
  void makeHolder() {
    holder =
        kj::heap<Holder>(*io.provider, io.unixEventPort, settings,
                         [this](const std::string& why, bool told) { lost = why + (told ? " (told)" : ""); });
    int pair[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    application = kj::AutoCloseFd(pair[0]);
    serving = holder->serve(kj::AutoCloseFd(pair[1])).eagerlyEvaluate(nullptr);
  }
  void pause(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }

  // Sends as the client library would, and pumps the loop until the reply is there.
  Opened open(OpenRequest request) { return send(&request, sizeof request); }
  Opened send(const void* data, size_t size) {
    REQUIRE(::send(application, data, size, 0) == static_cast<ssize_t>(size));
    Opened opened;
    for (int i = 0; i < 300 && !opened.answered; ++i) {
      pause(10);
      receive(opened);
    }
    return opened;
  }
  void receive(Opened& opened) {
    const auto received = receiveWithDescriptors(
        application, std::as_writable_bytes(std::span(&opened.reply, 1)), MSG_DONTWAIT);
    if (received.bytes < 0) return;
    CHECK(received.bytes == sizeof opened.reply);
    opened.answered = true;
    if (!received.descriptors.empty()) opened.session = kj::AutoCloseFd(received.descriptors[0]);
  }
  static OpenRequest request(uint64_t rows = 0x1234) {
    OpenRequest one;
    one.rowsHash = rows;
    one.pid = ::getpid();
    std::strcpy(one.command, "test");
    return one;
  }

  Folder folder;
  kj::AsyncIoContext io;
  std::unique_ptr<Store> store;
  std::string address, lost;
  kj::Own<FakeServer> server;
  kj::Own<Service> service;
  kj::Promise<void> housekeeping = nullptr;
  HolderSettings settings;
  kj::Own<Holder> holder;
  kj::AutoCloseFd application;
  kj::Promise<void> serving = nullptr;
};

}  // namespace

TEST_CASE_METHOD(Fixture, "an application gets a session's socket, proven on both sides") {
  startAll();
  settings.request.deviceCount = 2;
  settings.networkDevice = "mlx5_0:1";
  makeHolder();
  CHECK(server->leases.empty());  // leased at the first request, not before
  const Opened opened = open(request());
  REQUIRE(opened.answered);
  INFO(opened.reply.text);
  REQUIRE(opened.reply.status == Status::ok);
  CHECK(opened.reply.deviceCount == 2);
  CHECK(opened.reply.epoch == 1);
  CHECK(std::string(opened.reply.transport) == "shm");
  CHECK(std::string(opened.reply.server) == "a");
  CHECK(std::string(opened.reply.networkDevice) == "mlx5_0:1");
  CHECK((opened.reply.sessionHigh | opened.reply.sessionLow) != 0);
  // The very socket that the server goes on with, in blocking mode.
  REQUIRE(opened.session.get() >= 0);
  CHECK((::fcntl(opened.session, F_GETFL) & O_NONBLOCK) == 0);
  REQUIRE(::write(opened.session, "x", 1) == 1);
  pause(20);
  char greeting[8] = {};
  CHECK(::recv(opened.session, greeting, sizeof greeting, MSG_DONTWAIT) == 5);
  CHECK(std::string(greeting) == "hello");

  const Opened second = open(request());
  CHECK(second.reply.status == Status::ok);
  CHECK(second.reply.sessionLow != opened.reply.sessionLow);
  CHECK(server->leases.size() == 1);
  CHECK(server->sessions == 2);
}

TEST_CASE_METHOD(Fixture, "a session that moves is opened by its own id, with its next epoch") {
  startAll();
  makeHolder();
  const Opened first = open(request());
  REQUIRE(first.reply.status == Status::ok);
  OpenRequest next = request();
  next.sessionHigh = first.reply.sessionHigh;
  next.sessionLow = first.reply.sessionLow;
  next.epoch = 2;
  std::strcpy(next.transport, "shm");
  const Opened moved = open(next);
  INFO(moved.reply.text);
  REQUIRE(moved.reply.status == Status::ok);
  CHECK(moved.session.get() >= 0);
  CHECK(moved.reply.sessionHigh == first.reply.sessionHigh);
  CHECK(moved.reply.sessionLow == first.reply.sessionLow);
  CHECK(moved.reply.epoch == 2);
  CHECK(server->lastSession == Id{first.reply.sessionHigh, first.reply.sessionLow});
  CHECK(server->lastEpoch == 2);
  CHECK(server->leases.size() == 1);
}

TEST_CASE_METHOD(Fixture, "a session that moves neither waits for its lease nor gets another one") {
  startAll();
  makeHolder();
  OpenRequest next = request();
  next.sessionLow = 7;
  next.epoch = 3;
  std::strcpy(next.transport, "shm");
  const Opened without = open(next);
  CHECK(without.reply.status == Status::leaseEnded);
  CHECK(without.reply.sessionLow == 7);
  CHECK(without.reply.epoch == 3);
  CHECK(server->leases.empty());

  REQUIRE(open(request()).reply.status == Status::ok);
  server->sessionsSuspended = true;
  const Opened suspended = open(next);
  CHECK(suspended.reply.status == Status::serverLost);
  CHECK(suspended.reply.epoch == 3);
  CHECK(server->toldSuspended == 1);

  for (const uint64_t epoch : {0, 1}) {
    next.epoch = epoch;
    CHECK(open(next).reply.status == Status::refused);
  }
  next.epoch = 2;
  next.transport[0] = 0;
  CHECK(open(next).reply.status == Status::refused);
  next = request();
  next.epoch = 2;
  CHECK(open(next).reply.status == Status::refused);
}

namespace {

// With a lease on server a, a session of it, and another server.
struct Moves : Fixture {
  explicit Moves(kj::Duration placesLimit = 20 * kj::SECONDS)
      : other(kj::heap<FakeServer>(io, "b", 2, folder.path + "/other")) {
    settings.placesLimit = placesLimit;
    settings.placesPause = 20 * kj::MILLISECONDS;
    startAll();
    makeHolder();
    const Opened first = open(request());
    REQUIRE(first.reply.status == Status::ok);
    next = request();
    next.sessionHigh = first.reply.sessionHigh;
    next.sessionLow = first.reply.sessionLow;
    next.epoch = 2;
    std::strcpy(next.transport, "shm");
    other->join(address);
    other->joined().wait(io.waitScope);
  }
  // Why not; "": it has moved to b.
  std::string migrate() {
    auto connection = connectManager(*io.provider, address, 2 * kj::SECONDS).wait(io.waitScope);
    auto call = connection->manager().migrateRequest();
    pool::write(holder->lease()->id, call.initId());
    call.initTo().setServer("b");
    KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() {
                   io.provider->getTimer().timeoutAfter(10 * kj::SECONDS, call.send()).wait(io.waitScope);
                 }))
      return errorText(*error);
    return "";
  }
  // On a and b.
  void moveSome() {
    server->refuseMigrate = "a capture is open";
    other->living = {holder->lease()->id};
    REQUIRE(contains(migrate(), "may have sessions in both places"));
    server->refuseMigrate.clear();
  }
  Opened at(const char* name, const OpenRequest& wanted) {
    Opened opened = open(wanted);
    INFO(opened.reply.text);
    CHECK(opened.reply.status == Status::ok);
    CHECK(std::string(opened.reply.server) == name);
    return opened;
  }

  kj::Own<FakeServer> other;
  OpenRequest next;
};

struct MovesAlone : Moves {
  MovesAlone() : Moves(1 * kj::SECONDS) {}
};

}  // namespace

TEST_CASE_METHOD(Moves, "a session that moves is opened where its lease is going, a new one where it was") {
  moveSome();
  const Opened moved = at("b", next);
  CHECK(other->lastSession == Id{next.sessionHigh, next.sessionLow});
  CHECK(other->lastEpoch == 2);
  CHECK(moved.reply.epoch == 2);
  CHECK(moved.session.get() >= 0);
  at("a", request());
  other->refuseSessions = "it does not arrive here";
  at("a", next);
  other->refuseSessions.clear();

  CHECK(migrate() == "");  // goes on
  for (int i = 0; i < 400 && !server->leases.empty(); ++i) pause(10);
  CHECK(std::string(holder->lease()->server.name) == "a");
  at("b", request());  // a knows it no longer
  CHECK(std::string(holder->lease()->server.name) == "b");
  const uint32_t sessions = other->sessions;
  at("b", request());
  CHECK(other->sessions == sessions + 1);
  CHECK(lost.empty());
}

TEST_CASE_METHOD(Moves, "a new session begins where the lease is going when its server is away") {
  moveSome();
  server = nullptr;
  ::unlink((folder.path + "/server").c_str());
  at("b", request());
}

TEST_CASE_METHOD(MovesAlone, "without the manager a session does not move, and others begin") {
  moveSome();
  stopManager();
  const Opened opened = open(next);
  CHECK(opened.reply.status == Status::noManager);
  CHECK(contains(opened.reply.text, "the session cannot move: the manager does not say where to: "));
  CHECK(opened.reply.epoch == 2);
  CHECK(other->sessions == 0);
  at("a", request());
  startManager();  // a connection that is no more is made again
  Opened moved = open(next);
  for (int i = 0; i < 20 && moved.reply.status != Status::ok; ++i) moved = open(next);
  CHECK(std::string(moved.reply.server) == "b");
}

TEST_CASE_METHOD(Fixture, "the end of the application's socket ends the service, and release frees") {
  startAll();
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  application = nullptr;
  serving.wait(io.waitScope);
  holder->release().wait(io.waitScope);
  CHECK(server->leases.empty());
  CHECK(service->pool().leases().empty());
}

TEST_CASE_METHOD(Fixture, "no manager: every address that was tried, and what to do") {
  settings.addresses = {address, "unix:/nonexistent/manager"};
  makeHolder();
  const Opened opened = open(request());
  CHECK(opened.reply.status == Status::noManager);
  const std::string text = opened.reply.text;
  CHECK(text.find("no pool manager is reachable (tried " + address + ": ") == 0);
  CHECK(contains(text, "unix:/nonexistent/manager"));
  CHECK(contains(text, "gpupool up"));
  CHECK_FALSE(contains(text, "\n"));
  startAll();  // the next attempt is a fresh one
  CHECK(open(request()).reply.status == Status::ok);
}

TEST_CASE_METHOD(Fixture, "a manager that restarts while a lease is awaited gets the same request again") {
  startManager();
  settings.request.waitMs = 60'000;
  makeHolder();
  auto asked = holder->acquire().eagerlyEvaluate(nullptr);
  pause(100);
  stopManager();
  pause(1200);
  startAll();
  io.provider->getTimer().timeoutAfter(5 * kj::SECONDS, kj::mv(asked)).wait(io.waitScope);
  CHECK(server->leases.size() == 1);
}

TEST_CASE_METHOD(Fixture, "a manager that does not answer is no manager") {
  auto parsed = io.provider->getNetwork().parseAddress(address.c_str()).wait(io.waitScope);
  auto mute = parsed->listen();
  makeHolder();
  const Opened opened = open(request());
  CHECK(opened.reply.status == Status::noManager);
}

TEST_CASE_METHOD(Fixture, "no device: who holds it") {
  startAll();
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  auto other = kj::heap<Holder>(
      *io.provider, io.unixEventPort,
      [&] {
        auto wish = settings;
        wish.request.deviceCount = 2;
        return wish;
      }(),
      [](const std::string&, bool) {});
  KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() { other->acquire().wait(io.waitScope); })) {
    CHECK(toFailure(*error).status == Status::noDevice);
    CHECK(contains(toFailure(*error).text, "held by tester"));
    CHECK(contains(toFailure(*error).text, "--wait"));
    CHECK_FALSE(contains(toFailure(*error).text, "\n"));
  } else {
    FAIL("two devices of one were found");
  }
}

TEST_CASE_METHOD(Fixture, "rows that differ are refused in the server's words") {
  startAll();
  makeHolder();
  const Opened opened = open(request(0x9999));
  CHECK(opened.reply.status == Status::mismatch);
  CHECK(std::string(opened.reply.text) == "server a: rows differ");
  CHECK(opened.session.get() < 0);
  CHECK(open(request()).reply.status == Status::ok);  // the lease is still good
}

TEST_CASE_METHOD(Fixture, "a server that does not know the key is found out") {
  startAll();
  server->forgeProof = true;
  makeHolder();
  const Opened opened = open(request());
  CHECK(opened.reply.status == Status::refused);
  CHECK(contains(opened.reply.text, "does not know this lease's key"));
  CHECK(server->sessions == 0);
}

TEST_CASE_METHOD(Fixture, "a server that went away is a lost server, within the limit") {
  startAll();
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  ::unlink((folder.path + "/server").c_str());
  server = nullptr;
  const Opened opened = open(request());
  CHECK(opened.reply.status == Status::serverLost);
  CHECK(contains(opened.reply.text, "server a at unix:"));
  CHECK(contains(opened.reply.text, "/server: No such file or directory; start the program again"));
}

TEST_CASE_METHOD(Fixture, "a transport that cannot be is refused with the way out") {
  startAll();
  makeHolder();
  auto wish = request();
  std::strcpy(wish.transport, "ucx");
  const Opened opened = open(wish);
  CHECK(opened.reply.status == Status::refused);
  CHECK(contains(opened.reply.text, "--transport ucx"));
  std::strcpy(wish.transport, "pigeon");
  CHECK(contains(open(wish).reply.text, "no transport 'pigeon'"));
  std::memset(wish.transport, 'x', sizeof wish.transport);  // not even terminated
  CHECK(open(wish).reply.status == Status::refused);
}

TEST_CASE_METHOD(Fixture, "malformed requests are answered, not obeyed") {
  startAll();
  makeHolder();
  auto old = request();
  old.version = 9;
  const Opened version = open(old);
  CHECK(version.reply.status == Status::mismatch);
  CHECK(contains(version.reply.text,
                 "speaks holder protocol 9, this gpupool speaks " + std::to_string(holder::kVersion)));
  CHECK(send("short", 5).reply.status == Status::refused);
  CHECK(send(std::string(5000, 'x').data(), 5000).reply.status == Status::refused);
  CHECK(server->leases.empty());
  CHECK(open(request()).reply.status == Status::ok);
}

TEST_CASE_METHOD(Fixture, "the lease is renewed, also while the manager is away and after it has come back") {
  startAll();
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  pause(1800);  // longer than TTL and drift
  CHECK(service->pool().leases().size() == 1);
  stopManager();
  pause(700);
  startManager();
  pause(1900);
  REQUIRE(service->pool().leases().size() == 1);
  CHECK(service->pool().leases().begin()->second.state == LeaseState::active);
  CHECK(lost.empty());
  CHECK(open(request()).reply.status == Status::ok);
}

TEST_CASE_METHOD(Fixture, "a lease that ended is reported, and no session is opened on it") {
  startAll();
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  server->disconnect();
  pause(50);
  server->facts.incarnation = Id::random();  // restarted
  server->leases.clear();
  server->join(address);
  for (int i = 0; i < 1000 && lost.empty(); ++i) pause(10);
  CHECK(lost == "its server a was restarted (told)");
  const Opened opened = open(request());
  CHECK(opened.reply.status == Status::leaseEnded);
  CHECK(contains(opened.reply.text, "its server a was restarted"));
}

TEST_CASE_METHOD(Fixture,
                 "a lease that its server does not know any more has ended, before the manager says so") {
  startAll();
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  server->leases.clear();  // started again, and its sessions' door is open before it has joined
  const Opened opened = open(request());
  CHECK(opened.reply.status == Status::leaseEnded);
  CHECK(contains(opened.reply.text, "server a does not know it any more; start the program again"));
  CHECK(opened.session.get() < 0);
}

TEST_CASE_METHOD(Fixture, "an application hears that its lease is waited for, and then gets it") {
  startAll();
  settings.waitingInterval = 20 * kj::MILLISECONDS;
  settings.request.deviceCount = 2;
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  auto first = kj::mv(holder);
  auto firstSocket = kj::mv(application);
  auto firstServing = kj::mv(serving);
  settings.request.waitMs = 60'000;
  makeHolder();
  const OpenRequest wanted = request();
  for (int heard = 0; heard < 3; ++heard) {
    Opened opened;
    if (heard == 0) opened = send(&wanted, sizeof wanted);
    for (int i = 0; i < 300 && !opened.answered; ++i) {
      pause(10);
      receive(opened);
    }
    REQUIRE(opened.answered);
    CHECK(opened.reply.status == Status::waiting);
  }
  first->release().wait(io.waitScope);
  Opened last;
  for (int i = 0; i < 300 && (!last.answered || last.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(last);
  }
  CHECK(last.reply.status == Status::ok);
  CHECK(last.session.get() >= 0);
  firstServing = nullptr;
}

TEST_CASE_METHOD(Fixture,
                 "while the lease is suspended its server is asked again, and the application told") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  settings.waitingInterval = 50 * kj::MILLISECONDS;
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  Opened told = send(&wanted, sizeof wanted);
  REQUIRE(told.answered);
  CHECK(told.reply.status == Status::waiting);
  REQUIRE(holder->lease() != nullptr);
  CHECK(std::string(told.reply.text) ==
        "the lease is suspended; waiting until it is resumed (gpupool resume " + holder->lease()->id.text() +
            ")");
  // Far beyond sessionLimit, which is for one attempt.
  for (int i = 0; i < 1000 && server->toldSuspended < 40; ++i) pause(10);
  CHECK(server->toldSuspended >= 40);
  server->sessionsSuspended = false;
  Opened last;
  for (int i = 0; i < 1000 && (!last.answered || last.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(last);
  }
  CHECK(last.reply.status == Status::ok);
  CHECK(last.session.get() >= 0);
  CHECK(server->sessions == 1);
}

TEST_CASE_METHOD(Fixture, "a lease that takes turns may only wait for its turn, and asks often enough") {
  server->facts.overcommitPercent = 200;
  startAll();
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  const Opened told = send(&wanted, sizeof wanted);
  CHECK(told.reply.status == Status::waiting);
  REQUIRE(holder->lease() != nullptr);
  CHECK(
      std::string(told.reply.text) ==
      "the lease's memory is off its GPUs; waiting for its turn, or, if it is suspended, until it is resumed "
      "(gpupool resume " +
          holder->lease()->id.text() + ")");
  // In 250 ms for the first time, and then more and more rarely.
  const kj::Timer& timer = io.provider->getTimer();
  kj::TimePoint last = timer.now();
  const kj::TimePoint first = last;
  kj::Duration longest = 0 * kj::SECONDS;
  uint32_t asked = server->toldSuspended;
  while (server->toldSuspended < 9 && timer.now() < first + 60 * kj::SECONDS) {
    pause(10);
    if (server->toldSuspended == asked) continue;
    asked = server->toldSuspended;
    longest = kj::max(longest, timer.now() - last);
    last = timer.now();
  }
  CHECK(asked >= 9);
  CHECK(last - first > 3 * kj::SECONDS);  // 8 times 250 ms were 2 s
  CHECK(longest > 500 * kj::MILLISECONDS);
  server->sessionsSuspended = false;
  Opened opened;
  for (int i = 0; i < 1000 && (!opened.answered || opened.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(opened);
  }
  CHECK(opened.reply.status == Status::ok);
}

TEST_CASE_METHOD(Fixture, "an application that is gone is waited for no longer") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  REQUIRE(send(&wanted, sizeof wanted).answered);
  application = nullptr;
  serving.wait(io.waitScope);
  const uint32_t asked = server->toldSuspended;
  pause(200);
  CHECK(server->toldSuspended == asked);
}

TEST_CASE_METHOD(Fixture, "the held session of an application that is gone is taken when it is restored") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  makeHolder();
  const Opened first = open(request());
  REQUIRE(first.reply.status == Status::ok);
  server->sessionsSuspended = true;
  OpenRequest next = request();
  next.left = 1;
  next.sessionHigh = first.reply.sessionHigh;
  next.sessionLow = first.reply.sessionLow;
  next.epoch = 2;
  std::strcpy(next.transport, "shm");
  REQUIRE(open(next).reply.status == Status::waiting);
  application = nullptr;
  serving.wait(io.waitScope);  // its own holder would give the lease back now
  const uint32_t asked = server->toldSuspended;
  for (int i = 0; i < 1000 && server->toldSuspended < asked + 3; ++i) pause(10);
  CHECK(server->toldSuspended >= asked + 3);
  server->sessionsSuspended = false;
  for (int i = 0; i < 1000 && server->sessions < 2; ++i) pause(10);
  CHECK(server->sessions == 2);
  pause(200);
  CHECK(server->sessions == 2);  // once
}

TEST_CASE_METHOD(Fixture, "a suspended lease that ends is waited for no longer") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  REQUIRE(send(&wanted, sizeof wanted).answered);
  server->disconnect();
  pause(50);
  server->facts.incarnation = Id::random();  // restarted
  server->muteRevokes = true;                // and its sessions' door knows the lease still
  server->join(address);
  Opened last;
  for (int i = 0; i < 1000 && (!last.answered || last.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(last);
  }
  CHECK(last.reply.status == Status::leaseEnded);
}

TEST_CASE_METHOD(Fixture, "several applications share one listening holder") {
  startAll();
  makeHolder();
  const std::string path = folder.path + "/holder";
  kj::AutoCloseFd listening(listenForApplications(path));
  auto accepting = holder->listen(listening).eagerlyEvaluate(nullptr);
  for (int i = 0; i < 3; ++i) {
    application = kj::AutoCloseFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    REQUIRE(connectTo(application, path));
    CHECK(open(request()).reply.status == Status::ok);
  }
  CHECK(server->sessions == 3);
  CHECK(server->leases.size() == 1);
}

TEST_CASE_METHOD(Fixture, "the listening holder turns other users away") {
  if (::geteuid() != 0) return;  // only root can play another user
  startAll();
  makeHolder();
  const std::string path = folder.path + "/holder";
  kj::AutoCloseFd listening(listenForApplications(path));
  REQUIRE(::chmod(folder.path.c_str(), 0711) == 0);
  REQUIRE(::chmod(path.c_str(), 0666) == 0);
  auto accepting = holder->listen(listening).eagerlyEvaluate(nullptr);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (::setuid(65534) != 0 || !connectTo(socket, path)) ::_exit(1);
    pollfd wait{socket, POLLIN, 0};
    char byte;
    ::_exit(::poll(&wait, 1, 3000) == 1 && ::recv(socket, &byte, 1, 0) <= 0 ? 0 : 2);
  }
  int status = -1;
  for (int i = 0; i < 400 && ::waitpid(stranger, &status, WNOHANG) == 0; ++i) pause(10);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(server->leases.empty());
}
