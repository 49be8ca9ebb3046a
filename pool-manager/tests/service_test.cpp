// The manager's RPC in process, with a server and holders on the same event loop; then the real process,
// killed and started again.
#include "service_fixture.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "pool-manager/tests/fabric_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

using Fixture = ServiceFixture;

}  // namespace

TEST_CASE_METHOD(Fixture, "a peer that never finishes its calls is cut off, and its answers are let go") {
  const auto ask = [&](ManagerConnection& connection) {
    return await(connection.manager().serversRequest().send());
  };
  auto tidy = connect();
  for (int i = 0; i < 1000; ++i) ask(*tidy);  // finished as each answer is dropped
  auto greedy = connect();
  std::vector<capnp::Response<gpupool::schema::Manager::ServersResults>> kept;
  bool cut = false;
  for (int i = 0; i < 1000 && !cut; ++i)
    KJ_IF_MAYBE (error, kj::runCatchingExceptions([&] { kept.push_back(ask(*greedy)); }))
      cut = error->getType() == kj::Exception::Type::DISCONNECTED;
  CHECK(cut);
  CHECK(kept.size() >= 200);
  CHECK(kept.size() <= 256);
  ask(*tidy);  // others notice nothing
  ask(*connect());
}

TEST_CASE("errors are told as the system says them") {
  const auto text = [](const char* description) {
    return errorText(
        kj::Exception(kj::Exception::Type::DISCONNECTED, __FILE__, __LINE__, kj::heapString(description)));
  };
  CHECK(text("::read(fd, buffer, maxBytes): Connection reset by peer") == "Connection reset by peer");
  CHECK(text("::writev(fd, iov.begin(), iov.size()): Broken pipe; iovTotal = 48; iov.size() = 2") ==
        "Broken pipe");
  CHECK(text("connect(): Connection refused") == "Connection refused");
  CHECK(text("Premature EOF.") == "the connection was closed");
  CHECK(text("Peer disconnected.") == "the connection was closed");
  CHECK(text("2 devices (of 3): none is free") == "2 devices (of 3): none is free");
  CHECK(text("open:3:server a (b): refused") == "open:3:server a (b): refused");
}

