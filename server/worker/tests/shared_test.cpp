// Memory and events that two sessions have in common, in one process: what workers do of it, with a server
// that the test plays.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "server/worker/shared_events.h"
#include "server/worker/space.h"
#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using schema::ShareToken;

namespace {

constexpr size_t kPiece = size_t{4} << 20;

// Between the accounts below, as the server.
struct Exchange {
  struct Offered {
    unsigned session = 0;
    uint64_t piece = 0;
    Account::Part part;
    int descriptor = -1;
  };
  std::mutex mutex;                    // of what follows
  std::map<uint64_t, Offered> offers;  // by the token's key
  uint64_t next = 1, openings = 0;
  std::function<void()> onOffer = [] {};
  ~Exchange() {
    for (auto& [key, offer] : offers) ::close(offer.descriptor);
  }
};

class TestAccount final : public Account {
 public:
  TestAccount(Exchange& exchange, unsigned session) : exchange_(exchange), session_(session) {}
  CUresult take(unsigned, uint64_t bytes) override {
    used += bytes;
    return CUDA_SUCCESS;
  }
  void give(unsigned, uint64_t bytes) override { used -= bytes; }
  uint64_t others(unsigned) override { return 0; }
  CUresult offer(uint64_t piece, const Part& part, int descriptor, ShareToken& token) override {
    exchange_.onOffer();
    std::lock_guard lock(exchange_.mutex);
    token.key[0] = exchange_.next++;
    exchange_.offers[token.key[0]] = {session_, piece, part, dup(descriptor)};
    return CUDA_SUCCESS;
  }
  CUresult open(const ShareToken& token, Opened& opened) override {
    const auto offer = exchange_.offers.find(token.key[0]);
    if (offer == exchange_.offers.end()) return CUDA_ERROR_INVALID_HANDLE;
    opened = {++exchange_.openings, offer->second.part, dup(offer->second.descriptor)};
    ++open_;
    return CUDA_SUCCESS;
  }
  void endOffer(const ShareToken& token, bool) override {
    ::close(exchange_.offers.at(token.key[0]).descriptor);
    exchange_.offers.erase(token.key[0]);
  }
  void endPiece(uint64_t piece, unsigned, uint64_t bytes) override {
    endedPieces.push_back(piece);
    used -= bytes;
  }
  void close(uint64_t) override { --open_; }
  uint64_t number() const override { return session_; }
  unsigned openings() const { return open_; }

  uint64_t used = 0;
  std::vector<uint64_t> endedPieces;

