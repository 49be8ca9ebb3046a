// The stream between two workers: blocks, descriptors, and a peer that lies or goes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "base/descriptor_passing.h"
#include "server/worker/state_socket.h"

#include "catch.h"

using namespace gpupool::server;

namespace {

constexpr size_t kPage = 4096;

struct Pair {
  Pair() {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    mine = std::make_unique<StateSocket>(Descriptor(ends[0]), [this] { return stopping.load(); });
    theirs = std::make_unique<StateSocket>(Descriptor(ends[1]), [] { return false; });
    raw = ends[1];
  }
  std::atomic<bool> stopping{false};
  std::unique_ptr<StateSocket> mine, theirs;
  int raw = -1;
};

}  // namespace

TEST_CASE("state socket: blocks and many descriptors arrive whole") {
  Pair pair;
  std::vector<std::byte> large(5'000'000);
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<std::byte>(i * 7);
  std::vector<int> pipes;
  for (int i = 0; i < 75; ++i) {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    pipes.insert(pipes.end(), {ends[0], ends[1]});
  }
  bool sent = false;
  std::thread sender([&] {
    sent = pair.mine->sendBlock(large) && pair.mine->sendDescriptors(pipes) && pair.mine->sendBlock({});
  });
  std::vector<std::byte> got;
  std::vector<Descriptor> descriptors;
  CHECK(pair.theirs->receiveBlock(got, large.size()));
  CHECK(got == large);
  CHECK(pair.theirs->receiveDescriptors(descriptors, pipes.size()));
  CHECK(pair.theirs->receiveBlock(got, 0));
  sender.join();
  CHECK(sent);
  REQUIRE(descriptors.size() == pipes.size());
  // They are the same pipes, in their order.
  for (size_t i = 0; i < descriptors.size(); i += 2) {
    const char mark = static_cast<char>(i);
    char back = 0;
    REQUIRE(write(descriptors[i + 1], &mark, 1) == 1);
    REQUIRE(read(pipes[i], &back, 1) == 1);
    CHECK(back == mark);
  }
  for (const int end : pipes) close(end);
}

TEST_CASE("state socket: a length is not believed, an end is told, a stop is obeyed") {
  Pair pair;
  std::vector<std::byte> got;
  SECTION("a length beyond the bound") {
    const uint64_t vast = uint64_t{1} << 62;
    REQUIRE(pair.mine->send(std::as_bytes(std::span(&vast, 1))));
    CHECK_FALSE(pair.theirs->receiveBlock(got, 1000));
    CHECK(pair.theirs->error().find("more than") != std::string::npos);
  }
  SECTION("the end, in the middle of a block") {
    const uint64_t length = 100;
    REQUIRE(pair.mine->send(std::as_bytes(std::span(&length, 1))));
    pair.mine.reset();
    CHECK_FALSE(pair.theirs->receiveBlock(got, 1000));
    CHECK(pair.theirs->error() == "the other worker has ended");
    CHECK_FALSE(pair.theirs->send(std::as_bytes(std::span(&length, 1))));
  }
  SECTION("other descriptors than were said") {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    REQUIRE(pair.mine->sendDescriptors(ends));
    std::vector<Descriptor> descriptors;
    CHECK_FALSE(pair.theirs->receiveDescriptors(descriptors, 1));
    close(ends[0]);
    close(ends[1]);
  }
  SECTION("a stop ends what need not wait, too") {
    const uint64_t word = 7;
    REQUIRE(pair.theirs->send(std::as_bytes(std::span(&word, 1))));
    got.resize(1);
    REQUIRE(pair.mine->receive(got));
    pair.stopping = true;
    CHECK_FALSE(pair.mine->receive(got));
    CHECK(pair.mine->error() == "the session is ending");
    pair.mine->forgetError();
    CHECK_FALSE(pair.mine->send(got));
    CHECK(pair.mine->error() == "the session is ending");
  }
  SECTION("a stop ends a wait") {
    pair.stopping = true;
    CHECK_FALSE(pair.mine->receiveBlock(got, 1000));
    CHECK(pair.mine->error() == "the session is ending");
  }
}