TEST_CASE_METHOD(Fixture, "lease, renew and release through the manager") {
  FakeServer server(io, "a", 2, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const Lease got = await(lease(*holder, wish()));
  CHECK(got.key.size() == 32);
  REQUIRE(server.leases.contains(got.id));  // told before the holder
  CHECK(server.leases.at(got.id).key == got.key);
  CHECK(got.server.localPath == server.facts.localPath);
  CHECK(await(renew(*holder, got.id)) == 15'000u);

  auto listed = await(holder->manager().leasesRequest().send());
  REQUIRE(listed.getLeases().size() == 1);
  CHECK(listed.getLeases()[0].getSessionKey().size() == 0);
  CHECK(text(listed.getLeases()[0].getHolder()) == "tester");
  auto devices = await(holder->manager().devicesRequest().send());
  REQUIRE(devices.getDevices().size() == 2);
  CHECK(devices.getDevices()[0].getFreeBytes() + devices.getDevices()[1].getFreeBytes() == uint64_t{8} << 30);

  await(release(*holder, got.id));
  CHECK(server.leases.empty());  // the devices are free when the release returns
  CHECK(server.revokeReasons == std::vector<std::string>{"released"});
  await(release(*holder, got.id));
  CHECK(errorText(failure(*this, renew(*holder, got.id))) == "the lease has ended: released");
}

TEST_CASE_METHOD(Fixture, "the same request twice is one lease") {
  FakeServer server(io, "a", 2, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto first = connect(), second = connect();
  const auto request = wish();
  auto one = lease(*first, request), other = lease(*second, request);
  CHECK(await(kj::mv(one)).key == await(kj::mv(other)).key);
  CHECK(server.leases.size() == 1);
}

TEST_CASE_METHOD(Fixture, "nothing free: who holds it, and the kind of error that may pass") {
  auto holder = connect();
  auto none = failure(*this, lease(*holder, wish()));
  CHECK(none.getType() == kj::Exception::Type::UNIMPLEMENTED);
  CHECK(errorText(none) == "no server has joined the pool yet");
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  await(lease(*holder, wish()));
  const auto busy = failure(*this, lease(*holder, wish()));
  CHECK(busy.getType() == kj::Exception::Type::OVERLOADED);
  CHECK(contains(errorText(busy), "is held by tester"));
}

TEST_CASE_METHOD(Fixture, "who waits gets the device that is released; who left the queue does not") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect(), impatient = connect(), patient = connect();
  const Lease held = await(lease(*holder, wish()));
  auto waiting = wish();
  waiting.waitMs = 60'000;
  auto dropped = lease(*impatient, waiting).eagerlyEvaluate(nullptr);
  pause(20);
  auto other = waiting;
  other.id = Id::random();
  auto kept = lease(*patient, other).eagerlyEvaluate(nullptr);
  pause(20);
  dropped = nullptr;
  impatient = nullptr;
  pause(20);
  await(release(*holder, held.id));
  CHECK(await(kj::mv(kept)).id == other.id);
}

TEST_CASE_METHOD(Fixture, "expiry frees: the server is told") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const Lease got = await(lease(*holder, wish()));
  pass(16'000);
  await(server.beatNow());
  pause(50);
  CHECK(server.leases.empty());
  CHECK(service->pool().leases().empty());
  CHECK(contains(errorText(failure(*this, renew(*holder, got.id))), "has not renewed it for 15 s"));
}

TEST_CASE_METHOD(Fixture, "a manager that stood still ends no lease: renewals wait to be read") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const Lease got = await(lease(*holder, wish()));
  for (int stop = 0; stop < 3; ++stop) {
    now += 60'000;  // four times the TTL
    pause(50);
    await(holder->manager().devicesRequest().send());  // it has seen the clock
    CHECK(service->pool().leases().at(got.id).state == LeaseState::active);
    CHECK(await(renew(*holder, got.id)) == 15'000u);
  }
  CHECK(server.revokeReasons.empty());
}

TEST_CASE_METHOD(Fixture, "a manager that stood still ends a lease whose time limit is over meanwhile") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  LeaseRequest limited = wish();
  limited.limitMs = 100'000;
  const Lease got = await(lease(*holder, limited));
  now += 60'000;  // it is stopped
  pause(50);
  CHECK(service->pool().leases().at(got.id).state == LeaseState::active);
  CHECK(await(renew(*holder, got.id)) == 15'000u);
  now += 60'000;
  pause(50);
  CHECK(server.revokeReasons == std::vector<std::string>{"its time limit of 100 s is over"});
}

TEST_CASE_METHOD(Fixture, "a server that does not answer a revoke delays the release, not for ever") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.muteRevokes = true;
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const Lease got = await(lease(*holder, wish()));
  await(release(*holder, got.id));
  CHECK(service->pool().leases().size() == 1);  // not free: nobody confirmed
  auto next = lease(*holder, wish()).eagerlyEvaluate(nullptr);
  pause(50);  // a released device is waited for, but no longer than a second
  pass(1100);
  CHECK(contains(errorText(failure(*this, kj::mv(next))), "ending"));
  pass(15'000 + 500 + 3000 + 100);
  CHECK(service->pool().leases().at(got.id).state == LeaseState::lost);  // over, and its device not free
  CHECK(contains(errorText(failure(*this, release(*holder, got.id, true))), "is connected"));
  server.muteRevokes = false;
  for (int i = 0; i < 200 && !service->pool().leases().empty(); ++i) pause(20);
  CHECK(service->pool().leases().empty());
}

TEST_CASE_METHOD(Fixture, "a refused grant is a lost server, in its own words") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.refuseGrants = "the driver is gone";
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const auto error = failure(*this, lease(*holder, wish()));
  CHECK(error.getType() == kj::Exception::Type::DISCONNECTED);
  CHECK(errorText(error) == "server a did not take the lease: the driver is gone");
  for (int i = 0; i < 200 && !service->pool().leases().empty(); ++i) pause(10);  // the server confirms it
  CHECK(service->pool().leases().empty());
}

TEST_CASE_METHOD(Fixture, "the end of its connection is the end of a server's membership") {
  auto holder = connect();
  {
    FakeServer server(io, "a", 1, folder.path + "/server");
    server.join(address);
    await(server.joined());
    FakeServer twin(io, "a", 1, folder.path + "/twin");
    twin.join(address);
    pause(100);
    CHECK(service->pool().servers().at("a").facts.incarnation == server.facts.incarnation);
    server.disconnect();
    await(twin.joined());  // the name is free now
    CHECK(service->pool().servers().at("a").facts.incarnation == twin.facts.incarnation);
    twin.disconnect();
    pause(50);
  }
  CHECK(contains(errorText(failure(*this, lease(*holder, wish()))), "not connected"));
}

TEST_CASE_METHOD(Fixture, "the fabric that a server reports is kept, and kept up to date by its beats") {
  FakeServer server(io, "a", 2, folder.path + "/server");
  server.fabric = oneAdapter(fabric::PortState::ACTIVE);
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const auto listed = [&] {
    auto response = await(holder->manager().serversRequest().send());
    REQUIRE(response.getServers().size() == 1);
    return read(response.getServers()[0].getInfo().getFabric(), 2);
  };
  CHECK(listed() == server.fabric);
  server.fabric = oneAdapter(fabric::PortState::DOWN);
  await(server.beatNow());
  CHECK(listed() == oneAdapter(fabric::PortState::ACTIVE));  // a beat without a report changes nothing
  server.tellFabric = true;
  await(server.beatNow());
  CHECK(listed() == server.fabric);
  CHECK(listed().devices.at(0).ports.at(0).state == fabric::PortState::DOWN);
  // A lease's copy of the server has none: it is stored, and sent to holders.
  auto request = holder->manager().leaseRequest();
  write(wish(), request.initRequest());
  CHECK_FALSE(await(request.send()).getLease().getServer().hasFabric());
  // Another life of the server has another report.
  server.disconnect();
  server.facts.incarnation = Id::random();
  server.fabric = {};
  server.join(address);
  await(server.joined());
  CHECK(listed() == fabric::Fabric());
}

TEST_CASE_METHOD(Fixture, "a server with an absurd report is refused, in words, and does not join") {
  FakeServer server(io, "a", 2, folder.path + "/server");
  server.fabric.devices.resize(fabric::kMaxDevices + 1);
  auto connection = connect();
  auto request = connection->manager().joinRequest();
  write(server.facts, request.initInfo());
  fabric::write(server.fabric, request.getInfo().initFabric());
  CHECK(contains(errorText(failure(*this, request.send().ignoreResult())), "too many devices"));
  CHECK(service->pool().servers().empty());
}

TEST_CASE_METHOD(Fixture, "garbage on a connection ends that connection alone") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto parsed = io.provider->getNetwork().parseAddress(address.c_str()).wait(io.waitScope);
  auto stream = parsed->connect().wait(io.waitScope);
  const std::string noise(4096, '\xa5');
  stream->write(noise.data(), noise.size()).wait(io.waitScope);
  pause(50);
  auto holder = connect();
  CHECK(await(lease(*holder, wish())).server.name == "a");
}

