// The log of a protected session's calls: what is in it, for how long, and what it says of itself.
#include "client/call_log.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/content.h"
#include "catch.h"
#include "schema/rows.h"

namespace gpupool::client {
namespace {

using EntryKind = CallLog::Entry::Kind;
constexpr CallLog::Limits kAmple{1 << 20, 1 << 20};

std::vector<std::byte> frame(uint64_t seq, uint32_t call, std::vector<uint64_t> arguments) {
  schema::Frame header;
  header.call = call;
  header.seq = seq;
  std::vector<std::byte> bytes(sizeof header + 8 * arguments.size());
  std::memcpy(bytes.data(), &header, sizeof header);
  std::memcpy(bytes.data() + sizeof header, arguments.data(), 8 * arguments.size());
  return bytes;
}
std::vector<std::byte> launch(uint64_t seq) {
  return frame(seq, schema::RowOf<"sessionLaunch">::id, {1, 2, 3, 4});
}
// A copy to pinned memory of `bytes` at `to`.
std::vector<std::byte> read(uint64_t seq, const void* to, uint64_t bytes, uint64_t word, uint64_t value) {
  const uint64_t region = 7 | uint64_t{1} << 32;
  return frame(seq, schema::RowOf<"sessionRead">::id,
               {1, reinterpret_cast<uint64_t>(to), 99, bytes, word, value, region, 0, 0, 0});
}
std::span<const std::byte> bytesOf(const std::string& text) { return std::as_bytes(std::span(text)); }
std::vector<CallLog::Entry*> all(CallLog& log, uint64_t frame = 0) {
  std::string why;
  auto entries = log.since(frame, 0, why);
  REQUIRE(entries.has_value());
  return *entries;
}

}  // namespace

TEST_CASE("nothing is kept before the first cut, and everything in its order since") {
  CallLog log(kAmple);
  log.sent(false, launch(1), 0);
  CHECK(log.state().frameBytes == 0);
  log.cut(1, 0);
  std::string data = "before";
  log.put(CallLog::Place::staging, 64, data.data(), data.size());
  log.sent(false, launch(2), 0);
  data = "behind";  // the program may change what it has copied
  log.reached(5, 1);
  log.answered(2, CUDA_SUCCESS, bytesOf("reply"));
  const auto entries = all(log, 1);
  REQUIRE(entries.size() == 4);
  CHECK(entries[0]->kind == EntryKind::put);
  CHECK(entries[0]->number == 64);
  CHECK(std::memcmp(entries[0]->bytes.data(), "before", 6) == 0);
  CHECK(entries[1]->kind == EntryKind::frame);
  CHECK(entries[1]->number == 2);
  CHECK(entries[2]->kind == EntryKind::word);
  CHECK(entries[3]->kind == EntryKind::reply);
  CHECK(entries[3]->digest == contentDigest(bytesOf("reply")));
  CHECK(log.state().payloadBytes == 6);
}

TEST_CASE("what a kept checkpoint has is dropped, and only when it is kept") {
  CallLog log(kAmple);
  log.cut(0, 0);
  log.sent(false, launch(1), 0);
  log.cut(1, 0);
  log.sent(false, launch(2), 0);
  CHECK(all(log, 0).size() == 2);
  CHECK(all(log, 1).size() == 1);
  const uint64_t before = log.state().frameBytes;
  log.kept(7, 7);  // of a cut that is not known
  CHECK(log.state().frameBytes == before);
  log.kept(1, 0);
  CHECK(log.state().frameBytes == before / 2);
  CHECK(all(log, 1).size() == 1);
  std::string why;
  CHECK_FALSE(log.since(0, 0, why).has_value());
  CHECK(why.find("does not know") != why.npos);
}

TEST_CASE("of several cuts at one call the first counts") {
  CallLog log(kAmple);
  log.cut(3, 0);
  log.put(CallLog::Place::staging, 0, "put", 3);
  log.cut(3, 0);  // its checkpoint has the put, and it does no harm to put that again
  CHECK(all(log, 3).size() == 1);
}

TEST_CASE("a budget that is crossed asks for a checkpoint, and then drops all until the next cut") {
  for (const bool payload : {false, true}) {
    CallLog log(payload ? CallLog::Limits{1 << 20, 1000} : CallLog::Limits{4000, 1 << 20});
    log.cut(0, 0);
    uint64_t seq = 0;
    const std::string data(100, 'x');
    const auto more = [&] {
      if (payload)
        log.put(CallLog::Place::staging, 0, data.data(), data.size());
      else
        log.sent(false, launch(++seq), 0);
    };
    more();
    CHECK_FALSE(log.state().wanted);
    CHECK_FALSE(log.turnsWanted());
    while (!log.state().wanted) more();
    CHECK(log.turnsWanted());
    CHECK_FALSE(log.turnsWanted());  // once
    CHECK(log.state().obstacle.empty());
    while (log.state().obstacle.empty()) more();
    CHECK(log.state().obstacle.find("full") != std::string::npos);
    CHECK(log.state().frameBytes == 0);
    CHECK(log.state().payloadBytes == 0);
    more();
    CHECK(log.state().frameBytes == 0);
    std::string why;
    CHECK_FALSE(log.since(0, 0, why).has_value());
    CHECK(why.find("full") != why.npos);
    log.cut(1000, 0);
    log.sent(false, launch(1001), 0);
    CHECK_FALSE(log.state().obstacle.empty());  // the checkpoint that is kept is the old one still
    log.kept(1000, 0);
    CHECK(log.state().obstacle.empty());
    CHECK_FALSE(log.state().wanted);
    CHECK(all(log, 1000).size() == 1);
  }
}

TEST_CASE("entries stay as they are while many before them are dropped") {
  CallLog log({uint64_t{64} << 20, uint64_t{64} << 20});
  uint64_t seq = 0;
  // Of many lengths, some of them too large for what others share.
  const auto words = [](uint64_t number) { return number % 997 == 0 ? 8000 : number % 37 + 1; };
  const auto message = [&](uint64_t number) {
    return frame(number, schema::RowOf<"sessionLaunch">::id, std::vector<uint64_t>(words(number), number));
  };
  log.cut(0, 0);
  uint64_t before = 0;  // the cut that is kept
  for (int round = 0; round < 12; ++round) {
    for (int i = 0; i < 1500; ++i) log.sent(false, message(++seq), 0);
    const auto entries = all(log, before);
    REQUIRE(entries.size() == seq - before);
    bool right = true;
    uint64_t frameBytes = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
      const auto expected = message(before + 1 + i);
      right =
          right && entries[i]->number == before + 1 + i && std::ranges::equal(entries[i]->bytes, expected);
      frameBytes += expected.size() + sizeof(CallLog::Entry);
    }
    CHECK(right);
    CHECK(log.state().frameBytes == frameBytes);
    log.cut(seq, 0);
    if (round % 3 == 2) continue;  // that checkpoint failed
    log.kept(seq, 0);
    before = seq;
  }
  log.kept(seq, 0);
  CHECK(log.state().frameBytes == 0);
}