TEST_CASE("state socket: contents come as they are expected, or are refused") {
  Pair pair;
  std::vector<std::byte> whole(StateSocket::kPartBytes + 5000);
  for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<std::byte>(i * 11);
  std::vector<std::byte> got(whole.size());
  const auto part = std::span(whole).first(5000);
  SECTION("in parts") {
    bool sent = false;
    std::thread sender([&] { sent = pair.mine->sendContent(whole) && pair.mine->sendContent({}); });
    CHECK(pair.theirs->receiveContent(got));
    CHECK(pair.theirs->receiveContent({}));
    sender.join();
    CHECK(sent);
    CHECK(got == whole);
  }
  SECTION("of another length: none of it is taken") {
    REQUIRE(pair.mine->sendContent(part));
    CHECK_FALSE(pair.theirs->receiveContent(std::span(got).first(4999)));
    CHECK(pair.theirs->error() == "the other worker sends other contents than it said");
    CHECK(got == std::vector<std::byte>(whole.size()));
  }
  SECTION("with another checksum") {
    Checksum checksum = checksumOf(part);
    checksum[15] ^= std::byte{1};
    REQUIRE(pair.mine->sendPart(part, checksum));
    CHECK_FALSE(pair.theirs->receiveContent(std::span(got).first(part.size())));
    CHECK(pair.theirs->error() == kDamagedOnItsWay);
  }
  SECTION("with another checksum, and what follows is wrong, too") {
    const auto first = std::span(whole).first(StateSocket::kPartBytes);
    Checksum checksum = checksumOf(first);
    checksum[0] ^= std::byte{1};
    const bool ends = GENERATE(false, true);
    std::thread sender([&] {
      pair.mine->sendPart(first, checksum);
      if (!ends) pair.mine->sendPart(part, checksum);  // shorter or not, it is not what it says
      pair.mine->endSending();
    });
    CHECK_FALSE(pair.theirs->receiveContent(got));
    sender.join();
    CHECK(pair.theirs->error() == kDamagedOnItsWay);
  }
  SECTION("cut off anywhere") {
    const uint64_t length = part.size();
    const size_t sent = GENERATE(size_t{0}, size_t{3}, size_t{8}, size_t{100}, size_t{5008}, size_t{5023});
    std::vector<std::byte> bytes(sizeof length + part.size() + sizeof(Checksum));
    std::memcpy(bytes.data(), &length, sizeof length);
    REQUIRE(pair.mine->send(std::span(bytes).first(sent)));
    pair.mine.reset();
    CHECK_FALSE(pair.theirs->receiveContent(std::span(got).first(part.size())));
    CHECK(pair.theirs->error() == kOtherEnded);
    CHECK(pair.theirs->ended());
  }
  SECTION("while the other one has refused already") {
    CHECK_FALSE(pair.mine->ended());
    REQUIRE(pair.theirs->sendBlock(part));
    CHECK_FALSE(pair.mine->sendContent(part));
    pair.mine->forgetError();
    CHECK(pair.mine->receiveBlock(got, part.size()));
    CHECK(got.size() == part.size());
  }
  SECTION("not at all, until a stop") {
    std::thread stopper([&] { pair.stopping = true; });
    CHECK_FALSE(pair.mine->receiveContent(got));
    stopper.join();
    CHECK(pair.mine->error() == "the session is ending");
  }
}

// ---- parts through shared memory

namespace {

using gpupool::transport::SharedMemory;

constexpr uint64_t kShared = uint64_t{1} << 63;

struct Placed {
  uint64_t length = 0, offset = 0;
  Checksum checksum{};
};

std::vector<std::byte> pattern(size_t bytes) {
  std::vector<std::byte> content(bytes);
  for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<std::byte>(i * 13 + i / 4096);
  return content;
}

// As a peer that says what it likes: an answer with these descriptors.
void offer(int socket, std::span<const int> descriptors) {
  const uint64_t nothing = 0;
  REQUIRE(gpupool::sendWithDescriptors(socket, std::as_bytes(std::span(&nothing, 1)), descriptors) == 8);
}

// Its places taken, in order, for as long as there is room.
std::vector<std::byte*> places(PartRoom& room, size_t bytes) {
  std::vector<std::byte*> taken;
  while (std::byte* place = room.take(bytes)) taken.push_back(place);
  return taken;
}

}  // namespace

