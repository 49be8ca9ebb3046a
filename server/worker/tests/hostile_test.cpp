// What a session does with a client that is not ours: every bad byte ends it with a reason, or is an error
// and no more. Of memory: hostile_memory_test.cpp.
#include "base/hmac.h"
#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

namespace {

std::string greetingRefused(const schema::ClientHello& hello,
                            CUresult status = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) {
  Client client;
  client.sayHello(hello);
  CHECK(client.hello.status == static_cast<uint32_t>(status));
  CHECK(client.hello.deviceCount == 0);
  REQUIRE(eventually([&] { return client.ended(); }));
  CHECK(client.reason() == client.hello.text);
  return client.hello.text;
}

schema::ImageName nameOf(const std::string& text) {
  schema::ImageName name;
  auto digest = sha256(std::as_bytes(std::span(text)));
  std::memcpy(name.words, digest.data(), sizeof name.words);
  name.bytes = text.size();
  return name;
}

CUresult sendPiece(Client& client, const schema::ImageName& name, size_t offset, const std::string& piece) {
  return client
      .await(ROW("sessionImageData"),
             Arguments().structure(name).value(offset).blob(piece.data(), piece.size()).value(piece.size()))
      .status();
}

}  // namespace

TEST_CASE("greeting: what does not fit is refused in words") {
  auto hello = Client::goodHello();
  SECTION("magic") {
    hello.magic = 0x12345678;
    CHECK(contains(greetingRefused(hello), "not gpupool's"));
  }
  SECTION("protocol") {
    hello.protocol = schema::kProtocolVersion + 1;
    CHECK(contains(greetingRefused(hello), "version mismatch"));
  }
  SECTION("rows") {
    hello.rowsHash ^= 1;
    CHECK(contains(greetingRefused(hello), "version mismatch"));
  }
  SECTION("epoch") {
    hello.epoch = kEpoch + 1;
    CHECK(contains(greetingRefused(hello), "epoch"));
  }
  SECTION("a context of a device that the session has not") {
    hello.contextAhead = schema::kContextAheadOf + 1;
    CHECK(contains(greetingRefused(hello), "not gpupool's"));
  }
  SECTION("no common space") {
    hello.spaces = 0;
    CHECK(contains(greetingRefused(hello, CUDA_ERROR_OUT_OF_MEMORY), "no common address space"));
  }
}

TEST_CASE("greeting: a message of another size is refused") {
  Client client;
  uint64_t half = schema::kClientMagic;
  client.send(Channel::call, &half, sizeof half);
  REQUIRE(eventually([&] { return client.ended(); }));
  CHECK(contains(client.reason(), "not gpupool's"));
}

TEST_CASE("greeting: a session that is ended meanwhile says why") {
  Client client;
  client.session->stop("the lease has ended");
  auto message = client.wire->receive(Channel::call, within());
  REQUIRE(message.size() == sizeof client.hello);
  std::memcpy(&client.hello, message.data(), sizeof client.hello);
  CHECK(client.hello.status == CUDA_ERROR_DEVICE_UNAVAILABLE);
  CHECK(std::string(client.hello.text) == "the lease has ended");
}

TEST_CASE("a malformed frame ends the session with a reason and nothing else") {
  Client client;
  client.greet();
  SECTION("shorter than its header") {
    std::byte few[sizeof(Frame) - 8] = {};
    client.send(Channel::call, few, sizeof few);
    CHECK(contains(client.endedWith(), "shorter than its header"));
  }
  SECTION("out of order") {
    auto frame = client.frame(ROW("sessionImageOffer"), Frame::kAwait);
    ++frame.seq;
    client.send(frame, Arguments().structure(schema::ImageName{}).value(1).span());
    CHECK(contains(client.endedWith(), "out of order"));
  }
  SECTION("of another epoch") {
    auto frame = client.frame(ROW("sessionImageOffer"), Frame::kAwait);
    frame.epoch = kEpoch - 1;
    client.send(frame, Arguments().structure(schema::ImageName{}).value(1).span());
    CHECK(contains(client.endedWith(), "out of order"));
  }
  SECTION("of no call") {
    client.post(0xdeadbeef, {}, Frame::kAwait);
    CHECK(contains(client.endedWith(), "names no call"));
  }
  SECTION("of a call the client answers itself") {
    client.post(ROW("cuMemGetAddressRange_v2"), {}, Frame::kAwait);
    CHECK(contains(client.endedWith(), "names no call"));
  }
}

