// Checkpoints in pages, played back to workers that rebuild the session: of this build and of older ones, and
// to those that lie; and what has been damaged where it is kept.
#include <sys/mman.h>

#include "base/descriptor_passing.h"
#include "server/files/tests/kept_session.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

// What a worker of a build before pages' checksums takes, and how: in memory in which nothing stands it gets
// parts with the checksum of their bytes. "" or why it takes no more.
std::string receiveAsOlder(StateSocket& socket, int raw, const Sent& sent) {
  constexpr uint64_t kShared = uint64_t{1} << 63, kGivenBack = kShared | 1, kNothing = 0;
  const auto room = transport::SharedMemory::create(4 * StateSocket::kPartBytes);
  const int descriptor = room->descriptor();
  REQUIRE(sendWithDescriptors(raw, std::as_bytes(std::span(&kNothing, 1)), std::span(&descriptor, 1)) == 8);
  for (const Bytes& content : sent.contents)
    for (uint64_t at = 0; at < content.size();) {
      uint64_t length = 0, offset = 0;
      Checksum checksum{};
      Bytes came(std::min(content.size() - at, StateSocket::kPartBytes));
      if (!socket.receive(std::as_writable_bytes(std::span(&length, 1)))) return socket.error();
      REQUIRE((length & ~kShared) == came.size());
      if ((length & kShared) != 0) {
        if (!socket.receive(std::as_writable_bytes(std::span(&offset, 1)))) return socket.error();
        std::memcpy(came.data(), room->data() + offset, came.size());
        socket.send(std::as_bytes(std::span(&kGivenBack, 1)));
      } else if (!socket.receive(came)) {
        return socket.error();
      }
      if (!socket.receive(checksum)) return socket.error();
      CHECK(checksum == checksumOf(came));
      CHECK((std::memcmp(came.data(), content.data() + at, came.size()) == 0));
      at += came.size();
    }
  return "";
}

enum class Takes { pages, parts, bytes };

// What the server says of it.
std::string play(const KeptPages& kept, const Sent& sent, Takes takes) {
  const auto [mine, theirs] = connection();
  std::string said;
  std::thread player([&, mine = mine] {
    StateSocket socket{Descriptor(mine), [] { return false; }};
    said = playBack(socket, kept);
  });
  StateSocket socket{Descriptor(theirs), [] { return false; }};
  Bytes record;
  Digest digest{};
  CHECK((socket.receiveBlock(record, kMostRecordBytes) && socket.receive(digest)));
  CHECK((socket.answer("") && socket.sendBlock({})));
  std::string why;
  if (takes == Takes::parts) {
    why = receiveAsOlder(socket, theirs, sent);
  } else {
    const size_t room = 4 * StateSocket::kPartBytes;
    CHECK(socket.offerRoom(takes == Takes::bytes ? nullptr : transport::SharedMemory::create(room)));
    for (const Bytes& content : sent.contents) {
      Bytes came(content.size());
      if (!socket.receiveContent(came)) break;
      CHECK((came == content));
    }
    why = socket.error();
  }
  socket.forgetError();
  socket.answer(why);
  if (!why.empty()) {
    socket.endSending();
    socket.hearOut(std::chrono::seconds(10));
  }
  player.join();
  return said;
}

// One byte of where those bytes are kept, in this process, is another one. How many such places there are.
size_t damageKept(std::span<const std::byte> bytes) {
  size_t found = 0;
  for (int file = 0; file < 1024; ++file) {
    char name[100]{};
    if (readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), name, sizeof name - 1) <= 0) continue;
    if (std::string(name).find("gpupool-checkpoints") == std::string::npos) continue;
    // Most places differ in their first bytes already.
    Bytes there(std::min<size_t>(bytes.size(), 512));
    const auto read = [&](off_t at) {
      return pread(file, there.data(), there.size(), at) == static_cast<ssize_t>(there.size());
    };
    for (off_t at = 0; read(at); at += 4096, there.resize(std::min<size_t>(bytes.size(), 512))) {
      if (std::memcmp(there.data(), bytes.data(), there.size()) != 0) continue;
      there.resize(bytes.size());
      if (!read(at) || std::memcmp(there.data(), bytes.data(), there.size()) != 0) continue;
      there[there.size() / 2] ^= std::byte{1};
      REQUIRE(pwrite(file, there.data(), there.size(), at) == static_cast<ssize_t>(there.size()));
      ++found;
    }
  }
  return found;
}

}  // namespace

TEST_CASE("kept pages: workers of this build and of older ones get contents of several parts whole") {
  Sent sent;
  sent.contents[3] = pattern(2 * StateSocket::kPartBytes + size_t{3} * kPageBytes + 4096, 5);
  Places places;
  places.at.assign(sent.pages().size(), kNewPage);
  Keeping keeping;
  REQUIRE(keeping.take(sent, places) == "");
  CHECK(play(*keeping.kept, sent, GENERATE(Takes::pages, Takes::parts, Takes::bytes)) == "");
}

TEST_CASE(
    "kept pages: what is damaged where it is kept is refused, whoever compares it, and the server says so") {
  const Sent sent;
  Keeping keeping;
  REQUIRE(keeping.take(sent) == "");
  const Takes takes = GENERATE(Takes::pages, Takes::parts, Takes::bytes);
  SECTION("the first page of a part") {
    REQUIRE(damageKept(std::span(sent.contents[3]).first(kPageBytes)) == 1);
  }
  SECTION("its last page") {
    REQUIRE(damageKept(std::span(sent.contents[3]).subspan(size_t{2} * kPageBytes)) == 1);
  }
  SECTION("a page of several parts") {
    Bytes page = sent.contents[4];
    page.insert(page.end(), sent.contents[5].begin(), sent.contents[5].end());
    REQUIRE(damageKept(page) == 1);
  }
  CHECK(play(*keeping.kept, sent, takes) == "the checkpoint is damaged");
}

TEST_CASE("kept pages: a worker that says of a whole checkpoint that it is damaged is only repeated") {
  const Sent sent;
  Keeping keeping;
  REQUIRE(keeping.take(sent) == "");
  const auto [mine, theirs] = connection();
  std::thread worker([theirs = theirs] {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    Bytes record;
    Digest digest{};
    CHECK((socket.receiveBlock(record, kMostRecordBytes) && socket.receive(digest)));
    CHECK((socket.answer("") && socket.sendBlock({})));
    CHECK(socket.offerRoom(transport::SharedMemory::create(size_t{8} << 20)));
    CHECK(socket.answer(kDamagedOnItsWay));
    socket.endSending();
    socket.hearOut(std::chrono::seconds(10));
  });
  {
    StateSocket socket{Descriptor(mine), [] { return false; }};
    CHECK(playBack(socket, *keeping.kept) == kDamagedOnItsWay);
  }
  worker.join();
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