TEST_CASE("part room: places follow one another around its end, and are free again in their order") {
  PartRoom room(SharedMemory::create(10 * kPage));
  std::byte* const begin = room.memory()->data();
  CHECK(room.take(11 * kPage) == nullptr);
  CHECK(room.take(0) == nullptr);
  CHECK(room.take(4 * kPage) == begin);
  CHECK(room.take(4 * kPage) == begin + 4 * kPage);
  CHECK(room.take(4 * kPage) == nullptr);
  CHECK_FALSE(room.giveBack(1));  // it was not sent
  CHECK(room.isNext({begin, 4 * kPage}));
  CHECK(room.isNext({begin, 100}));
  CHECK_FALSE(room.isNext({begin, 4 * kPage + 1}));
  CHECK_FALSE(room.isNext({begin + 4 * kPage, 4096}));
  room.sent();
  CHECK(room.isNext({begin + 4 * kPage, 4096}));
  CHECK_FALSE(room.giveBack(0));
  CHECK_FALSE(room.giveBack(2));
  CHECK(room.giveBack(1));
  CHECK(room.take(3 * kPage) == begin);  // at its end there is less
  CHECK(room.take(2 * kPage) == nullptr);
  CHECK(room.take(4096) == begin + 3 * kPage);
  CHECK(room.take(1) == nullptr);
  room.sent(), room.sent(), room.sent();
  CHECK(room.giveBack(3));
  CHECK(room.take(10 * kPage) == begin);
  CHECK(room.take(1) == nullptr);
}

TEST_CASE("state socket: parts through shared memory, more than there is room for") {
  Pair pair;
  constexpr size_t kPart = 3 * kPage, kParts = 50;
  const auto whole = pattern(kParts * kPart);
  std::thread sender([&] {
    CHECK(pair.mine->hearOffer().empty());
    REQUIRE(pair.mine->room() != nullptr);
    for (size_t i = 0; i < kParts;) {
      std::byte* place = pair.mine->room()->take(kPart);
      if (place == nullptr) {
        if (!pair.mine->awaitRoom()) return;
        continue;
      }
      const auto part = std::span(whole).subspan(i++ * kPart, kPart);
      std::memcpy(place, part.data(), part.size());
      if (!pair.mine->sendPart({place, kPart}, checksumOf(part))) return;
      // What has no place there goes as bytes, between the others.
      if (i == 7 && !pair.mine->sendPart(part, checksumOf(part))) return;
    }
    CHECK(pair.mine->hearAnswer() == "well");
  });
  REQUIRE(pair.theirs->offerRoom(SharedMemory::create(8 * kPart)));
  CHECK(pair.theirs->partsAtOnce(kPart, 100) == 4);
  CHECK(pair.theirs->partsAtOnce(kPart, 3) == 3);
  CHECK(pair.theirs->partsAtOnce(100 * kPart, 3) == 1);
  std::vector<std::byte> got, room(kPart);
  for (size_t i = 0; i < kParts + 1; ++i) {
    ReceivedPart part;
    REQUIRE(pair.theirs->receivePart(room, part));
    CHECK(part.shared == (i != 7));
    CHECK(checksumOf(part.bytes) == part.checksum);
    if (part.shared) got.insert(got.end(), part.bytes.begin(), part.bytes.end());
    REQUIRE(pair.theirs->giveBack(part));
  }
  CHECK(pair.theirs->answer("well"));
  sender.join();
  CHECK(pair.mine->error().empty());
  CHECK(pair.mine->sharedParts() == kParts);
  CHECK(pair.theirs->sharedParts() == kParts);
  CHECK((got == whole));
}