TEST_CASE("copies of code count as data until they are dropped") {
  CallLog log({1 << 20, 1 << 20});
  log.cut(0, 0);
  std::vector<std::byte> code(1000, std::byte{7});
  schema::ImageName name;
  name.words[0] = 5;
  name.bytes = code.size();
  std::vector<uint64_t> arguments{5, 0, 0, 0, code.size(), 0, 0, 0};
  {
    const auto kept = log.keepCode(name, code, false);
    log.sent(false, frame(1, schema::RowOf<"sessionImageData">::id, arguments), 0);
  }
  arguments[0] = 6;
  log.sent(false, frame(2, schema::RowOf<"sessionImageData">::id, arguments), 0);  // of nobody's load
  code.assign(1000, std::byte{0});
  const auto entries = all(log);
  REQUIRE(entries.size() == 2);
  REQUIRE(entries[0]->code != nullptr);
  CHECK(entries[0]->code->copy == std::vector<std::byte>(1000, std::byte{7}));
  CHECK(entries[1]->code == nullptr);
  CHECK(log.state().payloadBytes == 1000);
  log.cut(2, 0);
  log.kept(2, 0);
  CHECK(log.state().payloadBytes == 0);
}

TEST_CASE("one put beyond the budget is not taken in") {
  CallLog log({1 << 20, 100});
  log.cut(0, 0);
  const std::string data(101, 'x');
  log.put(CallLog::Place::staging, 0, data.data(), data.size());
  CHECK(log.state().obstacle.find("protect_log_data") != std::string::npos);
}

