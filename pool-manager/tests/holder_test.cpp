// The holder: its lease, the sessions that it opens, and what it answers to what is wrong.
#include "holder_fixture.h"

using namespace gpupool;
using namespace gpupool::cli;
using namespace gpupool::pool;
using namespace gpupool::test;
using holder::Status;

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
  char greeting[8] = {};
  ssize_t bytes = -1;
  for (int i = 0; i < 1000 && bytes < 0; ++i) {
    pause(20);
    bytes = ::recv(opened.session, greeting, sizeof greeting, MSG_DONTWAIT);
  }
  CHECK(bytes == 5);
  CHECK(std::string(greeting) == "hello");

  const Opened second = open(request());
  CHECK(second.reply.status == Status::ok);
  CHECK(second.reply.sessionLow != opened.reply.sessionLow);
  CHECK(server->leases.size() == 1);
  CHECK(server->sessions == 2);
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
  CHECK_FALSE(contains(text, "gpupool up"));  // they were named: a pool of one's own is another one
  CHECK(contains(text, "systemctl status gpupool-manager"));
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

TEST_CASE_METHOD(Fixture, "who has waited is not told to wait") {
  startAll();
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  auto wish = settings;
  wish.request.deviceCount = 2;
  wish.request.waitMs = 200;
  auto other =
      kj::heap<Holder>(*io.provider, io.unixEventPort, std::move(wish), [](const std::string&, bool) {});
  KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() { other->acquire().wait(io.waitScope); }))
    CHECK(contains(toFailure(*error).text, "; nothing came within --wait 200ms: wait longer, share with"));
  else
    FAIL("two devices of one were found");
}

TEST_CASE_METHOD(Fixture, "whose token is refused says so before the lease ends, and once") {
  startAll();
  Tokens tokens{{"alice", std::string(32, 'a')}};
  kj::uint port = 0;
  const auto demand = [&] {
    service->demandTokens([&]() -> const Tokens& { return tokens; });
    auto parsed =
        io.provider->getNetwork().parseAddress("127.0.0.1:" + std::to_string(port)).wait(io.waitScope);
    auto listener = parsed->listen();
    port = listener->getPort();
    service->serve(kj::mv(listener), false);
  };
  demand();
  settings.addresses = {"127.0.0.1:" + std::to_string(port)};
  settings.credentials = [] { return Credentials{"alice", std::string(32, 'a')}; };
  settings.request.ttlMs = 3000;
  std::vector<std::string> said;
  holder = kj::heap<Holder>(
      *io.provider, io.unixEventPort, settings, [this](const std::string& why, bool) { lost = why; },
      [&](const std::string& text) { said.push_back(text); });
  holder->acquire().wait(io.waitScope);
  tokens = {{"bob", std::string(32, 'b')}};
  stopManager();
  startManager();
  demand();
  for (int i = 0; i < 500 && said.empty(); ++i) pause(10);
  pause(600);  // some more attempts
  REQUIRE(said.size() == 1);
  CHECK(contains(said[0], "the lease is not renewed, and ends within 3s: "));
  CHECK(contains(said[0], "the token of tenant 'alice'"));
}

TEST_CASE_METHOD(Fixture,
                 "a connection that needs another token ends no lease: it is renewed with that one") {
  startAll();
  auto parsed = io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope);
  auto listener = parsed->listen();
  settings.addresses = {"127.0.0.1:" + std::to_string(listener->getPort())};
  service->serve(kj::mv(listener), false);
  const Tokens tokens{{"alice", std::string(32, 'a')}};
  bool known = false;
  settings.credentials = [&] { return known ? Credentials{"alice", std::string(32, 'a')} : Credentials{}; };
  settings.request.tenant = "alice";
  settings.request.ttlMs = 2000;
  makeHolder();
  holder->acquire().wait(io.waitScope);
  known = true;
  service->demandTokens([&]() -> const Tokens& { return tokens; });
  for (int i = 0; i < 300 && lost.empty(); ++i) pause(10);  // the lease's time, and as much again
  CHECK(lost == "");
  CHECK(service->pool().leases().size() == 1);
}

TEST_CASE_METHOD(Fixture, "rows that differ are refused in the server's words") {
  startAll();
  makeHolder();
  holder->acquire().wait(io.waitScope);
  const Opened opened = open(request(0x9999));
  CHECK(opened.reply.status == Status::mismatch);
  CHECK(std::string(opened.reply.text) == "server a: rows differ");
  CHECK(opened.session.get() < 0);
  CHECK(open(request()).reply.status == Status::ok);  // the lease is still good
}

TEST_CASE_METHOD(Fixture, "a program without a lease gets none where no server has a worker for it") {
  startAll();
  makeHolder();
  const Opened opened = open(request(0x9999));
  CHECK(opened.reply.status == Status::mismatch);
  CHECK(contains(opened.reply.text,
                 "no server has a worker program for this client (call rows 0000000000009999"));
  CHECK(service->pool().leases().empty());
  CHECK(open(request()).reply.status == Status::ok);
}

TEST_CASE_METHOD(Fixture, "the manager learns from the holder which clients a lease has") {
  startAll();
  settings.request.ttlMs = 1000;
  makeHolder();
  holder->acquire().wait(io.waitScope);
  const LeaseRecord& record = service->pool().leases().begin()->second;
  CHECK(clientsOf(record).empty());
  REQUIRE(open(request()).reply.status == Status::ok);
  for (int i = 0; i < 500 && clientsOf(record).empty(); ++i) pause(10);
  REQUIRE(clientsOf(record).size() == 1);
  CHECK(clientsOf(record)[0].rowsHash == 0x1234);
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

// As a server does with one that was too slow.
TEST_CASE_METHOD(Fixture, "a new session that is cut off in the handshake is tried again, twice") {
  startAll();
  makeHolder();
  server->cutsOff = 2;
  CHECK(open(request()).reply.status == Status::ok);
  CHECK(server->cutsOff == 0);
  CHECK(server->sessions == 1);
  server->cutsOff = 4;
  const Opened opened = open(request());
  CHECK(opened.reply.status == Status::serverLost);
  CHECK(contains(opened.reply.text, "server a at unix:"));
  CHECK(server->cutsOff == 1);
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

// What fails beside gives the connection up between any two steps of another call.
TEST_CASE_METHOD(Fixture, "the manager's connection may be lost at any step of a call") {
  settings.request.waitMs = 60'000;
  settings.releasePause = 1 * kj::MILLISECONDS;
  const auto run = [&](int steps) {
    for (int step = 0; step < steps; ++step) kj::evalLater([] {}).wait(io.waitScope);
  };
  const auto ignore = [](kj::Exception&&) {};
  for (int steps = 0; steps < 12; ++steps) {
    CAPTURE(steps);
    startManager();
    makeHolder();
    auto waits = holder->acquire().catch_(ignore).eagerlyEvaluate(nullptr);
    pause(50);
    CHECK(service->pool().waiting() == 1);
    stopManager();
    auto fails = holder->release().catch_(ignore).eagerlyEvaluate(nullptr);
    run(steps);
    auto asks = holder->acquire().catch_(ignore).eagerlyEvaluate(nullptr);
    run(40);
  }
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
