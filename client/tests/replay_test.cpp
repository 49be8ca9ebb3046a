// What is sent again, when, and what is made of the answers: the other worker is played by the test.
#include "client/replay.h"

#include <array>
#include <cstring>
#include <thread>

#include "base/content.h"
#include "catch.h"
#include "schema/rows.h"
#include "schema/wire.h"
#include "transports/implementations.h"

namespace gpupool::client {
namespace {

using namespace std::chrono_literals;
using schema::Frame;
using schema::Notice;
using schema::NoticeType;
using schema::RowOf;
using transport::Channel;
using transport::Clock;

constexpr auto kBound = 20s;

std::span<const std::byte> bytesOf(const std::string& text) { return std::as_bytes(std::span(text)); }

// A log with one cut, the connection to the next worker, and the replay on a thread of its own.
struct Bench {
  Bench() {
    std::tie(near, far) = transport::loopbackPair({});
    log.cut(0, 0);
  }
  ~Bench() {
    if (thread.joinable()) thread.join();
  }
  void sent(uint64_t seq, uint32_t call, const std::vector<uint64_t>& arguments = {}, uint8_t traits = 0) {
    Frame header;
    header.call = call;
    header.seq = seq;
    header.epoch = 1;
    std::vector<std::byte> bytes(sizeof header + 8 * arguments.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    if (!arguments.empty()) std::memcpy(bytes.data() + sizeof header, arguments.data(), 8 * arguments.size());
    log.sent(false, bytes, traits);
  }
  void begin() {
    std::string none;
    auto entries = log.since(0, 0, none);
    REQUIRE(entries.has_value());
    Replay::Target target{*near, 2, {}, {}, [this](uint64_t, transport::Region& region, uint64_t& offset) {
                            region = {77, 1};
                            offset = 5;
                            return lends;
                          }};
    if (staging != nullptr) target.staging = far->share(staging);
    replay = std::make_unique<Replay>(*entries, std::move(target), settings);
    thread = std::thread([this] {
      why = replay->run();
      done = true;
    });
  }
  std::string end() {
    thread.join();
    return why;
  }
  // ---- the worker
  std::optional<Frame> next(std::chrono::milliseconds bound = kBound) {
    const auto message = far->receive(Channel::call, Clock::now() + bound);
    if (message.size() < sizeof(Frame)) return std::nullopt;
    Frame frame;
    std::memcpy(&frame, message.data(), sizeof frame);
    arguments.assign(message.begin() + sizeof frame, message.end());
    return frame;
  }
  uint64_t argument(size_t index) const {
    uint64_t value = 0;
    std::memcpy(&value, arguments.data() + 8 * index, sizeof value);
    return value;
  }
  void send(Channel channel, const void* head, size_t headBytes, std::span<const std::byte> body) {
    std::byte* room = far->reserve(channel, headBytes + body.size(), Clock::now() + kBound);
    REQUIRE(room != nullptr);
    std::memcpy(room, head, headBytes);
    if (!body.empty()) std::memcpy(room + headBytes, body.data(), body.size());
    far->commit(channel, headBytes + body.size());
  }
  void answer(uint64_t seq, CUresult status, const std::string& outputs) {
    schema::Reply reply;
    reply.seq = seq;
    reply.status = status;
    send(Channel::call, &reply, sizeof reply, bytesOf(outputs));
  }
  void say(uint64_t word, uint64_t value) {
    const Notice notice{NoticeType::words, 2, 0};
    const schema::WordUpdate update{word, value};
    send(Channel::control, &notice, sizeof notice, std::as_bytes(std::span(&update, 1)));
  }
  void call(uint64_t function, uint32_t status = 0) {
    const Notice notice{NoticeType::callback, 2, 0};
    const schema::CallbackBody body{function, status, 0};
    send(Channel::control, &notice, sizeof notice, std::as_bytes(std::span(&body, 1)));
  }
  // The host function that the client says has run; 0: it says nothing.
  uint64_t returned(std::chrono::milliseconds bound = kBound) {
    const auto message = far->receive(Channel::control, Clock::now() + bound);
    if (message.size() < sizeof(Notice) + sizeof(schema::CallbackBody)) return 0;
    Notice notice;
    schema::CallbackBody body;
    std::memcpy(&notice, message.data(), sizeof notice);
    std::memcpy(&body, message.data() + sizeof notice, sizeof body);
    CHECK(notice.epoch == 2);
    return notice.type == NoticeType::callbackDone ? body.id : 0;
  }

  CallLog log{{1 << 20, 1 << 20}};
  std::unique_ptr<transport::Connection> near, far;
  std::shared_ptr<transport::SharedMemory> staging;
  bool lends = true;
  Replay::Settings settings;
  std::unique_ptr<Replay> replay;
  std::string why;
  std::atomic<bool> done{false};
  std::vector<std::byte> arguments;
  std::thread thread;
};

constexpr uint32_t kLaunch = RowOf<"sessionLaunch">::id, kRead = RowOf<"sessionRead">::id,
                   kQuery = RowOf<"cuStreamQuery">::id, kAsk = RowOf<"cuCtxGetCacheConfig">::id;

}  // namespace

TEST_CASE("what stands behind something that was seen is sent when that has come again") {
  Bench bench;
  const bool word = GENERATE(true, false);
  bench.sent(1, word ? kLaunch : kAsk);
  if (word)
    bench.log.reached(5, 3);
  else
    bench.log.answered(1, CUDA_SUCCESS, bytesOf("12345678"));
  bench.sent(2, kLaunch);
  bench.begin();
  const auto first = bench.next();
  REQUIRE(first.has_value());
  CHECK(first->seq == 1);
  CHECK(first->epoch == 2);
  if (word) bench.say(5, 2);  // not yet
  CHECK_FALSE(bench.next(100ms).has_value());
  CHECK_FALSE(bench.done);
  if (word)
    bench.say(5, 3);
  else
    bench.answer(1, CUDA_SUCCESS, "12345678");
  const auto second = bench.next();
  REQUIRE(second.has_value());
  CHECK(second->seq == 2);
  CHECK(bench.end().empty());
  CHECK(bench.replay->counts().kernels == (word ? 2 : 1));
}

TEST_CASE("payloads are put again before the frames that name them") {
  Bench bench;
  bench.staging = transport::SharedMemory::create(4096);
  std::string data = "payload";
  bench.log.put(CallLog::Place::staging, 100, data.data(), data.size());
  data = "changed";
  bench.sent(1, kLaunch);
  bench.begin();
  REQUIRE(bench.next().has_value());
  CHECK(std::memcmp(bench.staging->data() + 100, "payload", 7) == 0);
  CHECK(bench.end().empty());
}

TEST_CASE("answers are compared with what was seen") {
  Bench bench;
  const bool contents = GENERATE(true, false), goesOn = GENERATE(true, false), same = GENERATE(true, false);
  bench.settings.goOnDifferent = goesOn;
  bench.sent(1, kAsk, {}, contents ? CallLog::kContents : 0);
  bench.log.answered(1, CUDA_SUCCESS, bytesOf("as it was"));
  bench.begin();
  REQUIRE(bench.next().has_value());
  bench.answer(1, CUDA_SUCCESS, same ? "as it was" : "otherwise");
  const std::string why = bench.end();
  CHECK(why.empty() == (same || (contents && goesOn)));
  if (!why.empty()) CHECK(why.find("cuCtxGetCacheConfig (call 1) gave another answer") != why.npos);
  CHECK(bench.replay->counts().compared == 1);
  CHECK(bench.replay->counts().different == (same ? 0 : 1));
  CHECK(bench.replay->unseenReplies().empty());
}

TEST_CASE("another status is never gone on with, and what varies is not compared by its outputs") {
  Bench bench;
  const bool status = GENERATE(true, false);
  bench.settings.goOnDifferent = true;
  bench.sent(1, kAsk, {}, CallLog::kVaries | CallLog::kContents);
  bench.log.answered(1, CUDA_SUCCESS, bytesOf("1.5 ms"));
  bench.begin();
  REQUIRE(bench.next().has_value());
  bench.answer(1, status ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS, "1.7 ms");
  CHECK(bench.end().empty() == !status);
}

TEST_CASE("a poll that has said done waits for it, and one that has not counts nothing") {
  Bench bench;
  const bool wasDone = GENERATE(true, false);
  bench.sent(1, kQuery, {}, CallLog::kVaries | CallLog::kPolls);
  bench.log.answered(1, wasDone ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY, {});
  bench.begin();
  const auto frame = bench.next();
  REQUIRE(frame.has_value());
  CHECK(((frame->flags & Frame::kUntilDone) != 0) == wasDone);
  bench.answer(1, CUDA_SUCCESS, "");
  CHECK(bench.end().empty());
  CHECK(bench.replay->counts().compared == (wasDone ? 1 : 0));
}

TEST_CASE("what the program has not seen is kept for it") {
  Bench bench;
  bench.sent(1, kAsk);
  bench.sent(2, kLaunch);
  bench.log.reached(5, 1);
  bench.begin();
  REQUIRE(bench.next().has_value());
  REQUIRE(bench.next().has_value());
  bench.answer(1, CUDA_SUCCESS, "new");
  const Notice callback{NoticeType::callback, 2, 0};
  bench.send(Channel::control, &callback, sizeof callback, {});
  bench.say(5, 9);
  CHECK(bench.end().empty());
  CHECK(bench.replay->unseenNotices().size() == 1);
  REQUIRE(bench.replay->words().size() == 1);
  CHECK(bench.replay->words().begin()->second == 9);
}

TEST_CASE("a copy to pinned memory goes there only if the program has not seen it") {
  Bench bench;
  std::string memory = "seen";
  const bool seen = GENERATE(true, false), same = GENERATE(true, false);
  bench.sent(1, kRead, {1, reinterpret_cast<uint64_t>(memory.data()), 99, 4, 5, 1, 7, 0, 0, 0},
             CallLog::kContents);
  if (seen) bench.log.reached(5, 1);
  bench.begin();
  REQUIRE(bench.next().has_value());
  const uint64_t region = bench.argument(6), offset = bench.argument(7);
  if (!seen) {
    CHECK(region == (77 | uint64_t{1} << 32));
    CHECK(offset == 5);
    CHECK(bench.end().empty());
    return;
  }
  CHECK(offset == 0);
  const transport::Region scratch{static_cast<uint32_t>(region), static_cast<uint32_t>(region >> 32)};
  const auto transfer = bench.far->put(same ? "seen" : "else", scratch, 0, 4);
  REQUIRE(bench.far->wait(transfer, Clock::now() + kBound));
  bench.say(5, 1);
  CHECK(bench.end().empty() == same);
  CHECK(memory == "seen");
}

TEST_CASE("a host function that has run does not run again, and its stream goes on where it did") {
  Bench bench;
  bench.sent(1, kLaunch);
  bench.log.called(7, 0, 5);
  bench.sent(2, kLaunch);  // of a thread that saw it begin
  bench.log.returned(7);
  bench.sent(3, kLaunch);
  bench.begin();
  REQUIRE(bench.next().has_value());
  CHECK_FALSE(bench.next(100ms).has_value());
  bench.call(7);
  const auto second = bench.next();
  REQUIRE(second.has_value());
  CHECK(second->seq == 2);
  CHECK(bench.returned() == 7);
  CHECK(bench.next().has_value());
  CHECK(bench.end().empty());
  CHECK(bench.replay->unseenNotices().empty());
}

TEST_CASE("a host function that was running when the worker died is waited for, and answers the next one") {
  Bench bench;
  bench.sent(1, kLaunch);
  bench.log.called(7, 0, 5);
  bench.begin();
  bench.call(7);
  CHECK(bench.end().empty());
  CHECK(bench.returned(100ms) == 0);
  CHECK(bench.replay->unseenNotices().empty());
}

TEST_CASE("a host function that had not begun begins behind the replay") {
  Bench bench;
  bench.sent(1, kAsk);
  bench.log.called(7, 0, 5);
  bench.log.returned(7);
  bench.log.answered(1, CUDA_SUCCESS, {});
  bench.begin();
  bench.call(8);
  bench.call(7);
  CHECK(bench.returned() == 7);
  bench.call(7);  // of a graph, which is launched again
  bench.answer(1, CUDA_SUCCESS, {});
  CHECK(bench.end().empty());
  REQUIRE(bench.replay->unseenNotices().size() == 2);
  for (const auto& [index, function] : {std::pair{0, 8}, {1, 7}}) {
    schema::CallbackBody body;
    std::memcpy(&body, bench.replay->unseenNotices()[index].data() + sizeof(Notice), sizeof body);
    CHECK(body.id == static_cast<uint64_t>(function));
  }
}

TEST_CASE("a host function that is told something else than before ends the replay") {
  Bench bench;
  bench.log.called(7, 0, 5);
  bench.begin();
  bench.call(7, 700);
  CHECK(bench.end().find("what a host function is told gave another answer") != std::string::npos);
}

TEST_CASE("what kernels had printed is not printed again, in any order and with any answer") {
  Bench bench;
  bench.sent(1, kAsk);
  bench.log.printed("one\ntwo\n");
  bench.log.answered(1, CUDA_SUCCESS, {});
  bench.sent(2, kAsk);
  bench.begin();
  const std::string again = GENERATE("two\none\n", "two\none\none\nthree", "one\n");
  const Notice notice{NoticeType::output, 2, 0};
  std::vector<std::byte> text(8 + schema::padded(again.size()));
  const uint64_t length = again.size();
  std::memcpy(text.data(), &length, sizeof length);
  std::memcpy(text.data() + 8, again.data(), again.size());
  bench.send(Channel::control, &notice, sizeof notice, text);
  schema::Reply reply;
  reply.seq = 2;
  reply.outputBytes = 5;
  bench.send(Channel::call, &reply, sizeof reply, bytesOf(std::string("four\n\0\0\0", 8)));
  bench.answer(1, CUDA_SUCCESS, {});
  const std::string why = bench.end();
  if (length == 4) {
    CHECK(why.find("what kernels print") != std::string::npos);
    return;
  }
  CHECK(why.empty());
  CHECK(bench.replay->unseenOutput().find("four\n") != std::string::npos);
  CHECK(bench.replay->unseenOutput().size() == (length == 8 ? 5 : 14));
  REQUIRE(bench.replay->unseenReplies().size() == 1);
  CHECK(bench.replay->unseenReplies()[0].size() == sizeof reply);
}

namespace {

// A load of code that the first server had: its offer and its two pieces, which carried no bytes.
struct Load {
  explicit Load(Bench& bench, bool stays) : bench(bench) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
    const Digest digest = contentDigest(bytes);
    std::memcpy(name.data(), digest.data(), digest.size());
    name[4] = bytes.size();
    schema::ImageName image;
    std::memcpy(static_cast<void*>(&image), name.data(), sizeof image);
    const auto kept = bench.log.keepCode(image, bytes, stays);
    bench.sent(1, RowOf<"sessionImageOffer">::id, with({1}), CallLog::kVaries);
    bench.log.answered(1, CUDA_SUCCESS, bytesOf(std::string("\1\0\0\0\0\0\0\0", 8)));
    bench.sent(2, RowOf<"sessionImageData">::id, with({0, 0, 0}));
    bench.sent(3, RowOf<"sessionImageData">::id, with({CallLog::kCodePiece, 0, 0}));
  }
  std::vector<uint64_t> with(std::vector<uint64_t> rest) const {
    rest.insert(rest.begin(), name.begin(), name.end());
    return rest;
  }
  // The bytes of the piece that comes next.
  std::vector<std::byte> piece(uint64_t seq, uint64_t offset) const {
    const auto frame = bench.next();
    REQUIRE(frame.has_value());
    CHECK(frame->seq == seq);
    CHECK(frame->epoch == 2);
    CHECK(bench.argument(5) == offset);
    const uint64_t length = bench.argument(6);
    REQUIRE(bench.arguments.size() == size_t{8} * 8 + schema::padded(length));
    const auto begins = bench.arguments.begin() + ptrdiff_t{7} * 8;
    CHECK(bench.argument(7 + schema::padded(length) / 8) == length);
    return {begins, begins + static_cast<ptrdiff_t>(length)};
  }
  Bench& bench;
  std::vector<std::byte> bytes = std::vector<std::byte>(CallLog::kCodePiece + 1234);
  std::array<uint64_t, 5> name{};
};

}  // namespace

TEST_CASE("code that only the first server had is sent to the next one") {
  Bench bench;
  const bool stays = GENERATE(true, false);
  Load load(bench, stays);
  const auto known = load.bytes;
  if (!stays) std::ranges::fill(load.bytes, std::byte{0});  // the program has given it up since
  bench.begin();
  REQUIRE(bench.next().has_value());
  bench.answer(1, CUDA_SUCCESS, std::string(8, '\0'));
  auto came = load.piece(2, 0);
  CHECK(came.size() == CallLog::kCodePiece);
  const auto rest = load.piece(3, CallLog::kCodePiece);
  came.insert(came.end(), rest.begin(), rest.end());
  CHECK(came == known);
  CHECK(bench.end().empty());
}

TEST_CASE("code that the next server has is not sent") {
  Bench bench;
  const Load load(bench, true);
  bench.begin();
  REQUIRE(bench.next().has_value());
  bench.answer(1, CUDA_SUCCESS, std::string("\1\0\0\0\0\0\0\0", 8));
  CHECK(load.piece(2, 0).empty());
  CHECK(load.piece(3, CallLog::kCodePiece).empty());
  CHECK(bench.end().empty());
}

TEST_CASE("code that is not in the program any more ends the replay") {
  Bench bench;
  Load load(bench, true);
  load.bytes[5] ^= std::byte{1};
  bench.begin();
  REQUIRE(bench.next().has_value());
  bench.answer(1, CUDA_SUCCESS, std::string(8, '\0'));
  CHECK(bench.end().find("lacks code") != std::string::npos);
}

TEST_CASE("a worker that stands still, is gone or has failed ends the replay") {
  Bench bench;
  std::string expected;
  bench.sent(1, kAsk);
  bench.log.answered(1, CUDA_SUCCESS, {});
  SECTION("it stands still") {
    bench.settings.stall = 1s;
    expected = "does not get as far";
    bench.begin();
  }
  SECTION("it is gone") {
    expected = "is gone";
    bench.begin();
    REQUIRE(bench.next().has_value());
    bench.far->close();
  }
  SECTION("it has failed") {
    expected = "has failed";
    bench.begin();
    const Notice notice{NoticeType::failed, 2, 0};
    const schema::FailedBody body{1, 700, 0};
    std::byte text[sizeof body + 8] = {};
    std::memcpy(text, &body, sizeof body);
    bench.send(Channel::control, &notice, sizeof notice, text);
  }
  SECTION("the program ends") {
    expected = "program ends";
    bench.settings.cancelled = [] { return true; };
    bench.begin();
  }
  CHECK(bench.end().find(expected) != std::string::npos);
}

}  // namespace gpupool::client