TEST_CASE("a malformed aside call ends the session with a reason and nothing else") {
  Client client;
  client.greet();
  const Arguments none;
  Frame frame = Client::header(ROW("sessionOutput"), Frame::kAwait, schema::kAside | 1);
  SECTION("shorter than its header") {
    client.tell(NoticeType::aside, uint64_t{0});
    CHECK(contains(client.endedWith(), "shorter than its header"));
  }
  SECTION("out of order") {
    ++frame.seq;
    client.sendAside(frame, none.span());
    CHECK(contains(client.endedWith(), "frame aside 2 of epoch 3 is out of order: expected aside 1"));
  }
  SECTION("numbered as a frame") {
    frame.seq = 1;
    client.sendAside(frame, none.span());
    CHECK(contains(client.endedWith(), "frame 1 of epoch 3 is out of order: expected aside 1"));
  }
  SECTION("of another epoch") {
    --frame.epoch;
    client.sendAside(frame, none.span());
    CHECK(contains(client.endedWith(), "out of order"));
  }
  SECTION("of no call") {
    frame.call = 0xdeadbeef;
    client.sendAside(frame, none.span());
    CHECK(contains(client.endedWith(), "names no call"));
  }
  SECTION("of a call that may wait for the device") {
    frame.call = ROW("sessionDrain");
    client.sendAside(frame, Arguments().value(0).value(1).span());
    CHECK(contains(client.endedWith(), "sessionDrain is on the wrong channel"));
  }
  SECTION("among the frames") {
    client.post(ROW("sessionOutput"), none, Frame::kAwait);
    CHECK(contains(client.endedWith(), "sessionOutput is on the wrong channel"));
  }
}

TEST_CASE("a frame behind aside calls that never come holds up its own session alone") {
  Client client;
  client.greet();
  auto frame = client.frame(ROW("sessionImageOffer"), Frame::kAwait);
  frame.aside = 2;
  client.send(frame, Arguments().structure(schema::ImageName{}).value(1).span());
  CHECK(client.awaitAside(ROW("sessionOutput"), {}).status() == CUDA_SUCCESS);
  CHECK_FALSE(client.receive(50));
  SECTION("it goes on when they come") {
    client.aside(ROW("sessionOutput"), {});
    auto answer = client.receive();
    REQUIRE(answer);
    CHECK(answer->header.seq == frame.seq);
    CHECK(answer->status() == CUDA_SUCCESS);
  }
  SECTION("goodbye") { client.tell(NoticeType::goodbye, uint64_t{0}); }
  SECTION("the end of the lease") { client.session->stop("the lease is over"); }
  SECTION("the end of the connection") { client.wire->close(); }
  if (!client.ended()) client.wire->close();
  CHECK(eventually([&] { return client.ended(); }));
}

TEST_CASE("arguments that do not fit their row end the session") {
  Client client;
  client.greet();
  const char* call = "sessionImageData";
  schema::ImageName name;
  name.bytes = 8;
  uint64_t data = 0;
  SECTION("truncated") { client.post(ROW("sessionImageData"), Arguments().structure(name), Frame::kAwait); }
  SECTION("a length beyond the frame") {
    client.post(ROW("sessionImageData"),
                Arguments().structure(name).value(0).value(1 << 20).value(data).value(8));
  }
  SECTION("a length that overflows when padded") {
    client.post(ROW("sessionImageData"),
                Arguments().structure(name).value(0).value(~uint64_t{0}).value(data).value(8));
  }
  SECTION("an array and its count disagree") {
    client.post(ROW("sessionImageData"), Arguments().structure(name).value(0).blob(&data, 8).value(9));
  }
  SECTION("an output larger than any") {
    call = "sessionMirrorCollect";
    client.aside(ROW("sessionMirrorCollect"),
                 Arguments().value(0).value(0).value(0).value(0).value(1).value(1).value(uint64_t{1} << 40),
                 Frame::kAwait);
  }
  SECTION("a handle of the worker's half is no name to mint") {
    call = "cuDevicePrimaryCtxRetain";
    client.post(
        ROW("cuDevicePrimaryCtxRetain"),
        Arguments().value(makeHandle(handles::Kind::context, schema::kServerIndexBit | 1, 1)).value(0),
        Frame::kAwait);
  }
  SECTION("a handle of another kind is no name to mint") {
    call = "cuDevicePrimaryCtxRetain";
    client.post(ROW("cuDevicePrimaryCtxRetain"), Arguments().value(kStream).value(0), Frame::kAwait);
  }
  SECTION("beside the executor too") {
    call = "sessionDrain";
    client.post(ROW("sessionDrain"), Arguments().value(0), Frame::kAwait);
  }
  std::string told = client.endedWith();
  CHECK(contains(told, "do not fit"));
  CHECK(contains(told, call));
}