// Only root can play another user.
TEST_CASE_METHOD(Fixture, "the Unix socket turns other users away") {
  if (::geteuid() != 0) return;
  REQUIRE(::chmod(folder.path.c_str(), 0711) == 0);
  REQUIRE(::chmod((folder.path + "/manager").c_str(), 0666) == 0);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    sockaddr_un peer{};
    peer.sun_family = AF_UNIX;
    (folder.path + "/manager").copy(peer.sun_path, sizeof peer.sun_path - 1);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    if (::setuid(65534) != 0) ::_exit(1);
    if (::connect(socket, reinterpret_cast<sockaddr*>(&peer), sizeof peer) != 0) ::_exit(2);
    char byte;
    pollfd wait{socket, POLLIN, 0};
    ::_exit(::poll(&wait, 1, 3000) == 1 && ::read(socket, &byte, 1) <= 0 ? 0 : 3);
  }
  int status = -1;
  for (int i = 0; i < 400 && ::waitpid(stranger, &status, WNOHANG) == 0; ++i) pause(10);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  auto holder = connect();
  CHECK(await(holder->manager().serversRequest().send()).getServers().size() == 0);  // we are still welcome
}

// --- the process ---------------------------------------------------------------------------------------

namespace {

struct ManagerProcess {
  explicit ManagerProcess(const std::string& folder) : folder(folder) { start(); }
  ~ManagerProcess() { stop(SIGKILL); }
  void start() {
    pid = ::fork();
    if (pid != 0) return;
    const std::string socket = folder + "/manager", store = folder + "/db";
    ::execl(MANAGER_PROGRAM, MANAGER_PROGRAM, "--config", "/dev/null", "--socket", socket.c_str(), "--store",
            store.c_str(), "--beat", "100ms", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int stop(int signal) {
    if (pid <= 0) return 0;
    int status = 0;
    ::kill(pid, signal);
    ::waitpid(pid, &status, 0);
    pid = -1;
    return status;
  }
  std::string folder;
  pid_t pid = -1;
};

}  // namespace

TEST_CASE("killed and started again, the manager keeps its leases") {
  Folder folder;
  auto io = kj::setupAsyncIo();
  const std::string address = "unix:" + folder.path + "/manager";
  ManagerProcess manager(folder.path);
  const auto connect = [&]() {
    for (int attempt = 0;; ++attempt) try {
        return connectManager(*io.provider, address, 2 * kj::SECONDS).wait(io.waitScope);
      } catch (const kj::Exception&) {
        REQUIRE(attempt < 100);
        io.provider->getTimer().afterDelay(20 * kj::MILLISECONDS).wait(io.waitScope);
      }
  };
  auto holder = connect();
  FakeServer server(io, "a", 2, folder.path + "/server");
  server.join(address);
  server.joined().wait(io.waitScope);
  const auto request = wish();
  const Lease before = lease(*holder, request).wait(io.waitScope);

  manager.stop(SIGKILL);
  holder = nullptr;
  io.provider->getTimer().afterDelay(50 * kj::MILLISECONDS).wait(io.waitScope);
  CHECK(server.leases.contains(before.id));  // its sessions run on
  manager.start();
  holder = connect();
  CHECK(renew(*holder, before.id).wait(io.waitScope) == 15'000u);
  io.provider->getTimer().afterDelay(100 * kj::MILLISECONDS).wait(io.waitScope);
  server.joined().wait(io.waitScope);
  CHECK(server.leases.contains(before.id));
  CHECK(server.revokeReasons.empty());
  CHECK(lease(*holder, request).wait(io.waitScope).key == before.key);
  const Lease next = lease(*holder, wish()).wait(io.waitScope);
  CHECK(next.devices.at(0).info.ordinal != before.devices.at(0).info.ordinal);
  CHECK(next.epoch > before.epoch);
  KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() { lease(*holder, wish()).wait(io.waitScope); }))
    CHECK(contains(errorText(*error), "none is free"));
  else
    FAIL("a third device was found");
  release(*holder, before.id).wait(io.waitScope);
  CHECK_FALSE(server.leases.contains(before.id));

