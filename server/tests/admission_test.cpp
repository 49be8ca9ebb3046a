// The handshake, from the side of holders good and bad.
#include <fstream>

#include "server/tests/admission_bench.h"

#include "pace.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("a holder with the key gets a worker with the lease's devices") {
  AdmissionBench bench;
  Opening opening;
  REQUIRE(bench.open(opening).empty());
  CHECK(opening.serverProved);
  CHECK(opening.order('e').wait(bench.io.waitScope) == "e1");
  CHECK(bench.sessions.living({1, 1}) == 1);
  CHECK(contains(opening.order('q').wait(bench.io.waitScope), "client closed"));  // from the server
  CHECK(opening.hear().wait(bench.io.waitScope).empty());  // nobody else has a copy of the socket
}

TEST_CASE("a worker is known to the server's next life before it learns of its session") {
  std::vector<std::pair<size_t, size_t>> known;  // at every change: workers, sessions
  AdmissionBench bench;
  bench.sessions.onChange(
      [&] { known.emplace_back(bench.sessions.workers().size(), bench.sessions.living()); });
  Opening opening;
  REQUIRE(bench.open(opening).empty());
  CHECK(opening.order('e').wait(bench.io.waitScope) == "e1");
  CHECK(known == std::vector<std::pair<size_t, size_t>>{{1, 0}, {1, 1}});
  REQUIRE(bench.sessions.workers().size() == 1);
  CHECK(bench.sessions.workers()[0].lease == Id{1, 1});
}

TEST_CASE("a wrong key is refused, and the server's proof shows it too") {
  AdmissionBench bench;
  Opening opening;
  opening.key = std::string(32, 'x');
  CHECK(contains(bench.open(opening), "proof of the session key is wrong"));
  CHECK_FALSE(opening.serverProved);
  CHECK(bench.sessions.living() == 0);
}

TEST_CASE("another version or other rows are refused, naming both") {
  AdmissionBench bench;
  Opening version, rows;
  version.protocol = gpupool::schema::PROTOCOL_VERSION + 7;
  CHECK(contains(
      bench.open(version),
      ("the client speaks " + std::to_string(version.protocol) + "; upgrade the server first").c_str()));
  CHECK(version.otherVersion);
  rows.rowsHash = 0xabc;
  CHECK(contains(bench.open(rows), "0000000000000abc"));
  CHECK(contains(bench.open(rows), "0000000000001234"));
  CHECK(rows.otherVersion);
}

TEST_CASE("the version before is served in its own number") {
  using gpupool::schema::PROTOCOL_VERSION;
  AdmissionBench bench;
  Opening before, after, older;
  before.protocol = PROTOCOL_VERSION - 1;
  CHECK(bench.open(before).empty());
  CHECK(before.answered == PROTOCOL_VERSION - 1);
  after.session = {2, 3};
  after.protocol = PROTOCOL_VERSION + 1;  // and speaks ours still
  after.oldest = PROTOCOL_VERSION;
  CHECK(bench.open(after).empty());
  CHECK(after.answered == PROTOCOL_VERSION);
  older.protocol = PROTOCOL_VERSION - 2;
  CHECK(contains(bench.open(older), "upgrade the client first"));
  CHECK(older.otherVersion);
  older.session = {2, 4};
  older.protocol = PROTOCOL_VERSION - 1;
  older.lease = {7, 7};
  CHECK(contains(bench.open(older), "is not known"));
  CHECK_FALSE(older.otherVersion);
  CHECK(older.answered == PROTOCOL_VERSION - 1);  // it takes another number for another version
}

TEST_CASE("a session gets a worker of the program that its client names") {
  AdmissionBench bench;
  Opening current, other, none;
  other.session = {2, 3};
  other.rowsHash = kOtherRows;
  REQUIRE(bench.open(other).empty());
  CHECK(other.answeredRows == kOtherRows);
  CHECK(other.order('y').wait(bench.io.waitScope) == "y5678");
  REQUIRE(bench.open(current).empty());
  CHECK(current.order('y').wait(bench.io.waitScope) == "y1234");
  none.session = {2, 4};
  none.rowsHash = 0xabc;
  none.release = "0.0.9\n";
  CHECK(contains(bench.open(none),
                 "call rows 0000000000000abc of gpupool 0.0.9 here, 0000000000001234, "
                 "0000000000005678 of gpupool 0.0.8 on the server"));
}

