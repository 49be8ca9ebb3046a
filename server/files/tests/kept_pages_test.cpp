// Checkpoints in pages: what a worker sends, which may be anything, and what is kept of it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "server/files/tests/kept_session.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

constexpr uint64_t kBookkeeping = 64 << 10;  // that a checkpoint may take beside its pages

}  // namespace

TEST_CASE("kept pages: contents are cut where both sides expect it") {
  const auto cut = [](std::vector<uint64_t> contents) { return pagesOf(contents); };
  constexpr uint32_t kAll = kPageBytes;
  CHECK(cut({}).empty());
  CHECK(cut({0, 0}).empty());
  CHECK(cut({5, 0, 7}) == std::vector<uint32_t>{12});
  CHECK(cut({kAll, 1}) == std::vector<uint32_t>{kAll, 1});
  CHECK(cut({kAll - 1, 1, 1}) == std::vector<uint32_t>{kAll, 1});
  CHECK(cut({kAll - 1, 2}) == std::vector<uint32_t>{kAll - 1, 2});
  CHECK(cut({3, uint64_t{2} * kAll + 4, 5}) == std::vector<uint32_t>{3, kAll, kAll, 4, 5});
}

TEST_CASE("kept pages: a checkpoint comes whole, and the next one as what has changed") {
  Keeping keeping;
  Sent sent;
  Places places;
  places.shared = GENERATE(true, false);
  REQUIRE(keeping.take(sent, places) == "");
  CHECK(keeping.kept->shared == (places.shared ? Sent::kPages : 0));
  CHECK(keeping.heard.answer.empty());
  CHECK(keeping.heard.base == Id());
  CHECK(keeping.heard.lacksImage);
  checkPlayed(*keeping.kept, sent);
  const auto first = keeping.kept;
  const Sent before = sent;
  const uint64_t whole = keeping.used;
  CHECK(first->facts.lastFrame == 99);
  CHECK(first->facts.bytes == sent.all().size() + sent.image.size() + sent.record().size());

  sent.id = Id::random();
  sent.frame = 107;
  sent.contents[3].back() ^= std::byte{1};
  sent.contents[2].back() ^= std::byte{1};  // its last page is a short one
  REQUIRE(keeping.take(sent, since(*first, {2, 5})) == "");
  CHECK(keeping.heard.base == first->id);
  CHECK_FALSE(keeping.heard.lacksImage);
  CHECK(keeping.kept->facts.lastFrame == 107);
  checkPlayed(*keeping.kept, sent);
  checkPlayed(*first, before);  // as long as somebody has it
  CHECK(keeping.used < whole + kPageBytes + kBookkeeping);
}

TEST_CASE("kept pages: memory of what no checkpoint has any more is free again") {
  Keeping keeping;
  Sent sent;
  REQUIRE(keeping.take(sent) == "");
  const uint64_t whole = keeping.used;
  for (int i = 0; i < 5; ++i) {
    sent.id = Id::random();
    sent.contents[3].front() ^= std::byte{1};
    REQUIRE(keeping.take(sent, since(*keeping.kept, {3})) == "");
    CHECK(keeping.used == whole);
  }
  checkPlayed(*keeping.kept, sent);
  keeping.kept = nullptr;
  CHECK(keeping.used == 0);
}

TEST_CASE("kept pages: of a worker that sends all, only what is new takes memory") {
  Keeping keeping;
  Sent sent;
  REQUIRE(keeping.take(sent) == "");
  const uint64_t whole = keeping.used;
  const auto first = keeping.kept;
  sent.id = Id::random();
  sent.contents[3].front() ^= std::byte{1};
  REQUIRE(keeping.take(sent) == "");
  CHECK(keeping.used <= whole + kPageBytes + kBookkeeping);
  checkPlayed(*keeping.kept, sent);
}