TEST_CASE("what cannot be made again is said until a later checkpoint is kept") {
  CallLog log(kAmple);
  log.cut(0, 0);
  log.refuse("it has host functions");
  log.cut(1, 0);
  log.sent(false, launch(2), 0);
  CHECK(log.state().obstacle == "it has host functions");
  std::string why;
  CHECK_FALSE(log.since(0, 0, why).has_value());
  CHECK(why.find("host functions") != why.npos);
  CHECK(all(log, 1).size() == 1);  // should its checkpoint be kept and the client not know yet
  log.kept(1, 0);
  CHECK(log.state().obstacle.empty());
}

TEST_CASE("a cut at the call where something was dropped does not count as whole") {
  CallLog log({1 << 20, 10});
  log.cut(1, 0);
  log.put(CallLog::Place::staging, 0, "more than ten bytes", 19);
  log.cut(1, 0);
  std::string why;
  CHECK_FALSE(log.since(1, 0, why).has_value());
}

TEST_CASE("bytes that land in pinned memory are known by their digest once their word was reached") {
  CallLog log(kAmple);
  log.cut(0, 0);
  std::string memory = "result";
  log.sent(false, read(1, memory.data(), memory.size(), 5, 2), CallLog::kContents);
  log.reached(5, 1);
  CHECK_FALSE(all(log)[0]->seen);
  log.reached(5, 2);
  memory = "other!";
  CHECK(all(log)[0]->seen);
  CHECK(all(log)[0]->compared);
  CHECK(all(log)[0]->digest == contentDigest(bytesOf("result")));
}

TEST_CASE("bytes whose place another copy goes to are seen, and not compared") {
  CallLog log(kAmple);
  log.cut(0, 0);
  std::string memory = "result";
  log.sent(false, read(1, memory.data(), memory.size(), 5, 1), CallLog::kContents);
  log.sent(false, read(2, memory.data() + 3, 3, 5, 2), CallLog::kContents);
  log.reached(5, 1);
  CHECK(all(log)[0]->seen);
  CHECK_FALSE(all(log)[0]->compared);
  CHECK_FALSE(all(log)[1]->seen);
}

TEST_CASE("a host function stands where it began, and where it ended") {
  CallLog log(kAmple);
  log.cut(0, 0);
  log.sent(false, launch(1), 0);
  log.called(7, 700, 5);
  log.sent(false, launch(2), 0);
  log.returned(7);
  const auto entries = all(log);
  REQUIRE(entries.size() == 4);
  CHECK(entries[1]->kind == EntryKind::called);
  CHECK(entries[1]->number == 7);
  CHECK(entries[1]->status == 700);
  CHECK(entries[3]->kind == EntryKind::returned);
  CHECK(entries[3]->number == 7);
}

TEST_CASE("what comes at a cut is of calls before it") {
  CallLog log(kAmple);
  log.cut(0, 0);
  log.reached(5, 1);
  CHECK(log.state().frameBytes == 0);
  log.sent(false, launch(1), 0);
  log.cut(1, 0);
  log.printed("before\n");
  log.reached(5, 2);
  log.sent(false, launch(2), 0);
  log.printed("behind\n");
  const auto since = all(log, 1);
  REQUIRE(since.size() == 2);
  CHECK(since[1]->kind == EntryKind::printed);
  CHECK(std::memcmp(since[1]->bytes.data(), "behind\n", 7) == 0);
  CHECK(all(log).size() == 5);
  log.kept(1, 0);
  CHECK(log.state().payloadBytes == 7);
  log.cut(2, 0);
  log.kept(2, 0);
  log.reached(5, 3);
  CHECK(log.state().frameBytes == 0);
}

// It may have changed what another stream had brought before it, and nobody can tell.
TEST_CASE("a host function beside a copy of another stream that nobody has seen") {
  CallLog log(kAmple);
  log.cut(0, 0);
  std::string memory = "result", why;
  log.sent(false, read(1, memory.data(), memory.size(), 5, 1), CallLog::kContents);
  const bool own = GENERATE(true, false);
  log.called(7, 0, own ? 5 : 6);
  log.returned(7);
  CHECK(log.since(0, 0, why).has_value() == own);
  CHECK(why.empty() == own);
  log.reached(5, 1);
  CHECK(all(log)[0]->seen);
  CHECK(all(log)[0]->compared == own);
}

