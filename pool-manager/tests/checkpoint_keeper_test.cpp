// What a lease's holder keeps of what the server sends: whole or not at all, within its budget; and what it
// brings to another server.
#include "schema/checkpoint_keeper.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include "catch.h"
#include "pool-manager/cli/session_opener.h"
#include "pool-manager/convert.h"
#include "schema/handshake.h"
#include "schema/protocol.h"
#include "schema/session.capnp.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::cli;
using namespace gpupool::test;

namespace {

constexpr uint64_t kUnit = 4096;  // by which room is counted
const Id kSession{3, 4};

std::span<const std::byte> view(const std::string& text) { return std::as_bytes(std::span(text)); }

// A server that knows the lease's key, as far as the handshake's end. Then the test speaks for it.
struct Bench {
  Bench() : io(kj::setupAsyncIo()) {
    lease.id = {1, 2};
    lease.key = std::string(32, 'k');
    lease.server.name = "a";
    lease.server.localPath = folder.path + "/server";
    lease.server.bootId = pool::bootId();
    lease.server.rowsHash = 0x1234;
    auto address =
        io.provider->getNetwork().parseAddress(("unix:" + lease.server.localPath).c_str()).wait(io.waitScope);
    listener = address->listen();
    settings.room = {[this](uint64_t more) -> std::string {
                       if (used + more > 100 * kUnit) return "no room";
                       used += more;
                       return "";
                     },
                     [this](uint64_t less) { used -= less; }};
    settings.pieceBound = 300 * kj::MILLISECONDS;
    make();
  }
  void make() { keeper.emplace(io.provider->getTimer(), settings); }

  struct Hello {
    kj::Own<kj::AsyncIoStream> stream;
    bool keeps = false;
    uint64_t epoch = 0, bytes = 0, lastFrame = 0;
    Id brings;
  };
  kj::Promise<Hello> accept() {
    return listener->accept().then([this](kj::Own<kj::AsyncIoStream> stream) {
      auto& from = *stream;
      return capnp::readMessage(from).then(
          [this, stream = kj::mv(stream)](kj::Own<capnp::MessageReader> message) mutable {
            const auto hello = message->getRoot<schema::SessionHello>();
            auto heard = kj::heap<Hello>();
            heard->keeps = hello.getKeeps();
            heard->epoch = hello.getEpoch();
            heard->brings = schema::read(hello.getBrings().getSession());
            heard->bytes = hello.getBrings().getBytes();
            heard->lastFrame = hello.getBrings().getLastFrame();
            const std::string mine(32, 's'), theirs = schema::bytes(hello.getClientNonce());
            const auto proof = schema::handshakeProof(
                view(lease.key), schema::kRoleServer,
                {schema::read(hello.getSession()), hello.getEpoch(), view(theirs), view(mine), "a"});
            auto challenge = kj::heap<capnp::MallocMessageBuilder>();
            auto out = challenge->initRoot<schema::SessionChallenge>();
            out.setServerNonce(schema::data(mine));
            out.setProof({reinterpret_cast<const kj::byte*>(proof.data()), proof.size()});
            out.setProtocol(schema::poolProtocol());
            out.setRowsHash(lease.server.rowsHash);
            auto answer = kj::heap<capnp::MallocMessageBuilder>();
            auto said = answer->initRoot<schema::SessionAnswer>();
            said.setOk(refuses.empty());
            said.setError(refuses);
            auto& to = *stream;
            heard->stream = kj::mv(stream);
            return capnp::writeMessage(to, *challenge)
                .attach(kj::mv(challenge))
                .then([&to] { return capnp::readMessage(to); })
                .then([&to, answer = kj::mv(answer)](kj::Own<capnp::MessageReader>) mutable {
                  auto written = capnp::writeMessage(to, *answer);
                  return written.attach(kj::mv(answer));
                })
                .then([heard = kj::mv(heard)]() mutable { return kj::mv(*heard); });
          });
    });
  }
  // The holder connects, to keep.
  void connect() {
    auto accepted = accept();
    taking = keeper->take(opener()).eagerlyEvaluate(
        [this](kj::Exception&& error) { ended = error.getDescription().cStr(); });
    server = accepted.wait(io.waitScope);
    REQUIRE(server.keeps);
  }
  schema::CheckpointKeeper::Open opener() {
    return [this](const schema::CheckpointKeeper::Fill& fill) {
      return openWithout(*io.provider, lease, "", fill);
    };
  }
  struct Block {
    uint32_t bytes = 0, base = 0;
  };
  void head(uint64_t number, const Id& session, uint64_t bytes, size_t digest = 32,
            const std::vector<Block>& blocks = {}, uint64_t base = 0) {
    capnp::MallocMessageBuilder message;
    auto to = message.initRoot<schema::SessionCheckpoint>();
    to.setNumber(number);
    schema::write(session, to.initSession());
    to.setEpoch(headEpoch);
    to.setBytes(bytes);
    to.setLastFrame(number * 10);
    to.setDigest(schema::data(std::string(digest, static_cast<char>(number))));
    to.setBase(base);
    auto list = to.initBlocks(static_cast<unsigned>(blocks.size()));
    for (unsigned i = 0; i < list.size(); ++i) {
      list[i].setBytes(blocks[i].bytes);
      list[i].setBase(blocks[i].base);
    }
    capnp::writeMessage(*server.stream, message).wait(io.waitScope);
  }
  void body(uint64_t bytes, char fill) {
    const std::string text(bytes, fill);
    server.stream->write(text.data(), text.size()).wait(io.waitScope);
  }
  std::string answerTo(uint64_t number) {
    auto message = capnp::readMessage(*server.stream).wait(io.waitScope);
    const auto answer = message->getRoot<schema::CheckpointAnswer>();
    CHECK(answer.getNumber() == number);
    return schema::text(answer.getError());
  }
  std::string send(uint64_t number, const Id& session, uint64_t bytes) {
    head(number, session, bytes);
    body(bytes, static_cast<char>('a' + number));
    return answerTo(number);
  }
  void pause(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }
  // What it brings as that epoch, to a server that says `answer`; sets `server` and `refused`.
  std::string bring(const std::string& answer = "", uint64_t epoch = 2, bool later = false) {
    schema::CheckpointKeeper::Next next{kSession, epoch, 0, 0, "", ""};
    auto accepted = accept();
    refused.clear();
    auto brought = keeper->bring(opener(), next).eagerlyEvaluate([this](kj::Exception&& error) {
      refused = toFailure(error).text;
    });
    server = accepted.wait(io.waitScope);
    std::string bytes(server.bytes, '\0');
    server.stream->read(bytes.data(), bytes.size()).wait(io.waitScope);
    capnp::MallocMessageBuilder message;
    auto said = message.initRoot<schema::CheckpointAnswer>();
    said.setError(answer);
    said.setLater(later);
    capnp::writeMessage(*server.stream, message).wait(io.waitScope);
    brought.wait(io.waitScope);
    return bytes;
  }