TEST_CASE("state socket: contents come through shared memory or as bytes, whatever the sender knows of it") {
  Pair pair;
  const bool knows = GENERATE(true, false), offers = GENERATE(true, false);
  constexpr size_t kPart = StateSocket::kPartBytes;
  const auto whole = pattern(5 * kPart + 333);
  std::thread sender([&] {
    CHECK((knows ? pair.mine->hearOffer() : pair.mine->hearAnswer()).empty());
    CHECK((pair.mine->room() != nullptr) == (knows && offers));
    if (pair.mine->room() == nullptr) pair.mine->ownRoom(SharedMemory::create(2 * kPart));
    for (std::span rest(whole); !rest.empty();) {
      const auto part = rest.first(std::min(rest.size(), kPart));
      std::byte* place = pair.mine->room()->take(part.size());
      if (place == nullptr && pair.mine->awaitRoom()) continue;
      REQUIRE(place != nullptr);
      std::memcpy(place, part.data(), part.size());
      if (!pair.mine->sendPart({place, part.size()}, checksumOf(part))) return;
      rest = rest.subspan(part.size());
    }
    CHECK(pair.mine->hearAnswer().empty());
  });
  const size_t parts = GENERATE(1, 2, 8);
  REQUIRE(pair.theirs->offerRoom(offers ? SharedMemory::create(parts * kPart) : nullptr));
  std::vector<std::byte> got(whole.size());
  CHECK(pair.theirs->receiveContent(got));
  CHECK(pair.theirs->answer(""));
  sender.join();
  CHECK((got == whole));
  CHECK(pair.theirs->sharedParts() == (knows && offers ? 6 : 0));
}

TEST_CASE("state socket: parts whose checksum is that of their pages, between others") {
  Pair pair;
  constexpr size_t kPart = StateSocket::kPartBytes;
  const auto whole = pattern(2 * kPart + size_t{3} * kPageBytes + 333);
  const size_t damaged =
      GENERATE(SIZE_MAX, size_t{0}, kPart - 1, kPart + kPageBytes, 2 * kPart + size_t{3} * kPageBytes);
  std::thread sender([&] {
    CHECK(pair.mine->hearOffer().empty());
    REQUIRE(pair.mine->takesPages());
    for (size_t at = 0; at < whole.size();) {
      const auto part = std::span(whole).subspan(at, std::min(whole.size() - at, kPart));
      std::byte* place = pair.mine->room()->take(part.size());
      if (place == nullptr && pair.mine->awaitRoom()) continue;
      if (place == nullptr) break;
      std::memcpy(place, part.data(), part.size());
      std::vector<Checksum> pages;
      for (size_t i = 0; i < part.size(); i += kPageBytes)
        pages.push_back(checksumOf(part.subspan(i, std::min<size_t>(part.size() - i, kPageBytes))));
      if (damaged - at < part.size()) place[damaged - at] ^= std::byte{1};
      const bool asOne = at == kPart && damaged == SIZE_MAX;  // as a sender that has no pages
      const std::span<std::byte> sent(place, part.size());
      if (!(asOne ? pair.mine->sendPart(sent, checksumOf(part)) : pair.mine->sendPages(sent, pages))) break;
      at += part.size();
    }
    pair.mine->forgetError();
    CHECK(pair.mine->hearAnswer() == (damaged == SIZE_MAX ? "" : kDamagedOnItsWay));
  });
  REQUIRE(pair.theirs->offerRoom(SharedMemory::create(4 * kPart)));
  std::vector<std::byte> got(whole.size());
  CHECK(pair.theirs->receiveContent(got) == (damaged == SIZE_MAX));
  const std::string error = pair.theirs->error();
  CHECK(error == (damaged == SIZE_MAX ? "" : kDamagedOnItsWay));
  pair.theirs->forgetError();
  CHECK(pair.theirs->answer(error));
  sender.join();
  if (damaged == SIZE_MAX) CHECK((got == whole));
}