TEST_CASE("a wrong handle or device is an error and the session goes on") {
  Client client;
  client.open();
  auto stranger = makeHandle(handles::Kind::stream, 77, 1);
  for (uint64_t bad : {stranger, kContext, uint64_t{0x7fff12345678}})
    CHECK(client.await(ROW("cuStreamDestroy_v2"), Arguments().value(bad)).status() ==
          CUDA_ERROR_INVALID_HANDLE);
  CHECK(client
            .await(ROW("sessionExtentMap"),
                   Arguments().value(1).value(client.space().deviceBase).value(2 * kMiB))
            .status() == CUDA_ERROR_INVALID_DEVICE);
  CHECK(client
            .await(ROW("sessionExtentMap"),
                   Arguments().value(0).value(client.space().deviceBase).value(2 * kMiB))
            .status() == CUDA_SUCCESS);
  CHECK_FALSE(client.ended());
}

TEST_CASE("images are what their names say") {
  Client client;
  client.greet();
  const std::string text = "an image of thirty-two bytes .. ";
  auto have = [&](const schema::ImageName& name) {
    auto answer = client.await(ROW("sessionImageOffer"), Arguments().structure(name).value(1));
    REQUIRE(answer.outputs.size() == 8);
    return std::to_integer<int>(answer.outputs[0]);
  };
  auto name = nameOf(text);
  CHECK(have(name) == 0);
  CHECK(sendPiece(client, name, 16, text.substr(16)) == CUDA_ERROR_INVALID_VALUE);  // not from the start
  CHECK(sendPiece(client, name, 0, text.substr(0, 16)) == CUDA_SUCCESS);
  CHECK(have(name) == 0);
  CHECK(sendPiece(client, name, 24, text.substr(24)) == CUDA_ERROR_INVALID_VALUE);
  CHECK(sendPiece(client, name, 16, text) == CUDA_ERROR_INVALID_VALUE);  // longer than the name says
  CHECK(sendPiece(client, name, 16, text.substr(16)) == CUDA_SUCCESS);
  CHECK(have(name) == 1);

  auto other = nameOf("something else, of as many bytes");
  CHECK(sendPiece(client, other, 0, text) == CUDA_ERROR_INVALID_IMAGE);
  CHECK(have(other) == 0);
  CHECK_FALSE(client.ended());
}

TEST_CASE("an attribute that holds an event cannot smuggle a pointer in") {
  Client client;
  client.open();
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(0).value(0))
              .status() == CUDA_SUCCESS);
  CUlaunchAttributeValue value{};
  value.programmaticEvent.event = reinterpret_cast<CUevent>(uint64_t{0xdeadbeef000});
  CHECK(client
            .await(ROW("cuStreamSetAttribute"), Arguments()
                                                    .value(kStream)
                                                    .value(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
                                                    .value(1)
                                                    .structure(value))
            .status() == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a client cannot fill the worker's memory with calls that wait") {
  Client client;
  client.open();
  const uint64_t staging = client.hello.stagingAddress;
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(0).value(0))
              .status() == CUDA_SUCCESS);
  auto wait = [&](uint64_t value) {
    return client
        .await(ROW("cuStreamWaitValue32_v2"),
               Arguments().value(kStream).value(staging).value(value).value(CU_STREAM_WAIT_VALUE_EQ))
        .status();
  };
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(staging)).store(0);
  REQUIRE(wait(77) == CUDA_SUCCESS);
  for (int i = 0; i < 5000 && !client.ended(); ++i) {
    auto frame = client.frame(ROW("sessionDrain"), Frame::kAwait);
    auto arguments = Arguments().value(kStream).value(0);
    std::vector<std::byte> bytes(sizeof frame + arguments.span().size());
    std::memcpy(bytes.data(), &frame, sizeof frame);
    std::memcpy(bytes.data() + sizeof frame, arguments.span().data(), arguments.span().size());
    std::byte* out = client.wire->reserve(Channel::call, bytes.size(), within());
    if (out == nullptr) break;  // the worker has gone already
    std::memcpy(out, bytes.data(), bytes.size());
    client.wire->commit(Channel::call, bytes.size());
  }
  auto told = client.failure();
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(staging)).store(77);  // so that the drains can end
  REQUIRE(told);
  CHECK(contains(told->text, "waiting calls at once"));
  CHECK(eventually([&] { return client.ended(); }));
}
