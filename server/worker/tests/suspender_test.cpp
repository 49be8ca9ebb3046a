// A session whose memory goes to a copier and comes back: the copier's own code, on a thread of this process.
#include "server/worker/suspender.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>

#include "base/descriptor_passing.h"
#include "server/copier/connection.h"
#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

#define ROW(name) schema::RowOf<name>::id

namespace {

constexpr auto kLong = 20s;

class Copier {
 public:
  // verify: it fills the memory that the session leaves, and compares what it brings back.
  explicit Copier(uint64_t budget = 64 * kMiB, bool verify = true)
      : verify_(verify),
        devices_(softDriver()),
        store_({budget, "", 16 * kMiB, [](uint64_t) { return true; }, nullptr}) {}
  ~Copier() { die(); }

  // The worker's end of a connection.
  int connect() {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    mine_.push_back(dup(ends[0]));  // before the thread, which closes the other one
    threads_.emplace_back(
        [this, mine = ends[0]] { CopierConnection(Descriptor(mine), devices_, store_, verify_).serve(); });
    return ends[1];
  }
  // As its process's death ends its connections.
  void die() {
    for (int descriptor : mine_) {
      shutdown(descriptor, SHUT_RDWR);
      close(descriptor);
    }
    mine_.clear();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  uint64_t kept() const { return store_.usage().memory; }

 private:
  const bool verify_;
  CopierDevices devices_;
  CopierStore store_;
  std::vector<std::thread> threads_;
  std::vector<int> mine_;
};

class Suspended {
 public:
  explicit Suspended(Client& client)
      : suspender(*client.session, [this](const SuspendOutcome& outcome) {
          {
            std::lock_guard lock(mutex_);
            outcomes_.push_back(outcome);
          }
          came_.notify_all();
        }) {}
  SuspendOutcome outcome() {
    std::unique_lock lock(mutex_);
    REQUIRE(came_.wait_for(lock, kLong, [this] { return !outcomes_.empty(); }));
    SuspendOutcome first = std::move(outcomes_.front());
    outcomes_.pop_front();
    return first;
  }
  SuspendOutcome suspend(Copier& copier, std::chrono::milliseconds drain = kLong) {
    suspender.suspend(drain, copier.connect());
    return outcome();
  }
  SuspendOutcome resume() {
    suspender.resume();
    return outcome();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<SuspendOutcome> outcomes_;

 public:
  Suspender suspender;  // ends first
};

// A client with 8 MiB of extents, each word of which is its index times `key`.
struct Memory {
  explicit Memory(Client& client) : client_(client) {
    const uint64_t base = client.space().deviceBase;
    for (const auto& [offset, bytes] : {std::pair{4 * kMiB, 2 * kMiB}, std::pair{8 * kMiB, 6 * kMiB}}) {
      REQUIRE(client.await(ROW("sessionExtentMap"), Arguments().value(0).value(base + offset).value(bytes))
                  .status() == CUDA_SUCCESS);
      extents.emplace_back(base + offset, bytes);
    }
    uint32_t value = 1;
    for (const auto& [address, bytes] : extents)
      for (uint64_t at = 0; at < bytes; at += kMiB)
        client.post(ROW("cuMemsetD32Async"),
                    Arguments().value(address + at).value(value++).value(kMiB / 4).value(0));
  }
  // As the device sees them. Here so that a thread without a context can look.
  bool right() const {
    client_.await(ROW("sessionDrain"), Arguments().value(0).value(1));
    uint32_t value = 1;
    for (const auto& [address, bytes] : extents)
      for (uint64_t at = 0; at < bytes; at += kMiB, ++value)
        for (uint64_t word = 0; word < kMiB / 4; word += 1023)
          if (reinterpret_cast<const uint32_t*>(address + at)[word] != value) return false;
    return true;
  }

  std::vector<std::pair<uint64_t, uint64_t>> extents;

 private:
  Client& client_;
};

// Between a worker and its copier: of one batch that the worker sends the descriptors become others.
class Spoiler {
 public:
  Spoiler(int copier, unsigned batch) : copier_(copier), batch_(batch) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    worker_ = Descriptor(ends[0]), workers = ends[1];
    thread_ = std::thread([this] { run(); });
  }
  ~Spoiler() { thread_.join(); }
  int workers = -1;  // end