  Folder folder;
  uint64_t used = 0;
  uint64_t headEpoch = 1;  // in which the server has made what it sends
  kj::AsyncIoContext io;
  pool::Lease lease;
  schema::CheckpointKeeper::Settings settings;
  kj::Own<kj::ConnectionReceiver> listener;
  std::optional<schema::CheckpointKeeper> keeper;
  Hello server;
  std::string ended, refused;
  std::string refuses;  // what the server says to who connects, instead of letting it in
  kj::Promise<void> taking = nullptr;
};

}  // namespace

TEST_CASE_METHOD(Bench, "the last whole checkpoint of a session is kept, and brought") {
  SECTION("in memory") {}
  SECTION("in a folder") {
    settings.folder = folder.path;
    make();
  }
  connect();
  CHECK(keeper->bytes() == 0);
  CHECK(send(1, kSession, 20 * kUnit) == "");
  CHECK(send(2, {9, 9}, 10 * kUnit) == "");
  CHECK(send(3, kSession, 30 * kUnit) == "");
  CHECK(keeper->bytes() == 40 * kUnit);
  CHECK(bring() == std::string(30 * kUnit, 'd'));
  CHECK(refused.empty());
  CHECK(server.brings == kSession);
  CHECK(server.epoch == 2);
  CHECK(server.lastFrame == 30);
  CHECK(keeper->tries(kSession) == 1);
  bring("no room");
  CHECK(refused == "no room");
  CHECK(keeper->why(kSession) == "no room");
  CHECK(keeper->tries(kSession) == 2);
}

TEST_CASE_METHOD(Bench, "where nothing is kept of a session, it begins anew") {
  CHECK(bring() == "");
  CHECK(refused.empty());
  CHECK(server.brings == kSession);
  CHECK(server.epoch == 2);
  CHECK(keeper->tries(kSession) == 1);
  bring("no GPU");
  CHECK(keeper->why(kSession) == "no GPU");
  CHECK(keeper->tries(kSession) == 2);
  connect();
  headEpoch = 2;
  CHECK(send(1, kSession, kUnit) == "");
  CHECK(keeper->tries(kSession) == 0);
  CHECK(bring() == std::string(kUnit, 'b'));
}

