// Checkpoints that holders bring, and those that go to them: what the desk makes of a holder that is slow,
// gone, has no room, or says nonsense. From a program's memory to a holder they go in the tests of failover.
#include "server/front/checkpoint_desk.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include <optional>

#include "catch.h"
#include "schema/session.capnp.h"
#include "server/tests/support.h"
#include "server/worker/page_layout.h"
#include "server/worker/stream_layout.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

constexpr uint64_t kMost = 1 << 20;

struct Bench {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  std::shared_ptr<KeepBudget> budget = std::make_shared<KeepBudget>(kMost);
  CheckpointDesk desk{timer, budget, {200 * kj::MILLISECONDS, 200 * kj::MILLISECONDS}};

  // Why a session of so many bytes, of which these come, is not taken; "": it is.
  std::string take(uint64_t bytes, const std::string& come, bool closes = false) {
    auto [holder, server] = connection(*io.lowLevelProvider);
    BroughtSession brought;
    brought.facts.lease = {1, 1};
    brought.file.bytes = bytes;
    allRead = false;
    auto sent = holder->write(come.data(), come.size())
                    .then([this] { allRead = true; })
                    .eagerlyEvaluate([](kj::Exception&&) {});
    if (closes) holder->shutdownWrite();
    std::string why;
    kj::evalNow([&, &from = *server] { return desk.take(from, brought); })
        .then([](std::shared_ptr<CheckpointDesk::File>&&) {},
              [&](kj::Exception&& error) { why = error.getDescription().cStr(); })
        .wait(io.waitScope);
    io.waitScope.poll();
    return why;
  }
  bool allRead = false;  // of what came
  bool allFree() {
    const bool free = budget->take(kMost).empty();
    if (free) budget->give(kMost);
    return free;
  }
};

// A session with one extent of three pages, each full of its own letter.
struct Pages {
  std::shared_ptr<PageStore> store =
      PageStore::create({[](uint64_t) { return std::string(); }, [](uint64_t) {}});

  std::shared_ptr<const KeptPages> make(const std::string& letters) const {
    auto kept = std::make_shared<KeptPages>();
    capnp::MallocMessageBuilder message;
    auto record = message.initRoot<schema::SessionRecord>();
    record.initPieces(1)[0].setBytes(letters.size() * kPageBytes);
    const auto words = capnp::messageToFlatArray(message);
    add(std::as_bytes(std::span(words.begin(), words.size())), *kept, kept->recordPages);
    kept->record = contentDigest(std::as_bytes(std::span(words.begin(), words.size())));
    for (const char letter : letters) {
      const std::string page(kPageBytes, letter);
      add(std::as_bytes(std::span(page)), *kept, kept->contents);
    }
    return kept;
  }
  void add(std::span<const std::byte> bytes, KeptPages& kept, PageStore::Pages& pages) const {
    REQUIRE(store->put(bytes, checksumOf(bytes), pages) == "");
    kept.facts.bytes += bytes.size();
  }
};

// The holder's end of the connection to the desk.
struct Offers {
  static constexpr uint64_t kRoom = 64 << 20;
  kj::AsyncIoContext io = kj::setupAsyncIo();
  CheckpointDesk desk{io.provider->getTimer(), std::make_shared<KeepBudget>(kRoom), {}};
  const Id lease{1, 1};
  Pages pages;
  kj::Own<kj::AsyncIoStream> holder;

