#pragma once
// A session whose worker sends a checkpoint in pages, and a server that keeps it, for tests.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "server/files/kept_pages.h"

#include "catch.h"

namespace gpupool::server::test {

using Bytes = std::vector<std::byte>;

inline Bytes pattern(uint64_t bytes, unsigned seed) {
  Bytes content(bytes);
  for (uint64_t i = 0; i < bytes; ++i)
    content[i] = static_cast<std::byte>(i * 131 + i / 4096 + i / kPageBytes * 31 + seed);  // no page twice
  return content;
}

inline std::pair<int, int> connection() {
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
  std::vector<Bytes> contents{
      pattern(4096, 2), pattern(1000, 3), pattern(kPageBytes + 4096, 4), pattern(size_t{3} * kPageBytes, 5),
      pattern(12, 6),   pattern(640, 7)};
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
    lengths.reserve(contents.size());
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

inline Heard send(StateSocket& socket, const Sent& sent, const Places& places) {
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
inline void checkPlayed(const KeptPages& kept, const Sent& sent, size_t room) {
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
inline void checkPlayed(const KeptPages& kept, const Sent& sent) {
  for (const size_t room : {size_t{8} * StateSocket::kPartBytes, sent.all().size(), size_t{4096}, size_t{0}})
    checkPlayed(kept, sent, room);
}

inline Places since(const KeptPages& base, std::initializer_list<size_t> changed) {
  Places places{base.id};
  for (size_t i = 0; i < Sent::kPages; ++i) places.at[i] = i;
  for (const size_t i : changed) places.at[i] = kNewPage;
  return places;
}

}  // namespace gpupool::server::test