TEST_CASE("programs of other builds come and go, and sessions that run keep their workers") {
  AdmissionBench bench;
  Opening running, late, back, again;
  running.rowsHash = late.rowsHash = back.rowsHash = again.rowsHash = kOtherRows;
  late.session = {2, 3}, back.session = {2, 4}, again.session = {2, 5};
  REQUIRE(bench.open(running).empty());
  CHECK(bench.pool->replaceOthers({}));
  CHECK_FALSE(bench.pool->replaceOthers({}));
  CHECK(contains(bench.open(late), "call rows 0000000000005678 here, 0000000000001234 on the server"));
  CHECK(running.order('y').wait(bench.io.waitScope) == "y5678");

  const std::string path = bench.folder.path + "/gpupool-worker-0.0.8";
  const auto found = [&] {
    return std::vector<OtherWorker>{{path, {.rows = kOtherRows, .frames = 4, .release = "0.0.8"}}};
  };
  CHECK(bench.pool->replaceOthers(found()));
  CHECK_FALSE(bench.pool->replaceOthers(found()));  // the same file
  REQUIRE(bench.open(back).empty());
  std::filesystem::rename(path, path + "-before");
  makeOtherWorker(bench.folder.path, FAKE_WORKER);
  CHECK(bench.pool->replaceOthers(found()));
  REQUIRE(bench.open(again).empty());
  for (Opening* one : {&running, &back, &again}) CHECK(one->order('y').wait(bench.io.waitScope) == "y5678");
}

TEST_CASE("who waits for a worker of a program that is removed is told so") {
  AdmissionBench bench;
  const std::string path = bench.folder.path + "/slow";
  std::ofstream(path) << "#!/bin/sh\nexec sleep 60\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  bench.pool->replaceOthers({{path, {.rows = 0xabc, .frames = 4, .release = "0.0.7"}}});
  auto worker = bench.pool->take(0xabc, {}, 60 * kj::SECONDS);
  bench.pool->replaceOthers({});
  CHECK(contains(failure([&] { worker.wait(bench.io.waitScope); }), "was removed from this server"));
  CHECK(contains(failure([&] { bench.pool->take(0xabc, {}, 60 * kj::SECONDS).wait(bench.io.waitScope); }),
                 "version mismatch"));
}

TEST_CASE("unknown, closing and crowded leases are refused") {
  AdmissionBench bench([](Admission::Settings& settings) { settings.sessionsPerLease = 1; });
  Opening unknown;
  unknown.lease = {7, 7};
  CHECK(contains(bench.open(unknown), "is not known on server node1"));
  CHECK(unknown.unknownLease);
  Opening first, second;
  REQUIRE(bench.open(first).empty());
  second.session = {2, 3};
  CHECK(contains(bench.open(second), "has 1 sessions already"));
  CHECK_FALSE(second.unknownLease);
  bench.leases.close({1, 1});
  CHECK(contains(bench.open(second), "is not known"));
  CHECK(second.unknownLease);
}

TEST_CASE("a session is opened once an epoch") {
  AdmissionBench bench;
  Opening first, again, next;
  REQUIRE(bench.open(first).empty());
  CHECK(contains(bench.open(again), "opened before with epoch 1"));
  next.epoch = 2;
  CHECK(contains(bench.open(next), "the session does not move"));  // migration_test.cpp: where it does
}

TEST_CASE("nonsense in the hello is refused") {
  AdmissionBench bench;
  Opening nonce, transport, command;
  nonce.nonce = "short";
  CHECK(contains(bench.open(nonce), "nonce is not 32 bytes"));
  transport.transport = "carrier pigeon";
  CHECK(contains(bench.open(transport), "unknown transport"));
  command.command = std::string(20000, 'x');
  CHECK(bench.open(command) == "disconnected");
  CHECK(bench.sessions.living() == 0);
}

TEST_CASE("slow, silent and malformed peers are hung up on") {
  AdmissionBench bench([](Admission::Settings& settings) { settings.messageBound = 300 * kj::MILLISECONDS; });
  const auto began = std::chrono::steady_clock::now();
  CHECK(bench.hangsUp(""));
  CHECK(bench.hangsUp(std::string(4, '\0')));  // one segment; its size never comes
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  CHECK(took.count() > 0.5);
  CHECK(took.count() < 2.0 * gpupool::test::busy());
  CHECK(bench.hangsUp(std::string("\0\0\0\0\xff\xff\xff\x7f", 8)));          // 16 GiB announced
  CHECK(bench.hangsUp(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8)));  // 4 billion segments
  std::string wild("\0\0\0\0\1\0\0\0\xff\xff\xff\x7f\xff\xff\xff\x7f", 16);  // a root that points far away
  CHECK(bench.hangsUp(wild));
  CHECK(bench.sessions.living() == 0);
}

TEST_CASE("a peer that keeps failing is turned away, another is not") {
  AdmissionBench bench([](Admission::Settings& settings) {
    settings.failureBurst = 3;
    settings.failureInterval = std::chrono::milliseconds(400);
  });
  Opening bad;
  bad.key = std::string(32, 'x');
  for (int i = 0; i < 3; ++i) CHECK(contains(bench.open(bad, "10.0.0.7"), "proof"));
  Opening good;
  CHECK(contains(bench.open(good, "10.0.0.7"), "too many failed attempts from 10.0.0.7"));
  CHECK(bench.open(good, "10.0.0.8").empty());
  bench.timer.afterDelay(500 * kj::MILLISECONDS).wait(bench.io.waitScope);
  Opening later;
  later.session = {2, 9};
  CHECK(bench.open(later, "10.0.0.7").empty());
}