TEST_CASE("kept pages: pages that are alike are there once") {
  Keeping keeping;
  Sent sent;
  sent.contents[3].assign(sent.contents[3].size(), std::byte{0});  // three pages
  REQUIRE(keeping.take(sent) == "");
  checkPlayed(*keeping.kept, sent);
  CHECK(keeping.kept->facts.bytes == sent.all().size() + sent.image.size() + sent.record().size());
  CHECK(keeping.used <= keeping.kept->facts.bytes - uint64_t{2} * kPageBytes + kBookkeeping);
  sent.id = Id::random();
  sent.contents[3].front() = std::byte{1};
  REQUIRE(keeping.take(sent, since(*keeping.kept, {3})) == "");  // of the others one stays
  checkPlayed(*keeping.kept, sent);
  keeping.kept = nullptr;
  CHECK(keeping.used == 0);
}

TEST_CASE("kept pages: a page may come from elsewhere in the checkpoint before") {
  Keeping keeping;
  Sent sent;
  REQUIRE(keeping.take(sent) == "");
  sent.id = Id::random();
  Bytes& device = sent.contents[3];
  std::swap_ranges(device.begin(), device.begin() + kPageBytes, device.begin() + kPageBytes);
  Places places = since(*keeping.kept, {});
  std::swap(places.at[3], places.at[4]);
  REQUIRE(keeping.take(sent, places) == "");
  checkPlayed(*keeping.kept, sent);
}

TEST_CASE("kept pages: what is damaged, cut off, too large or against another checkpoint is refused") {
  Keeping keeping;
  const Sent sent;
  REQUIRE(keeping.take(sent) == "");
  const auto first = keeping.kept;
  const uint64_t used = keeping.used;
  Sent next = sent;
  next.id = Id::random();
  next.contents[0][0] ^= std::byte{1};
  next.contents[5][0] ^= std::byte{1};
  const auto refused = [&](const Places& places, const char* why) {
    CHECK(keeping.take(next, places) == why);
    CHECK(keeping.kept == first);
    CHECK(keeping.used == used);
    checkPlayed(*keeping.kept, sent);
  };
  Places places = since(*first, {0, 6});
  places.base.low ^= 1;
  refused(places, "the worker tells what has changed since another checkpoint than the one that is held");
  constexpr char kNoSuchPage[] = "the worker names a page that the checkpoint before has not";
  places = since(*first, {0, 6});
  places.at[1] = Sent::kPages;
  refused(places, kNoSuchPage);
  places.at[1] = 2;  // a shorter one
  refused(places, kNoSuchPage);
  places = since(*first, {0, 6});
  places.base = Id();
  refused(places, kNoSuchPage);
  places = since(*first, {0, 6});
  places.at.pop_back();
  refused(places, "the worker tells of other pages than its session has");
  places = since(*first, {0, 6});
  places.damaged = 6;
  refused(places, kDamagedOnItsWay);
  for (const int parts : {0, 1}) {
    places = since(*first, {0, 6});
    places.parts = parts;
    CHECK_FALSE(keeping.take(next, places).empty());
    CHECK(keeping.kept == first);
    CHECK(keeping.used == used);
  }
  REQUIRE(keeping.take(next, since(*first, {0, 6})) == "");
  checkPlayed(*keeping.kept, next);
}

TEST_CASE("kept pages: more of them than are under way at a time") {
  constexpr size_t kMany = 20;
  Sent sent;
  sent.contents[3] = pattern(kMany * kPageBytes + 4096, 5);
  Places places;
  places.at.assign(sent.pages().size(), kNewPage);
  Keeping keeping;
  SECTION("come whole, and are played back whole") {
    REQUIRE(keeping.take(sent, places) == "");
    checkPlayed(*keeping.kept, sent);
  }
  SECTION("are refused for the first one that is damaged, also where more is wrong behind it") {
    places.shared = false;
    places.damaged = GENERATE(0, 3, 12, 22);
    places.parts = GENERATE(12, 100);
    const bool whole = places.damaged < static_cast<size_t>(places.parts);
    CHECK(keeping.take(sent, places) == (whole ? kDamagedOnItsWay : kOtherEnded));
    CHECK(keeping.used == 0);
  }
  SECTION("are refused where one says that it is like another one, and is not") {
    sent.contents[3].assign(sent.contents[3].size(), std::byte{0});
    places.shared = GENERATE(true, false);
    places.damaged = GENERATE(4, 15);
    CHECK(keeping.take(sent, places) == kDamagedOnItsWay);
    CHECK(keeping.used == 0);
  }
}

