// A session whose memory goes to a copier and comes back: what it waits for, and what it finds then.
#include <mutex>
#include <set>

#include "server/worker/tests/suspended.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

#define ROW(name) schema::RowOf<name>::id

TEST_CASE("a suspended session's memory is the device's, and comes back to the same addresses") {
  Client client;
  client.open();
  Copier copier;
  const size_t before = freeBytes();
  Memory memory(client);
  REQUIRE(memory.right());
  Suspended session(client);
  for (int round = 0; round < 3; ++round) {
    const SuspendOutcome aside = session.suspend(copier);
    REQUIRE(aside.error.empty());
    CHECK(aside.suspended);
    CHECK(aside.movedBytes == 8 * kMiB);
    CHECK(aside.kept == std::vector<uint64_t>{0});
    CHECK(copier.kept() == 8 * kMiB);
    REQUIRE(client.notice(NoticeType::suspended));
    const SuspendOutcome back = session.resume();
    REQUIRE(back.error.empty());
    CHECK_FALSE(back.suspended);
    REQUIRE(client.notice(NoticeType::resumed));
    CHECK(eventually([&] { return copier.kept() == 0; }));
    CHECK(memory.right());
    CHECK(client.session->account().others(0) == 0);
  }
  for (const auto& [address, bytes] : memory.extents)
    CHECK(client.await(ROW("sessionExtentUnmap"), Arguments().value(address)).status() == CUDA_SUCCESS);
  CHECK(freeBytes() == before);
}

TEST_CASE("frames wait for the resumption, and an order that changes nothing is answered") {
  Client client;
  client.open();
  makeStream(client);
  Memory memory(client);
  REQUIRE(memory.right());
  Copier copier;
  Suspended session(client);
  CHECK_FALSE(session.resume().suspended);
  REQUIRE(session.suspend(copier).error.empty());
  const SuspendOutcome again = session.suspend(copier);
  CHECK(again.suspended);
  CHECK(again.movedBytes == 8 * kMiB);

  client.post(ROW("cuMemsetD32Async"),
              Arguments().value(memory.extents[0].first).value(77).value(4).value(0));
  const uint64_t last = client.post(ROW("sessionDrain"), Arguments().value(0).value(1), Frame::kAwait);
  CHECK_FALSE(client.receive(100));
  // What does not need the device goes on.
  CHECK(client.awaitAside(ROW("sessionOutput"), Arguments()).status() == CUDA_SUCCESS);
  REQUIRE(session.resume().error.empty());
  const auto answer = client.receive();
  REQUIRE(answer);
  CHECK(answer->header.seq == last);
  CHECK(reinterpret_cast<const uint32_t*>(memory.extents[0].first)[3] == 77);
}

TEST_CASE("a watch that is added while a session is suspended is answered if its word is there") {
  Client client;
  client.open();
  makeStream(client);
  client.post(ROW("sessionWord"), Arguments().value(kStream).value(5).value(7));
  Copier copier;
  Suspended session(client);
  REQUIRE(eventually([&] { return client.word(5) == 7; }));
  REQUIRE(session.suspend(copier).error.empty());
  const uint32_t bell = client.bell();
  client.tell(NoticeType::watch, schema::WordUpdate{5, 7});
  CHECK(eventually([&] { return client.bell() != bell; }));
  client.tell(NoticeType::watch, schema::WordUpdate{5, 8});
  REQUIRE(session.resume().error.empty());
  client.post(ROW("sessionWord"), Arguments().value(kStream).value(5).value(8));
  CHECK(eventually([&] { return client.word(5) == 8 && client.bell() != bell + 1; }));
}

