// Checkpoints in pages: what a worker sends, which may be anything, and what is kept of it.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "base/descriptor_passing.h"
#include "server/files/kept_pages.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;

namespace {

using Bytes = std::vector<std::byte>;

Bytes pattern(uint64_t bytes, unsigned seed) {
  Bytes content(bytes);
  for (uint64_t i = 0; i < bytes; ++i)
    content[i] = static_cast<std::byte>(i * 131 + i / 4096 + i / kPageBytes * 31 + seed);  // no page twice
  return content;
}

std::pair<int, int> connection() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {ends[0], ends[1]};
}

// A session, and what its worker sends of it. Its pages: words and staging memory in one, two of pinned
// memory, three of the device's, its variables in one.
struct Sent {
  static constexpr size_t kPages = 7;
  Bytes image = pattern(5'000'000, 1);
  schema::ImageName name{};
  std::vector<Bytes> contents{pattern(4096, 2),           pattern(1000, 3), pattern(kPageBytes + 4096, 4),
                              pattern(3 * kPageBytes, 5), pattern(12, 6),   pattern(640, 7)};
  Id id = Id::random();
  uint64_t frame = 99;

  Sent() {
    const Digest digest = contentDigest(image);
    std::memcpy(name.words, digest.data(), digest.size());
    name.bytes = image.size();
  }
  Bytes record() const {
    capnp::MallocMessageBuilder message;
    auto out = message.initRoot<schema::SessionRecord>();
    out.setLastFrame(frame);
    out.setWordsBytes(contents[0].size());
    out.setStagingBytes(contents[1].size());
    out.initHost(1)[0].setBytes(contents[2].size());
    out.initPieces(1)[0].setBytes(contents[3].size());
    auto variables = out.initVariables(2);
    variables[0].setBytes(contents[4].size());
    variables[1].setBytes(contents[5].size());
    auto images = out.initImages(1);
    images[0].setHere(true);
    images[0].setName(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(&name), sizeof name));
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = std::as_bytes(std::span(words.begin(), words.size()));
    return {bytes.begin(), bytes.end()};
  }
  Bytes all() const {
    Bytes bytes;
    for (const Bytes& content : contents) bytes.insert(bytes.end(), content.begin(), content.end());
    return bytes;
  }
  std::vector<uint32_t> pages() const {
    std::vector<uint64_t> lengths;
    for (const Bytes& content : contents) lengths.push_back(content.size());
    return pagesOf(lengths);
  }
};

// What a worker tells of where its pages are.
struct Places {
  Id base;
  std::vector<uint64_t> at = std::vector<uint64_t>(Sent::kPages, kNewPage);
  int parts = 100;            // behind so many it goes
  size_t damaged = SIZE_MAX;  // that page
  bool shared = true;         // through memory that both map; false: as an older worker
  // Behind each part that was sent, where it lies.
  std::function<void(const PartRoom& room, size_t offset)> sent;
};

struct Heard {
  Id base;
  bool lacksImage = false;
  std::string answer;
};

Heard send(StateSocket& socket, const Sent& sent, const Places& places) {
  Heard heard;
  Bytes block;
  if (!socket.receiveBlock(block, sizeof heard.base)) return heard;
  if (block.size() == sizeof heard.base) std::memcpy(&heard.base, block.data(), sizeof heard.base);
  const Bytes record = sent.record();
  if (!socket.sendBlock(record) || !socket.send(contentDigest(record))) return heard;
  heard.answer = places.shared ? socket.hearOffer() : socket.hearAnswer();
  if (!heard.answer.empty() || !socket.receiveBlock(block, sizeof sent.name)) return heard;
  heard.lacksImage = !block.empty();
  if (heard.lacksImage) socket.send(sent.image);
  const PagesHeader header{places.base, sent.id};
  block.resize(sizeof header + places.at.size() * 8);
  std::memcpy(block.data(), &header, sizeof header);
  if (!places.at.empty()) std::memcpy(block.data() + sizeof header, places.at.data(), places.at.size() * 8);
  socket.sendBlock(block);
  Bytes all = sent.all();
  std::span<std::byte> rest(all);
  int parts = places.parts;
  const auto lengths = sent.pages();
  for (size_t i = 0; i < places.at.size() && i < lengths.size(); ++i) {
    const auto page = rest.first(lengths[i]);
    rest = rest.subspan(lengths[i]);
    if (places.at[i] != kNewPage) continue;
    if (--parts < 0) return heard;
    const Checksum checksum = checksumOf(page);
    if (places.damaged == i) page[3] ^= std::byte{1};
    std::byte* place = nullptr;
    while (socket.room() != nullptr && (place = socket.room()->take(page.size())) == nullptr)
      if (!socket.awaitRoom()) break;
    if (place != nullptr) std::memcpy(place, page.data(), page.size());
    socket.sendPart(place != nullptr ? std::span(place, page.size()) : page, checksum);
    if (places.sent && place != nullptr)
      places.sent(*socket.room(), static_cast<size_t>(place - socket.room()->memory()->data()));
  }
  socket.forgetError();
  heard.answer = socket.hearAnswer();
  return heard;
}