TEST_CASE("state socket: pages' checksums are for receivers that say they take them") {
  Pair pair;
  const auto memory = SharedMemory::create(4096);
  const bool older = GENERATE(true, false);
  if (older) {
    const int descriptor = memory->descriptor();
    offer(pair.raw, std::span(&descriptor, 1));
  } else {
    REQUIRE(pair.theirs->offerRoom(memory));
  }
  REQUIRE(pair.mine->hearOffer().empty());
  CHECK(pair.mine->takesPages() == !older);
  const auto bytes = pattern(4096);
  const Checksum checksum = checksumOf(bytes);
  const bool placed = GENERATE(true, false);
  std::byte* place = pair.mine->room()->take(4096);
  std::memcpy(place, bytes.data(), bytes.size());
  const bool sent = pair.mine->sendPages({placed ? place : bytes.data(), 4096}, std::span(&checksum, 1));
  REQUIRE(sent == (placed && !older));
  if (!sent) return;
  std::vector<std::byte> got(4096);
  ReceivedPart part;
  REQUIRE(pair.theirs->receivePart(got, part));
  CHECK((part.shared && part.paged));
  CHECK(part.checksum == checksum);  // of one page, its own
}

TEST_CASE("state socket: a sender that tells of places without any having been offered is refused") {
  Pair pair;
  std::vector<std::byte> room(4096);
  ReceivedPart part;
  const Placed said{kShared | 4096, 0, {}};
  REQUIRE(pair.mine->send(std::as_bytes(std::span(&said, 1))));
  CHECK_FALSE(pair.theirs->receivePart(room, part));
  CHECK(pair.theirs->error() == "the other worker sends other contents than it said");
}

TEST_CASE("state socket: a sender that tells of other places than there are is refused") {
  Pair pair;
  constexpr size_t kRoom = 4 * kPage;
  std::vector<std::byte> room(4096);
  ReceivedPart part;
  Placed said{kShared | 4096, 0, {}};
  const auto tells = [&] { return pair.mine->send(std::as_bytes(std::span(&said, 1))); };
  REQUIRE(pair.theirs->offerRoom(SharedMemory::create(kRoom)));
  CHECK(pair.mine->hearOffer().empty());
  SECTION("beyond its end") {
    said.offset =
        GENERATE(uint64_t{kRoom - 4095}, uint64_t{kRoom}, uint64_t{kRoom + 1}, UINT64_MAX, UINT64_MAX - 4095);
    REQUIRE(tells());
    CHECK_FALSE(pair.theirs->receivePart(room, part));
    CHECK(pair.theirs->error() == "the other worker names a place that is not in the shared memory");
  }
  SECTION("of another length") {
    said.length = kShared | GENERATE(uint64_t{0}, uint64_t{4095}, uint64_t{4097}, kShared - 1);
    REQUIRE(tells());
    CHECK_FALSE(pair.theirs->receivePart(room, part));
    CHECK(pair.theirs->error() == "the other worker sends other contents than it said");
  }
  SECTION("the same one twice, at an odd place: that is its own affair") {
    said.offset = 4097;
    REQUIRE((tells() && tells()));
    CHECK(pair.theirs->receivePart(room, part));
    CHECK(pair.theirs->receivePart(room, part));
    CHECK(part.bytes.data() == pair.theirs->offered()->data() + 4097);
    CHECK(pair.theirs->error().empty());
  }
  SECTION("and then goes") {
    REQUIRE(pair.mine->send(std::as_bytes(std::span(&said.length, 1))));
    pair.mine.reset();
    CHECK_FALSE(pair.theirs->receivePart(room, part));
    CHECK(pair.theirs->error() == kOtherEnded);
  }
}