TEST_CASE("a device that is not idle in time: the session goes on") {
  Client client;
  client.open();
  makeStream(client);
  Memory memory(client);
  Copier copier;
  Suspended session(client);
  beginHostFunction(client);
  for (int round = 0; round < 2; ++round) {  // the second finds the first one's wait still under way
    const SuspendOutcome refused = session.suspend(copier, 50ms);
    CHECK_FALSE(refused.suspended);
    CHECK(contains(refused.error, "busy"));
    CHECK(contains(refused.error, "1 stream has work"));
    CHECK(contains(refused.error, "1 host function of the program runs"));
    CHECK(client.await(ROW("sessionImageOffer"), Arguments().structure(schema::ImageName{}).value(1))
              .status() == CUDA_SUCCESS);
  }
  endHostFunction(client);
  REQUIRE(session.suspend(copier).error.empty());
  REQUIRE(session.resume().error.empty());
  CHECK(memory.right());
}

// A stream waits for a value that a later frame writes, again and again: the frames are all there, and the
// device is idle between any two of these.
TEST_CASE("a device that waits for what the program calls next is suspended between its calls") {
  Client client;
  client.open();
  makeStream(client);
  constexpr uint64_t kOther = makeHandle(handles::Kind::stream, 2, 1);
  REQUIRE(
      client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kOther).value(1).value(0)).status() ==
      CUDA_SUCCESS);
  Memory memory(client);
  Copier copier;
  Suspended session(client);
  const uint64_t flag = memory.extents[0].first + 4;  // no word that `right` looks at
  const auto waitFor = [&](uint32_t value) {
    client.post(ROW("cuStreamWaitValue32_v2"),
                Arguments().value(kStream).value(flag).value(value).value(CU_STREAM_WAIT_VALUE_GEQ));
  };
  const auto write = [&](uint32_t value) {
    client.post(ROW("cuMemsetD32Async"), Arguments().value(flag).value(value).value(1).value(kOther));
  };
  REQUIRE(memory.right());
  waitFor(2);
  REQUIRE(eventually([&] { return client.session->admitted() == client.seq; }));
  session.suspender.suspend(kLong, copier.connect());
  // For so long no frame comes that could be let through.
  std::this_thread::sleep_for(300ms);
  write(2);
  for (uint32_t value = 3; value != 100; ++value) {
    waitFor(value);
    write(value);
  }
  const SuspendOutcome aside = session.outcome();
  REQUIRE(aside.error == "");
  CHECK(client.session->admitted() < client.seq);
  REQUIRE(session.resume().error.empty());
  CHECK(memory.right());
}

TEST_CASE(
    "a device that is never idle between the program's calls is not suspended, and the reason says so") {
  Client client;
  client.open();
  makeStream(client);
  Copier copier;
  Suspended session(client);
  beginHostFunction(client);
  std::atomic<bool> enough{false};
  std::thread calls([&] {
    for (; !enough; std::this_thread::sleep_for(10ms))
      client.post(ROW("sessionWord"), Arguments().value(kStream).value(5).value(7));
  });
  const SuspendOutcome refused = session.suspend(copier, 1400ms);
  enough = true;
  calls.join();
  CHECK_FALSE(refused.suspended);
  CHECK(contains(refused.error, "calls that went one by one ("));
  endHostFunction(client);
  CHECK(client.await(ROW("sessionDrain"), Arguments().value(0).value(1)).status() == CUDA_SUCCESS);
}

TEST_CASE("a wait for the device that was given up touches no further context") {
  static std::atomic<unsigned> synchronised{0}, inside{0};
  static std::mutex held;
  const auto driver = Driver::load(SOFT_DRIVER);
  // The test's own table, that nobody reads yet.
  const_cast<Driver&>(*driver).cuCtxSynchronize = []() -> CUresult {
    ++inside;
    {
      std::lock_guard lock(held);
    }
    ++synchronised;
    return CUDA_SUCCESS;
  };
  synchronised = inside = 0;
  Client client(*driver);
  client.open();
  constexpr uint64_t kOther = makeHandle(handles::Kind::context, 1, 2);
  REQUIRE(client.await(ROW("cuCtxCreate_v2"), Arguments().value(kOther).value(0).value(0)).status() ==
          CUDA_SUCCESS);
  Copier copier;
  Suspended session(client);
  {
    std::lock_guard lock(held);
    CHECK(contains(session.suspend(copier, 50ms).error, "busy"));
    CHECK(inside == 1);
  }
  CHECK(eventually([&] { return synchronised == 1; }));
  REQUIRE(session.suspend(copier).error.empty());  // after that wait's end
  CHECK(synchronised == 3);
  REQUIRE(session.resume().error.empty());
}