TEST_CASE_METHOD(Bench, "a server that refuses a session at once has been tried, too") {
  refuses = "it shares memory";
  auto accepted = accept();
  const schema::CheckpointKeeper::Next next{kSession, 2, 0, 0, "", ""};
  auto brought = keeper->bring(opener(), next).eagerlyEvaluate([this](kj::Exception&& error) {
    refused = toFailure(error).text;
  });
  server = accepted.wait(io.waitScope);
  brought.wait(io.waitScope);
  CHECK(contains(refused, "it shares memory"));
  CHECK(contains(keeper->why(kSession), "it shares memory"));
  CHECK(keeper->tries(kSession) == 1);
}

TEST_CASE_METHOD(Bench,
                 "a server without room has not been tried, for a time; and is not asked all the time") {
  settings.roomPause = 100 * kj::MILLISECONDS;
  settings.roomBound = 500 * kj::MILLISECONDS;
  make();
  connect();
  REQUIRE(send(1, kSession, kUnit) == "");
  const auto began = io.provider->getTimer().now();
  int asked = 0;
  for (; keeper->tries(kSession) == 0; ++asked) {
    REQUIRE(io.provider->getTimer().now() - began < 20 * kj::SECONDS);
    bring("no room", 2, true);
    CHECK(contains(refused, "no room"));
    std::string again;  // and is not connected to
    kj::evalNow([&] {
      return keeper->bring(opener(), {kSession, 2, 0, 0, "", ""});
    }).eagerlyEvaluate([&](kj::Exception&& error) {
        again = toFailure(error).text;
      }).wait(io.waitScope);
    CHECK(contains(again, "no room"));
    pause(110);
  }
  CHECK(asked > 1);
  CHECK(io.provider->getTimer().now() - began >= settings.roomBound);
  CHECK(bring("broken", 2) == std::string(kUnit, 'b'));
  CHECK(keeper->tries(kSession) == 2);
  bring("no room", 2, true);  // another server
  CHECK(keeper->tries(kSession) == 2);
}

TEST_CASE_METHOD(Bench, "of a later one only the blocks come that the one before has not") {
  connect();
  head(1, kSession, 7 * kUnit, 32, {{3 * kUnit}, {2 * kUnit}, {2 * kUnit}});
  body(3 * kUnit, 'a');
  body(4 * kUnit, 'b');
  CHECK(answerTo(1) == "");
  head(2, kSession, 8 * kUnit, 32, {{2 * kUnit, 3}, {kUnit}, {3 * kUnit, 1}, {2 * kUnit}}, 1);
  body(kUnit, 'c');
  body(2 * kUnit, 'd');
  CHECK(answerTo(2) == "");
  CHECK(keeper->bytes() == 8 * kUnit);  // nothing is kept of what only the first one had
  // 95 of 100 units would be used: it is passed over, and the last one stays what it is.
  head(3, kSession, 100 * kUnit, 32, {{3 * kUnit, 3}, {97 * kUnit}}, 2);
  body(97 * kUnit, 'e');
  CHECK(contains(answerTo(3), "no room"));
  CHECK(keeper->bytes() == 8 * kUnit);
  head(4, kSession, 4 * kUnit, 32, {{2 * kUnit, 4}, {2 * kUnit, 1}}, 2);
  CHECK(answerTo(4) == "");
  CHECK(keeper->bytes() == 4 * kUnit);
  CHECK(bring() == std::string(2 * kUnit, 'd') + std::string(2 * kUnit, 'b'));
}

TEST_CASE_METHOD(Bench, "a server that names blocks which are not there is left, and the last one is kept") {
  connect();
  head(1, kSession, 2 * kUnit, 32, {{kUnit}, {kUnit}});
  body(2 * kUnit, 'a');
  CHECK(answerTo(1) == "");
  SECTION("of another checkpoint") { head(2, kSession, kUnit, 32, {{kUnit, 1}}, 7); }
  SECTION("of another session") { head(2, {9, 9}, kUnit, 32, {{kUnit, 1}}, 1); }
  SECTION("of none") { head(2, kSession, kUnit, 32, {{kUnit, 1}}); }
  SECTION("beyond the last one") { head(2, kSession, kUnit, 32, {{kUnit, 3}}, 1); }
  SECTION("of another length") { head(2, kSession, 2 * kUnit, 32, {{2 * kUnit, 1}}, 1); }
  SECTION("of no length") { head(2, kSession, kUnit, 32, {{kUnit, 1}, {0, 1}}, 1); }
  SECTION("less than it says") { head(2, kSession, 3 * kUnit, 32, {{kUnit, 1}, {kUnit}}, 1); }
  SECTION("more than it says") { head(2, kSession, kUnit, 32, {{kUnit, 1}, {kUnit}}, 1); }
  SECTION("new ones of more than 4 MiB") { head(2, kSession, 5 << 20, 32, {{5 << 20}}, 1); }
  SECTION("over an earlier connection") {
    server.stream = nullptr;
    for (int i = 0; i < 500 && ended.empty(); ++i) pause(10);
    ended.clear();
    connect();
    head(2, kSession, kUnit, 32, {{kUnit, 1}}, 1);
  }
  for (int i = 0; i < 500 && ended.empty(); ++i) pause(10);
  CHECK(!ended.empty());
  CHECK(keeper->bytes() == 2 * kUnit);
  CHECK(bring() == std::string(2 * kUnit, 'a'));
}