TEST_CASE("state socket: memory that its owner can take away, or is none, is refused") {
  Pair pair;
  const auto error = [&](int descriptor) {
    offer(pair.raw, std::span(&descriptor, 1));
    close(descriptor);
    const std::string heard = pair.mine->hearOffer();
    CHECK(pair.mine->room() == nullptr);
    CHECK(heard == pair.mine->error());
    return heard;
  };
  const auto memory = [](uint64_t bytes) {
    const int file = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(ftruncate(file, static_cast<off_t>(bytes)) == 0);
    return file;
  };
  constexpr char kCannot[] = "the other worker offers memory that it cannot offer";
  SECTION("without seals") {
    CHECK(error(memory(8 << 20)) == "shared memory: the peer's memory is not sealed against resizing");
  }
  SECTION("sealed against growing alone") {
    const int file = memory(8 << 20);
    REQUIRE(fcntl(file, F_ADD_SEALS, F_SEAL_GROW) == 0);
    CHECK(error(file) == "shared memory: the peer's memory is not sealed against resizing");
  }
  SECTION("without a byte") { CHECK(error(memory(0)) == kCannot); }
  SECTION("more than is ever needed") { CHECK(error(memory(StateSocket::kMostRoomBytes + 4096)) == kCannot); }
  SECTION("a part of a page") {
    const int file = memory(5000);
    REQUIRE(fcntl(file, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK) == 0);
    CHECK(error(file) == "shared memory: the peer announced 8192 bytes, the file has 5000");
  }
  SECTION("no memory at all") {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    close(ends[1]);
    CHECK(error(ends[0]) == kCannot);
  }
  SECTION("more than one") {
    const int files[] = {memory(4096), memory(4096)};
    offer(pair.raw, files);
    close(files[0]);
    close(files[1]);
    CHECK(pair.mine->hearOffer() == "the other worker sends other descriptors than it said");
  }
}

TEST_CASE("state socket: a receiver that gives back what it has not, nothing, or goes") {
  Pair pair;
  constexpr size_t kPart = 4096;
  REQUIRE(pair.theirs->offerRoom(SharedMemory::create(2 * kPart)));
  REQUIRE(pair.mine->hearOffer().empty());
  const auto taken = places(*pair.mine->room(), kPart);
  REQUIRE(taken.size() == 2);
  const auto send = [&](size_t which) {
    const std::span<std::byte> part(taken[which], kPart);
    return pair.mine->sendPart(part, checksumOf(part));
  };
  const auto says = [&](uint64_t word) { REQUIRE(pair.theirs->send(std::as_bytes(std::span(&word, 1)))); };
  constexpr char kTooMany[] = "the other worker gives back more than it has";
  REQUIRE(send(0));
  SECTION("more than was sent") {
    says(kShared | GENERATE(uint64_t{2}, uint64_t{0}, kShared - 1));
    CHECK_FALSE(pair.mine->awaitRoom());
    CHECK(pair.mine->error() == kTooMany);
  }
  SECTION("more than was sent, before its answer") {
    says(kShared | 1);
    says(kShared | 1);
    CHECK(pair.mine->hearAnswer() == kTooMany);
  }
  SECTION("one, of which the next part hears") {
    says(kShared | 1);
    CHECK(send(1));
    CHECK(pair.mine->room()->take(kPart) == taken[0]);
  }
  SECTION("and refuses") {
    says(kShared | 1);
    REQUIRE(pair.theirs->answer("no"));
    CHECK_FALSE(send(1));
    CHECK(pair.mine->error() == kOtherEnded);
    pair.mine->forgetError();
    CHECK(pair.mine->hearAnswer() == "no");
  }
  SECTION("a part of a word") {
    REQUIRE(pair.theirs->send(std::as_bytes(std::span("abc", 3))));
    CHECK_FALSE(pair.mine->awaitRoom());
    CHECK(pair.mine->error() == kOtherEnded);
  }
  SECTION("and goes") {
    pair.theirs.reset();
    CHECK_FALSE(pair.mine->awaitRoom());
    CHECK(pair.mine->error() == kOtherEnded);
  }
  SECTION("nothing, until a stop") {
    std::thread stopper([&] { pair.stopping = true; });
    CHECK_FALSE(pair.mine->awaitRoom());
    stopper.join();
    CHECK(pair.mine->error() == "the session is ending");
  }
}