  Offers() { connect(); }
  void connect() {
    auto [mine, servers] = connection(*io.lowLevelProvider);
    holder = kj::mv(mine);
    desk.keep(kj::mv(servers), lease);
  }
  struct Came {
    uint64_t base = 0, bytes = 0;  // that came, of the whole file
    uint64_t whole = 0;
  };
  kj::Promise<Came> take(const std::string& answer) {
    return capnp::readMessage(*holder).then([this, answer](kj::Own<capnp::MessageReader> message) {
      const auto head = message->getRoot<schema::SessionCheckpoint>();
      Came came{head.getBase(), 0, head.getBytes()};
      for (const auto block : head.getBlocks()) came.bytes += block.getBase() == 0 ? block.getBytes() : 0;
      auto body = kj::heapArray<kj::byte>(came.bytes);
      auto reply = kj::heap<capnp::MallocMessageBuilder>();
      auto said = reply->initRoot<schema::CheckpointAnswer>();
      said.setNumber(head.getNumber());
      said.setError(answer);
      auto read = holder->read(body.begin(), body.size());
      return read.attach(kj::mv(body))
          .then([this, &reply = *reply] { return capnp::writeMessage(*holder, reply); })
          .attach(kj::mv(reply))
          .then([came] { return came; });
    });
  }
  // Why the holder does not have these; "": it has. Sets `came`.
  std::string offer(const std::string& letters, const std::string& answer = "") {
    SessionFacts facts;
    facts.lease = lease;
    facts.session = {2, 2};
    facts.epoch = 1;
    auto taken = take(answer).then([this](Came&& now) { came = now; }).eagerlyEvaluate(nullptr);
    std::string why;
    desk.offer(facts, pages.make(letters))
        .then([](uint64_t) {}, [&](kj::Exception&& error) { why = error.getDescription().cStr(); })
        .wait(io.waitScope);
    taken.wait(io.waitScope);
    return why;
  }
  Came came;
};

}  // namespace

TEST_CASE_METHOD(Offers,
                 "a holder that has no room for a checkpoint stays connected, and has the one before") {
  REQUIRE(offer("abc") == "");
  CHECK(came.base == 0);
  CHECK(came.bytes == came.whole);
  const uint64_t whole = came.bytes;
  CHECK(contains(offer("abd", "no room for it"), "its holder: no room for it"));
  CHECK(came.base == 1);
  REQUIRE(desk.has(lease));
  CHECK(desk.ready(lease));
  // The next one travels as what has changed, and since the one that the holder has.
  REQUIRE(offer("abe") == "");
  CHECK(came.base == 1);
  CHECK(came.bytes < whole / 2);
  CHECK(came.whole == whole);
  REQUIRE(offer("abe") == "");
  CHECK(came.base == 3);
  CHECK(came.bytes < kPageBytes);
}

TEST_CASE_METHOD(Offers, "a holder that answers something else has to connect anew") {
  REQUIRE(offer("abc") == "");
  auto answered = capnp::readMessage(*holder).then([this](kj::Own<capnp::MessageReader>) {
    auto reply = kj::heap<capnp::MallocMessageBuilder>();
    reply->initRoot<schema::CheckpointAnswer>().setNumber(77);
    auto written = capnp::writeMessage(*holder, *reply);
    return written.attach(kj::mv(reply));
  });
  SessionFacts facts;
  facts.lease = lease;
  facts.session = {2, 2};
  const auto same = pages.make("abc");  // nothing of it has to travel
  CHECK(contains(failure([&] { desk.offer(facts, same).wait(io.waitScope); }), "answers something else"));
  answered.wait(io.waitScope);
  CHECK(!desk.has(lease));
  connect();
  REQUIRE(offer("abc") == "");
  CHECK(came.base == 0);
  CHECK(came.bytes == came.whole);
}

TEST_CASE_METHOD(Offers, "of a holder that is gone no system call is said") {
  SessionFacts facts;
  facts.lease = lease;
  facts.session = {2, 2};
  holder = nullptr;
  const auto offer = [&] { desk.offer(facts, pages.make("abc")).wait(io.waitScope); };
  CHECK(failure(offer) == "its holder is gone");
  CHECK(!desk.has(lease));
}

TEST_CASE("what a holder brings is checked before anybody uses it, and counts until it is refused") {
  Bench bench;
  CHECK(contains(bench.take(4096, std::string(4096, 'x')), "damaged"));
  CHECK(contains(bench.take(4096, std::string(4096, '\0')), "damaged"));
  CHECK(!bench.take(4096, std::string(100, 'x'), true).empty());  // it ends early
  CHECK(!bench.take(4096, std::string(100, 'x')).empty());        // and no more
  CHECK(contains(bench.take(kMost + 1, ""), "no room"));
  CHECK(contains(bench.take(UINT64_MAX, ""), "no room"));
  CHECK(bench.allFree());
}

