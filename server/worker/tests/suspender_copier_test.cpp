// A session whose memory goes to a copier and comes back, where copier or device do not do their part.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include "base/descriptor_passing.h"
#include "server/worker/tests/suspended.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

#define ROW(name) schema::RowOf<name>::id

namespace {

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

}  // namespace

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