  holder = nullptr;
  const int status = manager.stop(SIGTERM);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK_FALSE(std::filesystem::exists(folder.path + "/manager"));
}

TEST_CASE("a second manager takes no socket from the first one, and no file for a socket") {
  Folder folder;
  auto io = kj::setupAsyncIo();
  ManagerProcess manager(folder.path);
  const std::string socket = folder.path + "/manager";
  const auto answers = [&]() {
    for (int attempt = 0; attempt < 100; ++attempt) try {
        connectManager(*io.provider, "unix:" + socket, 2 * kj::SECONDS).wait(io.waitScope);
        return true;
      } catch (const kj::Exception&) {
        io.provider->getTimer().afterDelay(20 * kj::MILLISECONDS).wait(io.waitScope);
      }
    return false;
  };
  REQUIRE(answers());
  const std::string error = folder.path + "/error", file = folder.path + "/notes";
  std::ofstream(file) << "of somebody";
  const auto second = [&](const std::string& option, const std::string& address) {
    const std::string command = std::string("timeout 10 ") + MANAGER_PROGRAM +
                                " --config /dev/null --store memory " + option + " " + address + " 2>" +
                                error;
    const int status = std::system(command.c_str());
    std::ifstream said(error);
    return std::to_string(WEXITSTATUS(status)) + " " + std::string(std::istreambuf_iterator<char>(said), {});
  };
  CHECK(contains(second("--socket", socket), socket + ": another gpupool-manager answers on this socket"));
  CHECK(answers());
  CHECK(contains(second("--socket", file), "1 gpupool manager: " + file + ": it exists and is not a socket"));
  CHECK(std::filesystem::exists(file));
  // What cannot be had is named, and by which option it was asked for.
  auto listener = io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope)->listen();
  const std::string taken = "127.0.0.1:" + std::to_string(listener->getPort());
  CHECK(contains(second("--listen", taken), "--listen " + taken + ": Address already in use"));
  CHECK(
      contains(second("--listen 127.0.0.1:0 --http-listen", taken), "--http-listen " + taken + ": Address"));
}