TEST_CASE("what has no room for now is passed over, so that its sender hears why") {
  Bench bench;
  REQUIRE(bench.budget->take(100).empty());
  CHECK(contains(bench.take(kMost, std::string(kMost, 'x')), "no room"));
  CHECK(bench.allRead);
  bench.budget->give(100);
  CHECK(bench.allFree());
}

TEST_CASE("a budget is never more than it is") {
  auto budget = std::make_shared<KeepBudget>(100);
  CHECK(budget->take(60).empty());
  CHECK(!budget->take(50).empty());
  CHECK(!budget->take(UINT64_MAX - 10).empty());
  CHECK(budget->has(40));
  CHECK_FALSE(budget->has(41));
  CHECK(budget->take(40).empty());
  CHECK_FALSE(budget->has(1));
  {
    const auto room = budget->share(40);
    CHECK(!budget->take(1).empty());
  }
  CHECK(budget->take(40).empty());
}

TEST_CASE("a lease has one holder, the last one, and none when it is gone") {
  Bench bench;
  const Id lease{1, 1};
  LeaseTable leases{twoDevices()};
  CHECK(grant(leases, lease, 1, {1}) == "");
  CHECK(!bench.desk.has(lease));
  auto first = connection(*bench.io.lowLevelProvider);
  bench.desk.keep(kj::mv(first.second), lease);
  CHECK(bench.desk.ready(lease));
  auto second = connection(*bench.io.lowLevelProvider);
  bench.desk.keep(kj::mv(second.second), lease);
  char byte = 0;
  CHECK(first.first->tryRead(&byte, 1, 1).wait(bench.io.waitScope) == 0);  // it is closed
  bench.desk.keepOnly(leases);
  CHECK(bench.desk.has(lease));
  bench.desk.keepOnly(LeaseTable(twoDevices()));
  CHECK(!bench.desk.has(lease));
}

TEST_CASE_METHOD(Offers, "a standby that was replaced is turned away while the next one is there") {
  const auto come = [this](uint64_t number, const std::string& name) {
    auto [mine, servers] = connection(*io.lowLevelProvider);
    desk.keep(kj::mv(servers), lease, {number, name});
    return kj::mv(mine);
  };
  const auto isClosed = [this](kj::AsyncIoStream& stream) {
    char byte = 0;
    return stream.tryRead(&byte, 1, 1)
        .then([](size_t got) { return got == 0; })
        .exclusiveJoin(io.provider->getTimer().afterDelay(50 * kj::MILLISECONDS).then([] { return false; }))
        .wait(io.waitScope);
  };
  auto next = come(7, "next");  // in place of the lease's holder
  CHECK(isClosed(*holder));
  CHECK(desk.who(lease).text() == "its standby next");
  auto before = come(5, "before");
  CHECK(isClosed(*before));
  auto another = come(0, "");  // its holder, which has not heard yet that there is one
  CHECK(isClosed(*another));
  CHECK(desk.who(lease).text() == "its standby next");
  SECTION("it says no") {
    holder = kj::mv(next);
    CHECK(contains(offer("abc", "no room"), "its standby next: no room"));
  }
  SECTION("it has gone") {
    next = nullptr;
    holder = come(0, "");
    CHECK(desk.who(lease).text() == "its holder");
    CHECK(offer("abc") == "");
  }
  SECTION("a later one comes while it is sent a checkpoint, which it does not take") {
    SessionFacts facts;
    facts.lease = lease;
    facts.session = {2, 2};
    facts.epoch = 1;
    std::string why;
    auto offered =
        desk.offer(facts, pages.make("abc"))
            .then([](uint64_t) {}, [&](kj::Exception&& error) { why = error.getDescription().cStr(); });
    CHECK_FALSE(desk.ready(lease));
    auto later = come(9, "later");
    offered.wait(io.waitScope);
    CHECK(contains(why, "another one keeps"));
    CHECK(desk.ready(lease));
    holder = kj::mv(later);
    CHECK(offer("abc") == "");
  }
}