 private:
  void run() {
    pollfd waiting[2] = {{worker_, POLLIN, 0}, {copier_, POLLIN, 0}};
    while (poll(waiting, 2, -1) > 0) {
      if (waiting[1].revents != 0 && !pass(copier_, worker_)) break;
      if (waiting[0].revents != 0 && !pass(worker_, copier_)) break;
    }
    worker_ = Descriptor();
    copier_ = Descriptor();
  }
  bool pass(int from, int to) {
    std::vector<std::byte> room(kCopierDatagram);
    const ReceivedMessage got = receiveWithDescriptors(from, room);
    if (got.bytes <= 0) return false;
    std::vector<Descriptor> owned;
    std::vector<int> sent;
    if (!got.descriptors.empty()) ++batches_;
    for (int descriptor : got.descriptors) {
      owned.emplace_back(descriptor);
      sent.push_back(batches_ == batch_ ? null_ : descriptor);
    }
    return sendWithDescriptors(to, std::span(room).first(static_cast<size_t>(got.bytes)), sent) > 0;
  }

  Descriptor worker_, copier_, null_{open("/dev/null", O_RDWR | O_CLOEXEC)};
  const unsigned batch_;
  unsigned batches_ = 0;
  std::thread thread_;
};

size_t freeBytes() {
  size_t free = 0, total = 0;
  CUcontext context = nullptr;
  REQUIRE(softDriver().cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  REQUIRE(softDriver().cuCtxSetCurrent(context) == CUDA_SUCCESS);
  REQUIRE(softDriver().cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS);
  softDriver().cuDevicePrimaryCtxRelease_v2(0);
  return free;
}

void makeStream(Client& client) {
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
}

}  // namespace

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
  client.post(ROW("sessionHostFunction"), Arguments().value(kStream).value(42).value(0));
  const auto bytes = client.notice(NoticeType::callback);
  REQUIRE(bytes);
  for (int round = 0; round < 2; ++round) {  // the second finds the first one's wait still under way
    const SuspendOutcome refused = session.suspend(copier, 50ms);
    CHECK_FALSE(refused.suspended);
    CHECK(contains(refused.error, "busy"));
    CHECK(contains(refused.error, "1 stream has work"));
    CHECK(contains(refused.error, "1 host function of the program runs"));
    CHECK(client.await(ROW("sessionImageOffer"), Arguments().structure(schema::ImageName{}).value(1))
              .status() == CUDA_SUCCESS);
  }
  client.tell(NoticeType::callbackDone, schema::CallbackBody{42, 0, 0});
  REQUIRE(session.suspend(copier).error.empty());
  REQUIRE(session.resume().error.empty());
  CHECK(memory.right());
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
  client.post(ROW("sessionHostFunction"), Arguments().value(kStream).value(42).value(0));
  REQUIRE(client.notice(NoticeType::callback));
  const uint64_t drain = client.post(ROW("sessionDrain"), Arguments().value(kStream).value(0), Frame::kAwait);
  REQUIRE(eventually([&] { return !client.session->besideIdle(); }));
  const SuspendOutcome refused = session.suspend(copier, 50ms);
  CHECK(contains(refused.error, "a call of the program is still under way"));
  session.suspender.suspend(kLong, copier.connect());
  client.tell(NoticeType::callbackDone, schema::CallbackBody{42, 0, 0});
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

TEST_CASE("a copier without room: nothing was moved") {
  Client client;
  client.open();
  Memory memory(client);
  Copier small(4 * kMiB), copier;
  Suspended session(client);
  const SuspendOutcome refused = session.suspend(small);
  CHECK_FALSE(refused.suspended);
  CHECK(contains(refused.error, "suspend_memory"));
  CHECK(memory.right());
  REQUIRE(session.suspend(copier).error.empty());
  REQUIRE(session.resume().error.empty());
  CHECK(memory.right());
}

TEST_CASE("what the copier refuses in the middle: the session goes on with all its memory") {
  Client client(softDriver(), std::make_unique<OwnAccount>(std::vector<uint64_t>{512 * kMiB}));
  client.open();
  const uint64_t base = client.space().deviceBase;
  constexpr uint64_t kPieces = kMostInBatch + 20;  // two batches
  const auto address = [&](uint64_t piece) { return base + (32 + 2 * piece) * kMiB; };
  for (uint64_t piece = 0; piece < kPieces; ++piece) {
    REQUIRE(client.await(ROW("sessionExtentMap"), Arguments().value(0).value(address(piece)).value(2 * kMiB))
                .status() == CUDA_SUCCESS);
    client.post(ROW("cuMemsetD32Async"),
                Arguments().value(address(piece) + kMiB).value(piece + 1).value(16).value(0));
  }
  const auto right = [&] {
    client.await(ROW("sessionDrain"), Arguments().value(0).value(1));
    for (uint64_t piece = 0; piece < kPieces; ++piece)
      if (reinterpret_cast<const volatile uint32_t*>(address(piece) + kMiB)[15] != piece + 1) return false;
    return true;
  };
  REQUIRE(right());
  Copier copier(512 * kMiB);
  {
    Suspended session(client);
    const unsigned spoilt = GENERATE(1u, 2u);
    {
      Spoiler spoiler(copier.connect(), spoilt);
      session.suspender.suspend(kLong, spoiler.workers);
      const SuspendOutcome refused = session.outcome();
      CHECK_FALSE(refused.suspended);
      CHECK(contains(refused.error, "a descriptor that came with a piece of memory is none"));
    }
    CHECK(right());
    CHECK(eventually([&] { return copier.kept() == 0; }));
    REQUIRE(session.suspend(copier).error.empty());
    REQUIRE(session.resume().error.empty());
    CHECK(right());
  }
}

TEST_CASE("a session without memory outlives the copier") {
  Client client;
  client.open();
  Copier copier;
  Suspended session(client);
  REQUIRE(session.suspend(copier).suspended);
  copier.die();
  std::this_thread::sleep_for(1500ms);  // it looks once a second
  const SuspendOutcome back = session.resume();
  CHECK(back.error.empty());
  CHECK_FALSE(back.suspended);
  CHECK(client.await(ROW("sessionDrain"), Arguments().value(0).value(1)).status() == CUDA_SUCCESS);
}

TEST_CASE("a copier that dies takes the session with it, and says so") {
  Client client;
  client.open();
  Memory memory(client);
  REQUIRE(memory.right());
  Copier copier;
  Suspended session(client);
  REQUIRE(session.suspend(copier).error.empty());
  REQUIRE(client.notice(NoticeType::suspended));
  SECTION("while it keeps the memory") { copier.die(); }
  SECTION("and it is asked for") {
    copier.die();
    session.suspender.resume();
  }
  std::jthread impatient;
  SECTION("and it is asked for again and again") {
    copier.die();
    impatient = std::jthread([&session](const std::stop_token& enough) {
      while (!enough.stop_requested()) {
        session.suspender.resume();
        std::this_thread::sleep_for(100ms);
      }
    });
  }
  const auto told = client.failure();
  REQUIRE(told);
  CHECK(contains(told->text, "copier"));
  CHECK(eventually([&] { return client.ended(); }));
}

TEST_CASE("a device without room: the session stays suspended until there is") {
  Client client;
  client.open();
  Memory memory(client);
  REQUIRE(memory.right());
  Copier copier(64 * kMiB, false);  // the memory is the test's to take
  Suspended session(client);
  REQUIRE(session.suspend(copier).error.empty());
  freeBytes();
  std::vector<CUdeviceptr> taken;
  for (size_t bytes = size_t{1024} * kMiB; bytes >= size_t{64} * 1024; bytes /= 2)
    for (CUdeviceptr address = 0; softDriver().cuMemAlloc_v2(&address, bytes) == CUDA_SUCCESS;)
      taken.push_back(address);
  const SuspendOutcome refused = session.resume();
  CHECK(refused.suspended);
  CHECK(contains(refused.error, "CUDA_ERROR_OUT_OF_MEMORY"));
  for (CUdeviceptr address : taken) softDriver().cuMemFree_v2(address);
  const SuspendOutcome back = session.resume();
  CHECK(back.error.empty());
  CHECK_FALSE(back.suspended);
  CHECK(memory.right());
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
