// The holder, when sessions move.
#include <netinet/in.h>

#include "holder_fixture.h"

using namespace gpupool;
using namespace gpupool::cli;
using namespace gpupool::pool;
using namespace gpupool::test;
using holder::OpenRequest;
using holder::Status;

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
  explicit Moves(const std::function<void(Moves&)>& prepare = [](Moves&) {})
      : other(kj::heap<FakeServer>(io, "b", 2, folder.path + "/other")) {
    settings.placesLimit = 20 * kj::SECONDS;
    settings.placesPause = 20 * kj::MILLISECONDS;
    prepare(*this);
    startAll();
    makeHolder();
    next = request();
    std::strcpy(next.transport, "shm");
    const Opened first = open(next);
    REQUIRE(first.answered);
    REQUIRE(first.reply.status == Status::ok);
    next.sessionHigh = first.reply.sessionHigh;
    next.sessionLow = first.reply.sessionLow;
    next.epoch = 2;
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
  MovesAlone() : Moves([](Moves& it) { it.settings.placesLimit = 1 * kj::SECONDS; }) {}
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

TEST_CASE_METHOD(Moves, "a session that waits for its lease hears at once that it has ended") {
  service->pool().drop({}, holder->lease()->id, service->now());
  next.left = 1;
  const Opened over = open(next);
  CHECK(over.reply.status == Status::leaseEnded);
  CHECK(contains(over.reply.text, "the lease has ended: somebody has released it"));
  CHECK(contains(lost, "somebody has released it"));
  CHECK(holder->lease() == nullptr);
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

namespace {

// A session that has lost the server a, which says nothing to its holder.
struct Lost : Moves {
  explicit Lost(const std::function<void(Moves&)>& more = [](Moves&) {})
      : Moves([&](Moves& it) {
          prepare(it);
          more(it);
        }) {
    server->muteSessions = true;
    next.left = 2;
  }
  static void prepare(Moves& it) {
    it.beatMs = 3'600'000;  // none is missed
    it.callLimit = 1 * kj::HOURS;
    it.settings.request.turns.protectMs = 1000;
    it.settings.request.turns.holderKeeps = true;
    it.settings.keepBytes = 1 << 20;
    it.settings.failOverWaitMs = 60'000;
    it.settings.sessionLimit = it.settings.lookLimit = 1 * kj::HOURS;
    it.settings.lookAlone = 10 * kj::MILLISECONDS;
  }
  void ask() { REQUIRE(::send(application, &next, sizeof next, 0) == sizeof next); }
  std::string place() { return holder->lease()->server.name; }
};

// A port at which the kernel takes no connection, as if the network were cut: as many wait there as may.
struct DeafPort {
  DeafPort() : listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof address;
    REQUIRE(::bind(listener, at, size) == 0);
    REQUIRE(::listen(listener, 0) == 0);
    REQUIRE(::getsockname(listener, at, &size) == 0);
    port = ntohs(address.sin_port);
    for (bool taken = true; taken;) {
      REQUIRE(waiting.size() < 10);
      waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      REQUIRE((::connect(waiting.back(), at, size) == 0 || errno == EINPROGRESS));
      pollfd connected{waiting.back(), POLLOUT, 0};
      taken = ::poll(&connected, 1, 200) == 1;
    }
  }
  kj::AutoCloseFd listener;
  std::vector<kj::AutoCloseFd> waiting;
  uint16_t port = 0;
};

// Likewise, but its host does not even take a connection.
struct CutOff : DeafPort, Lost {
  CutOff()
      : Lost([this](Moves& it) {
          it.server->facts.host = "127.0.0.1";
          it.server->facts.port = port;
        }) {
    std::strcpy(next.transport, "ucx");
  }
};

}  // namespace

TEST_CASE_METHOD(Lost, "a lease leaves a server that nobody hears while that is still looked at") {
  server->disconnect();
  ask();
  for (int i = 0; i < 2000 && place() == "a"; ++i) pause(5);
  CHECK(place() == "b");
  CHECK(lost.empty());
}

TEST_CASE_METHOD(Lost, "so does one of which no session has begun yet") {
  makeHolder();  // another one, and its lease
  REQUIRE(holder->lease() == nullptr);
  auto acquired = holder->acquire();
  acquired.wait(io.waitScope);
  REQUIRE(place() == "a");
  server->disconnect();
  const OpenRequest first = request();
  REQUIRE(::send(application, &first, sizeof first, 0) == sizeof first);
  Opened opened;
  for (int i = 0; i < 2000 && !opened.answered; ++i) {
    pause(5);
    receive(opened);
  }
  CHECK(opened.reply.status == Status::ok);
  CHECK(std::string(opened.reply.server) == "b");
}

TEST_CASE_METHOD(Lost, "a session goes on at a server that the manager hears, when that answers at last") {
  ask();
  pause(500);  // many times lookAlone
  CHECK(place() == "a");
  CHECK(other->leases.empty());
  server->muteSessions = false;
  Opened opened;
  for (int i = 0; i < 2000 && !opened.answered; ++i) {
    pause(5);
    receive(opened);
  }
  CHECK(opened.reply.status == Status::ok);
  CHECK(std::string(opened.reply.server) == "a");
  CHECK(server->lastEpoch == 2);
}

TEST_CASE_METHOD(CutOff,
                 "a lease leaves a server whose host takes no connection, though the manager hears it") {
  ask();
  for (int i = 0; i < 2000 && place() == "a"; ++i) pause(5);
  CHECK(place() == "b");
  CHECK(lost.empty());
}

// A long way, or one packet that is lost, looks the same.
TEST_CASE_METHOD(CutOff, "but not one at which the session has not run yet") {
  next.sessionLow ^= 1;
  ask();
  pause(500);  // many times lookAlone
  CHECK(place() == "a");
  CHECK(other->leases.empty());
}

// Else two servers would have the session: the one that answered, and the one that it is restored at.
TEST_CASE_METHOD(Lost, "what a server says after the lease has begun to leave it is dropped") {
  server->disconnect();
  other->muteGrants = true;
  ask();
  for (int i = 0; i < 2000 && other->leases.empty(); ++i) pause(5);
  REQUIRE(other->leases.size() == 1);
  const uint32_t sessions = server->sessions;
  server->muteSessions = false;
  for (int i = 0; i < 2000 && server->sessions == sessions; ++i) pause(5);
  REQUIRE(server->sessions == sessions + 1);
  pause(50);  // the holder has heard it
  other->muteGrants = false;
  Opened opened;
  for (int i = 0; i < 2000 && !opened.answered; ++i) {
    pause(5);
    receive(opened);
  }
  CHECK(place() == "b");
  CHECK(opened.reply.status == Status::waiting);  // for b
  CHECK(opened.session.get() < 0);
}

TEST_CASE_METHOD(Lost, "where there is no other place it is said that one is waited for") {
  settings.awaitedPause = 20 * kj::MILLISECONDS;
  settings.sessionLimit = settings.lookLimit = 50 * kj::MILLISECONDS;
  makeHolder();  // another one, and its lease
  holder->acquire().wait(io.waitScope);
  news.clear();  // that nothing here takes the network
  other->disconnect();
  server->disconnect();
  const OpenRequest first = request();
  REQUIRE(::send(application, &first, sizeof first, 0) == sizeof first);
  for (int i = 0; i < 2000 && news.empty(); ++i) pause(5);
  REQUIRE_FALSE(news.empty());
  CHECK(news[0] == "server a is gone: GPUs of another one are waited for (--protect-wait 1m)");
}