TEST_CASE("idle connections of one user keep nobody else from a session") {
  AdmissionBench bench;
  std::vector<kj::Own<kj::AsyncIoStream>> idle;
  idle.reserve(300);
  for (int i = 0; i < 300; ++i) idle.push_back(bench.connect("uid 7"));
  eventually(bench.timer, [&] { return bench.admission->underWay() <= 64; }).wait(bench.io.waitScope);
  Opening opening;
  CHECK(bench.open(opening, "uid 2").empty());
}

TEST_CASE("idle connections from many addresses keep nobody from a session") {
  AdmissionBench bench([](Admission::Settings& settings) {
    settings.atOnce = 16;
    settings.perPeer = 4;
  });
  std::vector<kj::Own<kj::AsyncIoStream>> idle;
  idle.reserve(100);
  for (int i = 0; i < 100; ++i) idle.push_back(bench.connect("10.0.0." + std::to_string(i)));
  eventually(bench.timer, [&] { return bench.admission->underWay() <= 16; }).wait(bench.io.waitScope);
  Opening opening;
  CHECK(bench.open(opening, "uid 2").empty());
}

TEST_CASE("who has the most places loses one, not who has few") {
  AdmissionBench bench([](Admission::Settings& settings) {
    settings.atOnce = 8;
    settings.perPeer = 6;
  });
  auto first = bench.connect("uid 1");
  std::vector<kj::Own<kj::AsyncIoStream>> idle;
  idle.reserve(40);
  for (int i = 0; i < 20; ++i) idle.push_back(bench.connect("uid 7"));
  for (int i = 0; i < 20; ++i) idle.push_back(bench.connect("uid 8"));
  Opening opening;  // the oldest of all, and slow
  opening.run(kj::mv(first)).wait(bench.io.waitScope);
  CHECK(opening.error.empty());
}

TEST_CASE("a lease's sessions that wait for workers count as its sessions") {
  Environment slow("GPUPOOL_FAKE_WORKER", "mute");
  AdmissionBench bench([](Admission::Settings& settings) {
    settings.sessionsPerLease = 1;
    settings.workerBound = 2 * kj::SECONDS;
  });
  Opening first, second;
  auto opened = first.run(bench.connect()).eagerlyEvaluate(nullptr);
  bench.timer.afterDelay(200 * kj::MILLISECONDS).wait(bench.io.waitScope);
  second.session = {2, 3};
  CHECK(contains(bench.open(second), "has 1 sessions already"));
  opened.wait(bench.io.waitScope);
}

TEST_CASE("a waiting worker that died is replaced before the session notices") {
  AdmissionBench bench;
  eventually(bench.timer, [&] { return bench.pool->warm() == 1; }).wait(bench.io.waitScope);
  Opening probe;
  REQUIRE(bench.open(probe).empty());
  const pid_t used = std::stoi(probe.order('p').wait(bench.io.waitScope));
  eventually(bench.timer, [&] { return bench.pool->warm() == 1; }).wait(bench.io.waitScope);
  pid_t waiting = 0;
  for (pid_t pid : children())
    if (pid != used) waiting = pid;
  REQUIRE(waiting > 0);
  kill(waiting, SIGKILL);
  while (alive(waiting)) usleep(1000);  // dead before the server's event loop hears of it
  Opening opening;
  opening.session = {2, 5};
  CHECK(bench.open(opening).empty());
  CHECK(opening.order('e').wait(bench.io.waitScope) == "e1");
  CHECK(bench.sessions.workers().size() == bench.sessions.living());
}

TEST_CASE("without workers the holder hears why") {
  Environment fail("GPUPOOL_FAKE_WORKER", "fail");
  AdmissionBench bench([](Admission::Settings& settings) { settings.workerBound = 300 * kj::MILLISECONDS; });
  Opening opening;
  CHECK(contains(bench.open(opening), "told to fail"));
}

TEST_CASE("a lease revoked during the handshake starts nothing") {
  Environment slow("GPUPOOL_FAKE_WORKER", "mute");
  AdmissionBench bench([](Admission::Settings& settings) { settings.workerBound = 500 * kj::MILLISECONDS; });
  Opening opening;
  auto opened = opening.run(bench.connect()).eagerlyEvaluate(nullptr);
  bench.timer.afterDelay(100 * kj::MILLISECONDS).wait(bench.io.waitScope);
  bench.leases.close({1, 1});
  opened.wait(bench.io.waitScope);
  CHECK_FALSE(opening.error.empty());
  CHECK(bench.sessions.living() == 0);
}

TEST_CASE("workers see no tokens") {
  Environment token("GPUPOOL_TOKEN", "secret");
  AdmissionBench bench;
  Opening opening;
  REQUIRE(bench.open(opening).empty());
  CHECK(opening.order('o').wait(bench.io.waitScope) == "0");
}