TEST_CASE_METHOD(Bench, "what does not fit is passed over, and the one before is kept") {
  connect();
  CHECK(send(1, kSession, 60 * kUnit) == "");
  CHECK(contains(send(2, kSession, 50 * kUnit), "no room"));
  CHECK(contains(send(3, kSession, 1000 * kUnit), "no room"));
  CHECK(send(4, kSession, 40 * kUnit) == "");
  CHECK(keeper->bytes() == 40 * kUnit);
  CHECK(bring() == std::string(40 * kUnit, 'e'));
}

TEST_CASE_METHOD(Bench, "a program that has ended leaves room for others") {
  connect();
  CHECK(send(1, kSession, 60 * kUnit) == "");
  CHECK(send(2, {9, 9}, 30 * kUnit) == "");
  keeper->forget(kSession);
  CHECK(keeper->bytes() == 30 * kUnit);
  CHECK(contains(send(3, kSession, 10 * kUnit), "has ended"));     // it was on its way
  head(3, kSession, 4 * kUnit, 32, {{3 * kUnit, 1}, {kUnit}}, 1);  // likewise, without what there was
  body(kUnit, 'x');
  CHECK(contains(answerTo(3), "has ended"));
  CHECK(keeper->bytes() == 30 * kUnit);
  CHECK(send(4, {9, 9}, 60 * kUnit) == "");
}

TEST_CASE_METHOD(Bench, "one that does not come whole is none") {
  connect();
  CHECK(send(1, kSession, 10 * kUnit) == "");
  head(2, kSession, 20 * kUnit);
  body(5 * kUnit, 'x');
  SECTION("the server dies in the middle") { server.stream = nullptr; }
  SECTION("it sends nothing any more") {}
  for (int i = 0; i < 500 && ended.empty(); ++i) pause(10);
  CHECK(!ended.empty());
  CHECK(keeper->bytes() == 10 * kUnit);
  CHECK(bring() == std::string(10 * kUnit, 'b'));
}

TEST_CASE_METHOD(Bench, "a server that sends nonsense is left") {
  connect();
  SECTION("no bytes") { head(1, kSession, 0); }
  SECTION("no digest") { head(1, kSession, 10, 31); }
  SECTION("no message") { body(64, '\xff'); }
  for (int i = 0; i < 500 && ended.empty(); ++i) pause(10);
  CHECK(!ended.empty());
  CHECK(keeper->bytes() == 0);
}

TEST_CASE_METHOD(Bench, "a folder that takes nothing: why") {
  settings.folder = folder.path + "/none";
  make();
  connect();
  CHECK(contains(send(1, kSession, kUnit), "No such file"));
  CHECK(keeper->bytes() == 0);
}

TEST_CASE_METHOD(Bench, "what a session has left behind is not kept any more") {
  connect();
  CHECK(send(1, kSession, 10 * kUnit) == "");
  CHECK(bring("", 3) == std::string(10 * kUnit, 'b'));
  // The server from which it was taken is only slow, and still sends. It is of epoch 1.
  connect();
  CHECK(contains(send(2, kSession, 10 * kUnit), "has gone on"));
  CHECK(keeper->bytes() == 10 * kUnit);
  CHECK(bring("", 3) == std::string(10 * kUnit, 'b'));
  // Nor may an earlier one come back.
  const schema::CheckpointKeeper::Next next{kSession, 2, 0, 0, "", ""};
  kj::evalNow([&] { return keeper->bring(opener(), next); })
      .then([] {}, [this](kj::Exception&& error) { refused = toFailure(error).text; })
      .wait(io.waitScope);
  CHECK(contains(refused, "later epoch"));
}