TEST_CASE("kept pages: of a damaged page and no room for it or a later one, the damage is told") {
  Sent sent;
  Keeping ample;
  REQUIRE(ample.take(sent) == "");
  constexpr uint64_t kLast = uint64_t{kPageBytes} + 4096;  // pages 5 and 6
  Keeping keeping(ample.used - kLast - 4096);
  CHECK(keeping.take(sent) == "there is no room for it");
  Places places;
  for (const size_t damaged : {2, 4, 5}) {
    places.damaged = damaged;
    CHECK(keeping.take(sent, places) == (damaged == 5 ? "there is no room for it" : kDamagedOnItsWay));
    CHECK(keeping.used == 0);
  }
}

TEST_CASE("kept pages: there must be room for what has changed, and a keeper without a checkpoint gets all") {
  Sent sent;
  uint64_t whole = 0;
  {
    Keeping keeping;
    REQUIRE(keeping.take(sent) == "");
    whole = keeping.used;
  }
  Keeping keeping(whole + kPageBytes);
  REQUIRE(keeping.take(sent) == "");
  sent.id = Id::random();
  const Places places = since(*keeping.kept, {3, 4});
  CHECK(keeping.take(sent, places) == "there is no room for it");
  CHECK(keeping.heard.answer == "there is no room for it");
  CHECK(keeping.used == whole);
  keeping.kept = nullptr;  // a new keeper names none, and a worker that tells it of changes alone is refused
  CHECK(keeping.take(sent, places) ==
        "the worker tells what has changed since another checkpoint than the one that is held");
  CHECK(keeping.heard.base == Id());
}

// A hostile worker writes to the memory at any time.
TEST_CASE("kept pages: what is kept has its checksum, also of a worker that changes pages behind its word") {
  constexpr size_t kMany = 60;  // more than there is room for
  Sent sent;
  sent.contents[3] = pattern(kMany * kPageBytes, 5);
  Places places;
  places.at.assign(sent.pages().size(), kNewPage);
  void* mapped = MAP_FAILED;  // the changer's own
  size_t bytes = 0;
  std::atomic<std::byte*> changes{nullptr};
  std::atomic<bool> ended{false};
  std::thread changer([&] {
    for (unsigned i = 0; !ended; ++i)
      if (std::byte* page = changes) page[i * 4093 % 512] = static_cast<std::byte>(i);
  });
  places.sent = [&](const PartRoom& room, size_t offset) {
    if (mapped == MAP_FAILED) {
      bytes = room.bytes();
      mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, room.memory()->descriptor(), 0);
    }
    if (mapped != MAP_FAILED) changes = static_cast<std::byte*>(mapped) + offset;
  };
  Keeping keeping;
  const std::string why = keeping.take(sent, places);
  ended = true;
  changer.join();
  REQUIRE(mapped != MAP_FAILED);
  munmap(mapped, bytes);
  const auto& made = keeping.kept;
  if (made == nullptr) {
    CHECK(why == kDamagedOnItsWay);
    return;
  }
  Bytes room;
  for (const auto& page : made->contents) {
    room.resize(page->bytes());
    CHECK(page->read(room) == "");
  }
}

TEST_CASE("kept pages: memory of a worker that keeps the descriptor of the room is free") {
  Keeping keeping;
  const Sent sent;
  const auto [mine, theirs] = connection();
  int kept = -1;
  std::thread worker([&, theirs = theirs] {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    Bytes block;
    if (!socket.receiveBlock(block, sizeof(Id))) return;
    const Bytes record = sent.record();
    if (!socket.sendBlock(record) || !socket.send(contentDigest(record)) || !socket.hearOffer().empty())
      return;
    kept = fcntl(socket.room()->memory()->descriptor(), F_DUPFD_CLOEXEC, 0);
  });
  std::shared_ptr<const KeptPages> made;
  {
    const Descriptor ours(mine);
    CHECK(takePages(ours, [] { return ""; }, *keeping.store, nullptr, made) == kOtherEnded);
  }
  worker.join();
  REQUIRE(kept >= 0);
  struct stat file{};
  REQUIRE(fstat(kept, &file) == 0);
  CHECK(file.st_size == Sent::kPages * kPageBytes);
  CHECK(file.st_blocks == 0);
  close(kept);
}