class Keeping {
 public:
  explicit Keeping(uint64_t most = UINT64_MAX) {
    store = PageStore::create({[this, most](uint64_t more) -> std::string {
                                 if (used + more > most) return "there is no room for it";
                                 used += more;
                                 return "";
                               },
                               [this](uint64_t less) { used -= less; }});
  }
  // Why it is not kept.
  std::string take(const Sent& sent, const Places& places = {}) {
    const auto [mine, theirs] = connection();
    std::thread worker([&, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      heard = send(socket, sent, places);
    });
    const Descriptor ours(mine);
    std::shared_ptr<const KeptPages> made;
    const std::string why = takePages(ours, [] { return ""; }, *store, kept.get(), made);
    worker.join();
    CHECK((made != nullptr) == why.empty());
    if (made != nullptr) kept = made;
    return why;
  }
  std::atomic<uint64_t> used{0};
  std::shared_ptr<PageStore> store;
  std::shared_ptr<const KeptPages> kept;
  Heard heard;
};

// What a worker gets that rebuilds the session.
// Of so much memory that it offers; 0: none.
void checkPlayed(const KeptPages& kept, const Sent& sent, size_t room) {
  const auto [mine, theirs] = connection();
  std::thread player([&kept, mine = mine] {
    StateSocket socket{Descriptor(mine), [] { return false; }};
    CHECK(playBack(socket, kept) == "");
  });
  StateSocket socket{Descriptor(theirs), [] { return false; }};
  Bytes record;
  Digest digest{};
  CHECK((socket.receiveBlock(record, kMostRecordBytes) && socket.receive(digest)));
  CHECK((record == sent.record()));
  CHECK(digest == contentDigest(record));
  CHECK((socket.answer("") && socket.sendBlock(std::as_bytes(std::span(&sent.name, 1)))));
  Bytes image(sent.image.size());
  CHECK(socket.receive(image));
  CHECK((image == sent.image));
  CHECK(socket.offerRoom(room == 0 ? nullptr : transport::SharedMemory::create(room)));
  for (const Bytes& content : sent.contents) {
    Bytes came(content.size());
    CHECK(socket.receiveContent(came));
    CHECK((came == content));
  }
  CHECK(socket.answer(""));
  player.join();
  CHECK((socket.sharedParts() != 0) == (room >= sent.contents[3].size()));
}
void checkPlayed(const KeptPages& kept, const Sent& sent) {
  for (const size_t room : {size_t{8} * StateSocket::kPartBytes, sent.all().size(), size_t{4096}, size_t{0}})
    checkPlayed(kept, sent, room);
}

Places since(const KeptPages& base, std::initializer_list<size_t> changed) {
  Places places{base.id};
  for (size_t i = 0; i < Sent::kPages; ++i) places.at[i] = i;
  for (const size_t i : changed) places.at[i] = kNewPage;
  return places;
}

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
  CHECK(keeping.used < whole + kPageBytes + 64 * 1024);
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
  CHECK(keeping.used <= whole + kPageBytes + 64 * 1024);
  checkPlayed(*keeping.kept, sent);
}

TEST_CASE("kept pages: pages that are alike are there once") {
  Keeping keeping;
  Sent sent;
  sent.contents[3].assign(sent.contents[3].size(), std::byte{0});  // three pages
  REQUIRE(keeping.take(sent) == "");
  checkPlayed(*keeping.kept, sent);
  CHECK(keeping.kept->facts.bytes == sent.all().size() + sent.image.size() + sent.record().size());
  CHECK(keeping.used <= keeping.kept->facts.bytes - 2 * kPageBytes + 64 * 1024);
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

TEST_CASE("kept pages: a worker that rebuilds and offers what is no memory, or gives back what it has not") {
  Keeping keeping;
  const Sent sent;
  REQUIRE(keeping.take(sent) == "");
  const auto [mine, theirs] = connection();
  const bool unsealed = GENERATE(true, false);
  std::thread worker([&, theirs = theirs] {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    Bytes record;
    Digest digest{};
    CHECK((socket.receiveBlock(record, kMostRecordBytes) && socket.receive(digest)));
    CHECK((socket.answer("") && socket.sendBlock({})));
    const uint64_t words[] = {0, ~uint64_t{0}};
    const int memory = memfd_create("test", MFD_CLOEXEC);
    CHECK(ftruncate(memory, 4096) == 0);
    if (unsealed)
      sendWithDescriptors(theirs, std::as_bytes(std::span(words)), std::span(&memory, 1));
    else if (socket.offerRoom(transport::SharedMemory::create(4096)))
      socket.send(std::as_bytes(std::span(words).subspan(1)));
    close(memory);
    socket.endSending();
    socket.hearOut(std::chrono::seconds(10));
  });
  {
    StateSocket socket{Descriptor(mine), [] { return false; }};
    CHECK(playBack(socket, *keeping.kept) ==
          (unsealed ? "shared memory: the peer's memory is not sealed against resizing"
                    : kOtherEnded));  // what follows that is not heard
  }
  worker.join();
}