TEST_CASE("a call that waits for the device on a thread beside is waited for") {
  Client client;
  client.open();
  makeStream(client);
  Copier copier;
  Suspended session(client);
  beginHostFunction(client);
  const uint64_t drain = client.post(ROW("sessionDrain"), Arguments().value(kStream).value(0), Frame::kAwait);
  REQUIRE(eventually([&] { return !client.session->besideIdle(); }));
  const SuspendOutcome refused = session.suspend(copier, 50ms);
  CHECK(contains(refused.error, "a call of the program is still under way"));
  session.suspender.suspend(kLong, copier.connect());
  endHostFunction(client);
  CHECK(session.outcome().error.empty());
  const auto answer = client.receive();
  REQUIRE(answer);
  CHECK(answer->header.seq == drain);
}

TEST_CASE("a session whose program has reset its device is suspended too") {
  Client client;
  client.open();
  Memory memory(client);
  REQUIRE(memory.right());
  REQUIRE(client.await(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)).status() == CUDA_SUCCESS);
  Copier copier;
  Suspended session(client);
  CHECK(session.suspend(copier).error == "");
  CHECK(session.resume().error == "");
  REQUIRE(client.await(ROW("cuDevicePrimaryCtxRetain"), Arguments().value(kContext).value(0)).status() ==
          CUDA_SUCCESS);
  CHECK(memory.right());
}

TEST_CASE("nothing is asked about a context that has ended, nor about its streams") {
  // The real driver takes such handles for pointers, and crashes.
  static std::set<CUstream> asked;
  static std::set<CUcontext> ended;
  static unsigned dangling = 0;
  softDriver();
  auto driver = server::Driver::load(SOFT_DRIVER);
  auto& table = const_cast<server::Driver&>(*driver);
  table.cuStreamIsCapturing = [](CUstream stream, CUstreamCaptureStatus* status) {
    asked.insert(stream);
    return softDriver().cuStreamIsCapturing(stream, status);
  };
  table.cuCtxDestroy_v2 = [](CUcontext context) {
    ended.insert(context);
    return softDriver().cuCtxDestroy_v2(context);
  };
  table.cuCtxSetCurrent = [](CUcontext context) {
    dangling += ended.contains(context) ? 1 : 0;
    return softDriver().cuCtxSetCurrent(context);
  };
  Client client(*driver);
  client.open();
  makeStream(client);
  Copier copier;
  Suspended session(client);
  const auto cycle = [&] {
    asked.clear();
    CHECK(session.suspend(copier).error.empty());
    CHECK(session.resume().error.empty());
    return asked.size();
  };
  REQUIRE(cycle() == 1);
  client.context = 0;
  REQUIRE(client.await(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)).status() == CUDA_SUCCESS);
  CHECK(cycle() == 0);

  constexpr uint64_t kOther = makeHandle(handles::Kind::context, 2, 1);
  constexpr uint64_t kOthers = makeHandle(handles::Kind::stream, 2, 1);
  REQUIRE(client.await(ROW("cuCtxCreate_v2"), Arguments().value(kOther).value(0).value(0)).status() ==
          CUDA_SUCCESS);
  client.context = kOther;
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kOthers).value(1).value(0))
              .status() == CUDA_SUCCESS);
  CHECK(cycle() == 1);
  client.context = 0;
  REQUIRE(client.await(ROW("cuCtxDestroy_v2"), Arguments().value(kOther)).status() == CUDA_SUCCESS);
  CHECK(cycle() == 0);
  CHECK(ended.size() == 1);
  CHECK(dangling == 0);
}

