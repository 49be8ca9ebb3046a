// The structs of the protocol: each field has a value of its own, so that fields cannot trade places
// unnoticed.
#include <cstring>
#include <type_traits>

#include "catch.h"
#include "schema/frame.h"
#include "schema/handle_ids.h"
#include "schema/hello.h"
#include "schema/holder.h"
#include "tests/golden/golden.h"

using namespace gpupool;
using namespace gpupool::schema;

namespace {

// Pins `value` and returns what the golden file decodes to.
template <class T>
T pin(const std::string& name, const std::string& what, const T& value) {
  static_assert(std::has_unique_object_representations_v<T>, "padding would cross the wire");
  const auto bytes = golden::pinned(name, what, golden::bytesOf(value));
  T decoded{};
  REQUIRE(bytes.size() == sizeof decoded);
  std::memcpy(static_cast<void*>(&decoded), bytes.data(), sizeof decoded);
  return decoded;
}

template <size_t N>
void put(char (&field)[N], const char* text) {
  REQUIRE(std::strlen(text) < N);
  std::memcpy(field, text, std::strlen(text));
}

}  // namespace

TEST_CASE("the protocol's version and magic numbers") {
  CHECK(kProtocolVersion == 7);
  CHECK(kClientMagic == 0x47504331);
  CHECK(kWorkerMagic == 0x47505731);
  CHECK(holder::kMagic == 0x47505531);
  CHECK(holder::kVersion == 8);
  CHECK(static_cast<uint32_t>(NoticeType::moved) == 5);
  CHECK(static_cast<uint32_t>(NoticeType::prepare) == 6);
  CHECK(static_cast<uint32_t>(NoticeType::drained) == 7);
  CHECK(static_cast<uint32_t>(NoticeType::errors) == 8);
  CHECK(static_cast<uint32_t>(NoticeType::suspended) == 9);
  CHECK(static_cast<uint32_t>(NoticeType::resumed) == 10);
  CHECK(static_cast<uint32_t>(NoticeType::stay) == 11);
  CHECK(static_cast<uint32_t>(NoticeType::prepareApart) == 14);
  CHECK(static_cast<uint32_t>(NoticeType::watch) == 66);
  CHECK(static_cast<uint32_t>(NoticeType::aside) == 67);
  CHECK(static_cast<uint32_t>(NoticeType::stopped) == 68);
  CHECK(static_cast<uint32_t>(NoticeType::quiet) == 69);
  CHECK(static_cast<uint32_t>(NoticeType::left) == 70);
  CHECK(static_cast<uint32_t>(NoticeType::stays) == 71);
  CHECK(kAside == uint64_t{1} << 63);
  CHECK(kWordsOffset == 64);
}

TEST_CASE("a frame's header") {
  Frame frame;
  frame.call = 0x01020304;
  frame.flags = Frame::kAwait | Frame::kForced;
  frame.seq = 0x1112131415161718;
  frame.epoch = 0x21222324;
  frame.lane = 0x31323334;
  frame.context = 0x4142434445464748;
  frame.received = 0x5152535455565758;
  frame.aside = 0x6162636465666768;
  const Frame decoded =
      pin("frame", "schema::Frame: call, flags, seq, epoch, lane, context, received, aside", frame);
  CHECK(decoded.call == frame.call);
  CHECK(decoded.flags == 3);
  CHECK(decoded.seq == frame.seq);
  CHECK(decoded.epoch == frame.epoch);
  CHECK(decoded.lane == frame.lane);
  CHECK(decoded.context == frame.context);
  CHECK(decoded.received == frame.received);
  CHECK(decoded.aside == frame.aside);
}

TEST_CASE("a reply's header") {
  Reply reply;
  reply.seq = 0x0102030405060708;
  reply.epoch = 0x11121314;
  reply.status = CUDA_ERROR_INVALID_VALUE;
  reply.flags = Reply::kCapturing;
  reply.outputBytes = 0x21222324;
  reply.admitted = 0x3132333435363738;
  reply.completed = 0x4142434445464748;
  reply.durable = 0x5152535455565758;
  const Reply decoded = pin(
      "reply", "schema::Reply: seq, epoch, status, flags, outputBytes, admitted, completed, durable", reply);
  CHECK(decoded.seq == reply.seq);
  CHECK(decoded.epoch == reply.epoch);
  CHECK(decoded.status == 1);
  CHECK(decoded.flags == 1);
  CHECK(decoded.outputBytes == reply.outputBytes);
  CHECK(decoded.admitted == reply.admitted);
  CHECK(decoded.completed == reply.completed);
  CHECK(decoded.durable == reply.durable);
}

TEST_CASE("notices") {
  const Notice notice{NoticeType::callback, 0x01020304, 0x1112131415161718};
  CHECK(pin("notice", "schema::Notice: type (callback), epoch, effect", notice).effect == notice.effect);
  const WordUpdate update{0x0102030405060708, 0x1112131415161718};
  CHECK(pin("word_update", "schema::WordUpdate: index, value", update).value == update.value);
  const FailedBody failed{0x0102030405060708, 0x11121314, 0x21222324};
  CHECK(pin("failed_body", "schema::FailedBody: seq, status, call", failed).call == failed.call);
  const CallbackBody callback{0x0102030405060708, 0x11121314, 0};
  CHECK(pin("callback_body", "schema::CallbackBody: id, status", callback).status == callback.status);
  const MovedBody moved{0x01020304, 0};
  CHECK(pin("moved_body", "schema::MovedBody: epoch", moved).epoch == moved.epoch);
  const StoppedBody stopped{0x0102030405060708};
  CHECK(pin("stopped_body", "schema::StoppedBody: last", stopped).last == stopped.last);
  const WordsHeader words{0x01020304, 0x11121314, 0x21222324, 0};
  CHECK(pin("words_header", "schema::WordsHeader: sticky, bell, waiters", words).waiters == words.waiters);
}