TEST_CASE("memory that is not there any more ends nothing") {
  CallLog log(kAmple);
  log.cut(0, 0);
  log.sent(false, read(1, reinterpret_cast<void*>(16), 100, 5, 1), CallLog::kContents);
  log.reached(5, 1);
  CHECK(all(log)[0]->seen);
}

TEST_CASE("addresses of the worker's staging memory follow it to the next worker") {
  CallLog log(kAmple);
  log.cut(0, 0);
  const uint64_t old = 0x7000'0000, now = 0x9000'0000, bytes = 0x1000;
  log.sent(false, frame(1, schema::RowOf<"sessionWrite">::id, {1, old, old + 8, 0, 64, 0, 0}), 0);
  log.sent(false, frame(2, schema::RowOf<"cuMemcpyHtoDAsync_v2">::id, {old, old + bytes, 64, 1}), 0);
  log.sent(false, frame(3, schema::RowOf<"sessionLaunch">::id, {old, old, old}), 0);
  log.relocate(old, now, bytes);
  const auto argument = [&](size_t entry, size_t index) {
    uint64_t value = 0;
    std::memcpy(&value, all(log)[entry]->bytes.data() + sizeof(schema::Frame) + 8 * index, sizeof value);
    return value;
  };
  CHECK(argument(0, 1) == old);  // the device's: whatever it looks like
  CHECK(argument(0, 2) == now + 8);
  CHECK(argument(1, 1) == old + bytes);  // behind it
  for (const size_t i : {0, 1, 2}) CHECK(argument(2, i) == old);
}

TEST_CASE("memory of the log is used again, and what is kept for that has a bound") {
  constexpr size_t kMiB = size_t{1} << 20;
  LogMemory memory;
  auto first = memory.take(2 * kMiB), large = memory.take(5 * kMiB + 1);
  CHECK(first.size() == 2 * kMiB);
  CHECK(large.size() >= 5 * kMiB + 1);
  const std::byte* const at = first.data();
  first.data()[0] = large.data()[5 * kMiB] = std::byte{7};
  const size_t both = first.size() + large.size();
  CHECK(memory.used() == both);
  memory.giveBack(std::move(first));
  memory.giveBack(std::move(large));
  CHECK(memory.endInterval().empty());
  CHECK(memory.spare() == both);

  SECTION("a piece of the same size is the one that was given back") {
    auto again = memory.take(2 * kMiB);
    CHECK(again.data() == at);
    CHECK(again.data()[0] == std::byte{7});
    CHECK(memory.used() + memory.spare() == both);
  }
  SECTION("others make room for pieces of another size") {
    auto other = memory.take(3 * kMiB);
    CHECK(memory.used() + memory.spare() <= both);
  }
  SECTION("what two intervals did not need is unmapped") {
    auto some = memory.take(2 * kMiB);
    memory.giveBack(std::move(some));
    CHECK(memory.endInterval().empty());
    CHECK_FALSE(memory.endInterval().empty());
    CHECK(memory.spare() <= 2 * kMiB);
  }
}

TEST_CASE("data of any size stays until its checkpoint is kept") {
  CallLog log({64 << 20, 64 << 20});
  log.cut(0, 0);
  std::vector<std::vector<std::byte>> data;
  for (size_t bytes :
       {size_t{1}, size_t{4096}, size_t{256} << 10, (size_t{256} << 10) + 1, size_t{5} << 20}) {
    for (uint8_t round = 1; round <= 3; ++round) {
      data.emplace_back(bytes, std::byte{round});
      log.put(CallLog::Place::pinned, data.size(), data.back().data(), bytes);
      log.sent(false, launch(data.size()), 0);
    }
  }
  const auto entries = all(log);
  REQUIRE(entries.size() == 2 * data.size());
  for (size_t i = 0; i < data.size(); ++i) CHECK(std::ranges::equal(entries[2 * i]->bytes, data[i]));
  log.cut(data.size(), 0);
  log.kept(data.size(), 0);
  CHECK(log.state().payloadBytes == 0);
}

}  // namespace gpupool::client