TEST_CASE("an open capture is not disturbed") {
  Client client;
  client.open();
  makeStream(client);
  constexpr uint64_t kGraph = makeHandle(handles::Kind::graph, 1, 1);
  Copier copier;
  Suspended session(client);
  REQUIRE(client.await(ROW("cuStreamBeginCapture_v2"), Arguments().value(kStream).value(2)).status() ==
          CUDA_SUCCESS);
  CHECK(contains(session.suspend(copier, 50ms).error, "a stream capture is open"));
  // The frames that close it are served while a suspension waits.
  session.suspender.suspend(kLong, copier.connect());
  const auto ended =
      client.await(ROW("cuStreamEndCapture"), Arguments().value(kStream).value(1).value(kGraph));
  CHECK(ended.status() == CUDA_SUCCESS);
  CHECK(session.outcome().suspended);
}

TEST_CASE("a session ends while it is suspended") {
  Client client;
  client.open();
  Memory memory(client);
  REQUIRE(memory.right());
  Copier copier;
  auto session = std::make_unique<Suspended>(client);
  REQUIRE(session->suspend(copier).error.empty());
  REQUIRE(client.notice(NoticeType::suspended));
  client.post(ROW("sessionDrain"), Arguments().value(0).value(1));  // at the gate
  SECTION("by order") { client.session->stop("the lease is over"); }
  SECTION("by the client") { client.tell(NoticeType::goodbye, uint64_t{0}); }
  CHECK(eventually([&] { return client.ended(); }));
  session.reset();
  CHECK(eventually([&] { return copier.kept() == 0; }));
}

TEST_CASE("memory without mappings, with several, and closed to the device comes back as it was") {
  Client client;
  client.open();
  const uint64_t base = client.space().deviceBase;
  const auto succeeds = [&](uint32_t row, const Arguments& arguments) {
    REQUIRE(client.await(row, arguments).status() == CUDA_SUCCESS);
  };
  for (uint64_t name : {1, 2})
    succeeds(ROW("sessionPhysicalCreate"), Arguments().value(0).value(name).value(2 * kMiB));
  for (uint64_t place : {2, 6}) {
    succeeds(ROW("sessionPhysicalMap"), Arguments().value(1).value(base + place * kMiB));
    succeeds(ROW("sessionExtentAccess"),
             Arguments()
                 .value(base + place * kMiB)
                 .value(0)
                 .value(place == 2 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ));
  }
  succeeds(ROW("sessionPhysicalMap"), Arguments().value(2).value(base + 10 * kMiB));
  succeeds(ROW("sessionExtentAccess"),
           Arguments().value(base + 10 * kMiB).value(0).value(CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  for (const auto& [place, value] : {std::pair{2, 11}, std::pair{10, 22}})
    client.post(ROW("cuMemsetD32Async"),
                Arguments().value(base + place * kMiB).value(value).value(kMiB / 2).value(0));
  succeeds(ROW("sessionDrain"), Arguments().value(0).value(1));
  succeeds(ROW("sessionExtentUnmap"), Arguments().value(base + 10 * kMiB));

  Copier copier;
  Suspended session(client);
  const SuspendOutcome aside = session.suspend(copier);
  REQUIRE(aside.error.empty());
  CHECK(aside.movedBytes == 4 * kMiB);
  REQUIRE(session.resume().error.empty());
  const auto word = [&](uint64_t place) {
    return reinterpret_cast<const volatile uint32_t*>(base + place * kMiB)[1000];
  };
  CHECK(word(2) == 11);
  CHECK(word(6) == 11);
  client.post(ROW("cuMemsetD32Async"), Arguments().value(base + 2 * kMiB).value(33).value(kMiB / 2).value(0));
  succeeds(ROW("sessionDrain"), Arguments().value(0).value(1));
  CHECK(word(6) == 33);  // one piece still
  unsigned long long flags = 0;
  CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  CHECK(softDriver().cuMemGetAccess(&flags, &location, base + 6 * kMiB) == CUDA_SUCCESS);
  CHECK(flags == CU_MEM_ACCESS_FLAGS_PROT_READ);
  succeeds(ROW("sessionPhysicalMap"), Arguments().value(2).value(base + 10 * kMiB));
  succeeds(ROW("sessionExtentAccess"),
           Arguments().value(base + 10 * kMiB).value(0).value(CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
  CHECK(word(10) == 22);
}