 private:
  Exchange& exchange_;
  unsigned session_;
  unsigned open_ = 0;
};

struct Current {
  Current() {
    REQUIRE(softDriver().cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    REQUIRE(softDriver().cuCtxSetCurrent(context) == CUDA_SUCCESS);
  }
  ~Current() {
    softDriver().cuCtxSetCurrent(nullptr);
    softDriver().cuDevicePrimaryCtxRelease_v2(0);
  }
  CUcontext context = nullptr;
};

struct Stream {
  Stream() { REQUIRE(softDriver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS); }
  ~Stream() { softDriver().cuStreamDestroy_v2(stream); }
  bool idle() const { return softDriver().cuStreamQuery(stream) == CUDA_SUCCESS; }
  void finish() const { REQUIRE(softDriver().cuStreamSynchronize(stream) == CUDA_SUCCESS); }
  CUstream stream = nullptr;
};

// Streams stand still at it until it is opened.
class Gate {
 public:
  Gate() {
    REQUIRE(softDriver().cuMemHostAlloc(reinterpret_cast<void**>(&word_), 64, 0) == CUDA_SUCCESS);
    *word_ = 0;
  }
  ~Gate() {
    open();
    softDriver().cuMemFreeHost(word_);
  }
  void stand(const Stream& stream) {
    REQUIRE(softDriver().cuStreamWaitValue64_v2(stream.stream, reinterpret_cast<CUdeviceptr>(word_), 1,
                                                CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
  }
  void open() { __atomic_store_n(word_, 1, __ATOMIC_SEQ_CST); }

 private:
  uint64_t* word_ = nullptr;
};

struct Two {
  Exchange exchange;
  TestAccount mine{exchange, 1}, other{exchange, 2};
};

struct Events : Two {
  SharedEvents owner{softDriver(), mine}, guest{softDriver(), other};
  CUevent real = nullptr;
  ShareToken token;
  bool idle = true;
  const std::function<bool()> whetherIdle = [this] { return idle; };
  Events() { REQUIRE(softDriver().cuEventCreate(&real, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS); }
  ~Events() { softDriver().cuEventDestroy_v2(real); }
  void share() {
    REQUIRE(owner.offer(10, real, token) == CUDA_SUCCESS);
    REQUIRE(guest.open(20, token) == CUDA_SUCCESS);
  }
};

// A further session, which offers an event, and ends.
struct Owner {
  Owner(Exchange& exchange, unsigned session, CUevent real) : account(exchange, session) {
    REQUIRE(events.offer(1, real, token) == CUDA_SUCCESS);
  }
  ~Owner() {
    events.forget(1, [] { return true; });
  }
  TestAccount account;
  SharedEvents events{softDriver(), account};
  ShareToken token;
};

size_t descriptors() {
  const auto all = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// Such sessions of which the guest opens the event, records it and destroys it.
void comeAndGo(Events& events, unsigned owners) {
  Stream stream;
  for (unsigned i = 0; i < owners; ++i) {
    Owner owner(events.exchange, 100 + i, events.real);
    REQUIRE(events.guest.open(30, owner.token) == CUDA_SUCCESS);
    REQUIRE(events.guest.record(30, stream.stream) == CUDA_SUCCESS);
    stream.finish();
    events.guest.forget(30, events.whetherIdle);
  }
}

struct Spaces : Two {
  Space owner{softDriver(), {0}, mine}, guest{softDriver(), {0}, other};
  CUdeviceptr ownerBase = 0, guestBase = 0;
  Spaces() {
    std::string reason;
    const int first = owner.reserve(~0u, reason);
    REQUIRE(first >= 0);
    const int second = guest.reserve(~(1u << first), reason);
    REQUIRE(second >= 0);
    ownerBase = schema::kSpaces[first].deviceBase;
    guestBase = schema::kSpaces[second].deviceBase;
  }
  void mapAtGuest(uint64_t name, CUdeviceptr at) {
    REQUIRE(guest.mapPhysical(name, at) == CUDA_SUCCESS);
    REQUIRE(guest.setAccess(at, 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CUDA_SUCCESS);
  }
};

// The software GPU's memory is the processor's too.
volatile uint64_t& wordAt(CUdeviceptr address) { return *reinterpret_cast<uint64_t*>(address); }

}  // namespace

// Each takes an address space of its own, of which ThreadSanitizer leaves a process one. No other thread is
// in these.
#ifndef __SANITIZE_THREAD__
TEST_CASE("a piece that two sessions have lives until neither has it, and is charged once") {
  Current current;
  Spaces both;
  REQUIRE(both.owner.mapExtent(0, both.ownerBase, kPiece) == CUDA_SUCCESS);
  ShareToken token, again;
  REQUIRE(both.owner.offer(0, both.ownerBase + 512, 1024, token) == CUDA_SUCCESS);
  REQUIRE(both.owner.offer(0, both.ownerBase + 4096, 16, again) == CUDA_SUCCESS);
  CHECK(both.owner.shared() == 1);  // one piece
  CHECK(both.guest.shared() == 0);
  Space::OpenedPiece opened;
  REQUIRE(both.guest.open(token, 7, opened) == CUDA_SUCCESS);
  CHECK(opened.bytes == kPiece);
  CHECK(opened.offset == 512);
  CHECK(opened.length == 1024);
  CHECK(both.guest.shared() == 1);
  CHECK(both.guest.physicalBytes(0) == 0);
  CHECK(both.mine.used == kPiece);
  CHECK(both.other.used == 0);
  both.mapAtGuest(7, both.guestBase);
  wordAt(both.ownerBase + 512) = 41;
  CHECK(wordAt(both.guestBase + 512) == 41);
  wordAt(both.guestBase + 512) = 42;
  CHECK(wordAt(both.ownerBase + 512) == 42);
  REQUIRE(both.owner.unmapExtent(both.ownerBase) == CUDA_SUCCESS);
  CHECK(both.mine.endedPieces.size() == 1);
  CHECK(both.owner.shared() == 0);
  CHECK(wordAt(both.guestBase + 512) == 42);
  REQUIRE(both.guest.releasePhysical(7) == CUDA_SUCCESS);
  CHECK(both.other.openings() == 1);  // it is mapped
  REQUIRE(both.guest.unmapExtent(both.guestBase) == CUDA_SUCCESS);
  CHECK(both.other.openings() == 0);
  CHECK(both.guest.shared() == 0);
  CHECK(both.mine.used == 0);
}

TEST_CASE("a named piece is offered as a whole; what is not the session's, or not memory, is not") {
  Current current;
  Spaces both;
  REQUIRE(both.owner.createPhysical(0, 5, kPiece) == CUDA_SUCCESS);
  ShareToken token;
  CHECK(both.owner.offer(6, 0, kPiece, token) == CUDA_ERROR_INVALID_VALUE);
  CHECK(both.owner.offer(0, both.ownerBase, 16, token) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(both.owner.offer(5, 0, kPiece, token) == CUDA_SUCCESS);
  Space::OpenedPiece opened;
  REQUIRE(both.guest.open(token, 9, opened) == CUDA_SUCCESS);
  CHECK(both.guest.open(token, 9, opened) == CUDA_ERROR_INVALID_VALUE);  // the name is taken
  CHECK(both.guest.open(token, 0, opened) == CUDA_ERROR_INVALID_VALUE);
  CHECK(both.other.openings() == 1);
  ShareToken further;
  CHECK(both.guest.offer(9, 0, kPiece, further) == CUDA_ERROR_INVALID_VALUE);
  auto& offered = both.exchange.offers.at(token.key[0]);
  offered.part.place = 1;
  CHECK(both.guest.open(token, 10, opened) == CUDA_ERROR_INVALID_HANDLE);
  offered.part = {0, 4097, 0, 1};
  CHECK(both.guest.open(token, 10, opened) == CUDA_ERROR_INVALID_HANDLE);
  close(offered.descriptor);
  offered.descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
  offered.part = {0, kPiece, 0, kPiece};
  CHECK(both.guest.open(token, 10, opened) != CUDA_SUCCESS);
  CHECK(both.other.openings() == 1);
}

#endif

TEST_CASE("a shared event is reached when the stream of its last record is, whoever asks") {
  Current current;
  Events events;
  Stream first, second;
  Gate gate;
  events.share();
  CHECK(events.owner.shared() == 1);
  CHECK(events.guest.shared() == 1);
  CHECK(events.guest.query(20) == CUDA_SUCCESS);  // never recorded
  CHECK(events.guest.wait(20, second.stream) == CUDA_SUCCESS);
  CHECK(second.idle());
  gate.stand(first);
  REQUIRE(events.owner.record(10, first.stream) == CUDA_SUCCESS);
  CHECK(events.owner.query(10) == CUDA_ERROR_NOT_READY);
  CHECK(events.guest.query(20) == CUDA_ERROR_NOT_READY);
  REQUIRE(events.guest.wait(20, second.stream) == CUDA_SUCCESS);
  CHECK_FALSE(second.idle());
  gate.open();
  second.finish();
  CHECK(events.guest.query(20) == CUDA_SUCCESS);
  CHECK(events.owner.record(11, first.stream) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(events.guest.query(10) == CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("what an event was recorded for before it was shared counts") {
  Current current;
  Events events;
  Stream first, second;
  Gate gate;
  gate.stand(first);
  REQUIRE(softDriver().cuEventRecord(events.real, first.stream) == CUDA_SUCCESS);
  events.share();
  CHECK(events.guest.query(20) == CUDA_ERROR_NOT_READY);
  REQUIRE(events.guest.wait(20, second.stream) == CUDA_SUCCESS);
  CHECK_FALSE(second.idle());
  gate.open();
  second.finish();
  CHECK(events.owner.query(10) == CUDA_SUCCESS);
}

TEST_CASE("records of several streams and sessions do not overtake one another, however many there are") {
  Current current;
  Events events;
  Stream held, free, waiting;
  Gate gate;
  events.share();
  gate.stand(held);
  REQUIRE(events.owner.record(10, held.stream) == CUDA_SUCCESS);
  REQUIRE(events.guest.wait(20, waiting.stream) == CUDA_SUCCESS);
  for (int i = 0; i < 20; ++i) {
    REQUIRE(events.guest.record(20, free.stream) == CUDA_SUCCESS);
    free.finish();
    CHECK(events.owner.query(10) == CUDA_SUCCESS);  // the last record alone counts
  }
  CHECK_FALSE(waiting.idle());
  // As many again lose the first one's mark, and wait for it.
  for (int i = 0; i < 20; ++i) REQUIRE(events.guest.record(20, free.stream) == CUDA_SUCCESS);
  CHECK(events.owner.query(10) == CUDA_ERROR_NOT_READY);
  CHECK_FALSE(waiting.idle());
  gate.open();
  waiting.finish();
  free.finish();
  CHECK(events.owner.query(10) == CUDA_SUCCESS);
}

TEST_CASE("what a session that has ended had recorded is reached, and nothing else is") {
  Current current;
  Events events;
  Stream dying, living, waiting;
  Gate dead, alive;
  events.share();
  alive.stand(living);
  REQUIRE(events.owner.record(10, living.stream) == CUDA_SUCCESS);
  events.owner.gone(2);
  CHECK(events.owner.query(10) == CUDA_ERROR_NOT_READY);
  alive.open();
  living.finish();
  dead.stand(dying);
  REQUIRE(events.guest.record(20, dying.stream) == CUDA_SUCCESS);
  REQUIRE(events.owner.wait(10, waiting.stream) == CUDA_SUCCESS);
  CHECK_FALSE(waiting.idle());
  events.owner.gone(2);
  waiting.finish();
  CHECK(events.owner.query(10) == CUDA_SUCCESS);
  dead.open();
  dying.finish();
}

TEST_CASE("a number of records that another worker has made up does no harm to who looks through them") {
  Current current;
  Events events;
  events.share();
  const auto& offered = events.exchange.offers.at(events.token.key[0]);
  const uint64_t largest = UINT64_MAX;
  REQUIRE(pwrite(offered.descriptor, &largest, sizeof largest, static_cast<off_t>(offered.part.offset)) ==
          ssize_t{sizeof largest});
  events.owner.gone(2);  // returns
  CHECK(events.owner.query(10) == CUDA_ERROR_NOT_READY);
}

TEST_CASE("an event that is destroyed is shared no more, and its handle opens nothing") {
  Current current;
  Events events;
  events.share();
  events.guest.forget(20, events.whetherIdle);
  CHECK(events.guest.shared() == 0);
  CHECK(events.other.openings() == 0);
  events.owner.forget(10, events.whetherIdle);
  CHECK(events.owner.shared() == 0);
  CHECK(events.guest.open(21, events.token) == CUDA_ERROR_INVALID_HANDLE);
  // Its cell takes its turn.
  for (uint64_t name = 100; name < 1500; ++name) {
    ShareToken token;
    REQUIRE(events.owner.offer(name, events.real, token) == CUDA_SUCCESS);
    events.owner.forget(name, events.whetherIdle);
  }
}

TEST_CASE("an event that two threads offer at once has one token, and one cell") {
  Current current;
  Events events;
  std::atomic<unsigned> offers{0};
  ShareToken second;
  std::thread other;
  // The first offer gives the second one time to overtake it.
  events.exchange.onOffer = [&] {
    if (++offers != 1) return;
    other = std::thread([&] {
      softDriver().cuCtxSetCurrent(current.context);
      events.owner.offer(10, events.real, second);
    });
    for (int i = 0; i < 300 && offers == 1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  REQUIRE(events.owner.offer(10, events.real, events.token) == CUDA_SUCCESS);
  other.join();
  CHECK(second == events.token);
  CHECK(events.exchange.offers.size() == 1);
  events.owner.forget(10, events.whetherIdle);
  CHECK(events.exchange.offers.empty());
}

TEST_CASE("sessions that come, share an event and go leave no descriptors behind") {
  Current current;
  Events events;
  comeAndGo(events, 20);
  const size_t before = descriptors();
  comeAndGo(events, 20);
  CHECK(descriptors() == before);
  // What streams may have yet to look at stays until they are idle.
  events.idle = false;
  comeAndGo(events, 20);
  CHECK(descriptors() > before);
  events.idle = true;
  comeAndGo(events, 1);
  CHECK(descriptors() == before);
}

TEST_CASE("an event that is open keeps its session's cells, and destroyed it can be opened again") {
  Current current;
  Events events;
  Stream owning, waiting;
  events.share();
  const auto recordAndWait = [&](uint64_t name) {
    Gate gate;
    gate.stand(owning);
    REQUIRE(events.owner.record(10, owning.stream) == CUDA_SUCCESS);
    REQUIRE(events.guest.wait(name, waiting.stream) == CUDA_SUCCESS);
    CHECK_FALSE(waiting.idle());
    gate.open();
    waiting.finish();
    CHECK(events.guest.query(name) == CUDA_SUCCESS);
  };
  recordAndWait(20);
  comeAndGo(events, 40);
  recordAndWait(20);
  events.guest.forget(20, events.whetherIdle);
  comeAndGo(events, 40);
  REQUIRE(events.guest.open(21, events.token) == CUDA_SUCCESS);
  recordAndWait(21);
}

TEST_CASE("what a session that has ended had recorded is reached though its event is destroyed here") {
  Current current;
  Events events;
  Stream dying, waiting;
  Gate gate;
  events.share();
  gate.stand(dying);
  REQUIRE(events.owner.record(10, dying.stream) == CUDA_SUCCESS);
  REQUIRE(events.guest.wait(20, waiting.stream) == CUDA_SUCCESS);
  events.idle = false;
  events.guest.forget(20, events.whetherIdle);
  comeAndGo(events, 40);
  CHECK_FALSE(waiting.idle());
  events.guest.gone(1);
  waiting.finish();
  gate.open();
  dying.finish();
}