TEST_CASE("handles") {
  using handles::Kind;
  const uint64_t list[] = {
      handles::makeHandle(Kind::context, 1, 0), handles::makeHandle(Kind::stream, 0x123456, 0x789),
      handles::makeHandle(Kind::graphicsResource, handles::kMaxIndex, handles::kMaxGeneration)};
  const auto bytes =
      golden::pinned("handles", "handles: context 1.0, stream 123456.789, the greatest of the last kind",
                     std::as_bytes(std::span(list)));
  uint64_t stream = 0;
  std::memcpy(&stream, bytes.data() + 8, sizeof stream);
  CHECK(handles::kindOf(stream) == Kind::stream);
  CHECK(handles::indexOf(stream) == 0x123456);
  CHECK(handles::generationOf(stream) == 0x789);
}

TEST_CASE("the client's hello") {
  ClientHello hello;
  hello.protocol = kProtocolVersion;
  hello.rowsHash = 0x0102030405060708;
  hello.epoch = 0x1112131415161718;
  hello.spaces = 0b1011;
  hello.lends = 1;
  const ClientHello decoded =
      pin("client_hello", "schema::ClientHello: magic, protocol, rowsHash, epoch, spaces, lends", hello);
  CHECK(decoded.magic == kClientMagic);
  CHECK(decoded.rowsHash == hello.rowsHash);
  CHECK(decoded.epoch == hello.epoch);
  CHECK(decoded.spaces == 11);
}

TEST_CASE("the worker's hello") {
  WorkerHello hello;
  hello.protocol = kProtocolVersion;
  hello.rowsHash = 0x0102030405060708;
  hello.epoch = 0x1112131415161718;
  hello.status = CUDA_SUCCESS;
  hello.space = 2;
  put(hello.text, "text");
  hello.words = {0x21222324, 0x31323334};
  hello.staging = {0x41424344, 0x51525354};
  hello.stagingAddress = 0x6162636465666768;
  hello.stagingBytes = 0x7172737475767778;
  hello.driverVersion = 13000;
  hello.deviceCount = 2;
  hello.softwareDriver = 1;
  for (int i : {0, kMaxDevices - 1}) {
    DeviceProperties& device = hello.devices[i];
    put(device.name, "device");
    std::memset(device.uuid.bytes, 0xA0 + i, sizeof device.uuid.bytes);
    std::memset(device.luid, 0xB0 + i, sizeof device.luid);
    device.luidMask = 0xC0C1C2C3;
    device.luidStatus = CUDA_ERROR_NOT_SUPPORTED;
    device.totalBytes = 0xD0D1D2D3D4D5D6D7;
    device.limitBytes = 0xE0E1E2E3E4E5E6E7;
    put(device.pciBusId, "0000:01:00.0");
    device.attributes[0] = 10 + i;
    device.attributes[kDeviceAttributes - 1] = 20 + i;
    device.attributeKnown[0] = device.attributeKnown[kDeviceAttributes - 1] = 1;
    device.p2p[kMaxDevices - 1][kP2PAttributes - 1] = 30 + i;
    device.canAccessPeer[kMaxDevices - 1] = 40 + i;
  }
  const auto decoded = pin("worker_hello", "schema::WorkerHello with its first and its last device", hello);
  CHECK(decoded.magic == kWorkerMagic);
  CHECK(decoded.stagingBytes == hello.stagingBytes);
  CHECK(decoded.devices[kMaxDevices - 1].attributes[kDeviceAttributes - 1] == 20 + kMaxDevices - 1);
  CHECK(decoded.devices[kMaxDevices - 1].canAccessPeer[kMaxDevices - 1] == 40 + kMaxDevices - 1);
}

TEST_CASE("a region of a session that has moved") {
  const MovedRegion region{0x0102030405060708, {0x11121314, 0x21222324}};
  const auto decoded =
      pin("moved_region", "schema::MovedRegion: address, region's id and generation", region);
  CHECK(decoded.address == region.address);
  CHECK(decoded.region.generation == region.region.generation);
}

TEST_CASE("between an application and its lease's holder") {
  holder::OpenRequest request;
  request.rowsHash = 0x0102030405060708;
  request.pid = 0x11121314;
  put(request.transport, "shm");
  put(request.command, "command");
  request.sessionHigh = 0x2122232425262728;
  request.sessionLow = 0x3132333435363738;
  request.epoch = 0x4142434445464748;
  request.mayShare = 1;
  CHECK(
      pin("open_request",
          "holder::OpenRequest: magic, version, rowsHash, pid, transport, command, session, epoch, mayShare",
          request)
          .epoch == request.epoch);
  holder::OpenReply reply;
  reply.status = holder::Status::internal;
  reply.deviceCount = 2;
  reply.sessionHigh = 0x0102030405060708;
  reply.sessionLow = 0x1112131415161718;
  reply.epoch = 0x2122232425262728;
  put(reply.transport, "ucx");
  put(reply.networkDevice, "mlx5_0:1");
  put(reply.server, "server");
  reply.stallMs = 0x31323334;
  reply.goOnDifferent = 1;
  reply.logFrameBytes = 0x4142434445464748;
  reply.logPayloadBytes = 0x5152535455565758;
  reply.keeps = 1;
  reply.silenceMs = 0x61626364;
  put(reply.text, "text");
  CHECK(pin("open_reply",
            "holder::OpenReply: magic, version, status, devices, session, epoch, transport, network device, "
            "server, stall time, log's limits, whether the holder keeps checkpoints, silence, text",
            reply)
            .epoch == reply.epoch);
}
