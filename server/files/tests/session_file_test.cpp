// A session's stream in a file: written as it comes, and read only where it is what was written.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <thread>

#include "server/files/manifest.h"
#include "server/files/session_file.h"
#include "server/worker/stream_layout.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;

namespace {

constexpr uint64_t kWords = 4096, kStaging = 1000, kHost = 4096, kVariable = 12, kArray = 640;
constexpr uint64_t kDevice = StateSocket::kPartBytes + 333;

std::vector<std::byte> pattern(uint64_t bytes, unsigned seed) {
  std::vector<std::byte> content(bytes);
  for (uint64_t i = 0; i < bytes; ++i) content[i] = static_cast<std::byte>(i * 131 + seed);
  return content;
}

int memoryFile() {
  const int file = memfd_create("session", MFD_CLOEXEC);
  REQUIRE(file >= 0);
  return file;
}

std::pair<int, int> connection() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {ends[0], ends[1]};
}

// What a worker sends, and what one expects that rebuilds the session.
struct Sent {
  std::vector<std::vector<std::byte>> images{pattern(5'000'000, 1), pattern(100, 2)};
  std::vector<schema::ImageName> names;
  std::vector<uint64_t> lengths{kWords, kStaging, kHost, kDevice, kVariable, kArray};
  std::vector<std::byte> record;

  Sent() {
    for (const auto& image : images) {
      schema::ImageName& name = names.emplace_back();
      const Digest digest = contentDigest(image);
      std::memcpy(name.words, digest.data(), digest.size());
      name.bytes = image.size();
    }
    if (std::memcmp(&names[0], &names[1], sizeof names[0]) > 0) {
      std::swap(names[0], names[1]);
      std::swap(images[0], images[1]);
    }
    capnp::MallocMessageBuilder message;
    auto out = message.initRoot<schema::SessionRecord>();
    out.setLastFrame(99);
    out.setRowsHash(5);
    out.setDriverVersion(13000);
    out.setWordsBytes(kWords);
    out.setStagingBytes(kStaging);
    out.initHost(1)[0].setBytes(kHost);
    auto pieces = out.initPieces(2);
    pieces[0].setBytes(kDevice - 33);
    pieces[1].setBytes(33);
    out.initVariables(1)[0].setBytes(kVariable);
    out.initArrays(1)[0].setBytes(kArray);
    auto list = out.initImages(static_cast<unsigned>(names.size()));
    for (unsigned i = 0; i < list.size(); ++i) {
      list[i].setHere(true);
      list[i].setName(capnp::Data::Reader(reinterpret_cast<const kj::byte*>(&names[i]), sizeof names[i]));
    }
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = std::as_bytes(std::span(words.begin(), words.size()));
    record.assign(bytes.begin(), bytes.end());
  }

  // As streamState does. What the other end makes of it. stop: behind so many steps it goes.
  std::string send(StateSocket& socket, int stop = 100) const {
    const auto ends = [&] { return --stop < 0; };
    if (ends() || !socket.sendBlock(record) || !socket.send(contentDigest(record))) return socket.error();
    if (std::string why = socket.hearAnswer(); !why.empty()) return why;
    std::vector<std::byte> asked;
    if (ends() || !socket.receiveBlock(asked, names.size() * sizeof names[0])) return socket.error();
    REQUIRE(asked.size() == names.size() * sizeof names[0]);
    CHECK(std::memcmp(asked.data(), names.data(), asked.size()) == 0);
    for (const auto& image : images)
      if (ends() || !socket.send(image)) return socket.error();
    if (std::string why = socket.hearAnswer(); !why.empty()) return why;
    for (size_t i = 0; i < lengths.size(); ++i)
      if (ends() || !socket.sendContent(pattern(lengths[i], static_cast<unsigned>(i)))) return socket.error();
    return socket.hearAnswer();
  }
};

FileFacts written(const Sent& sent, int file) {
  const auto [mine, theirs] = connection();
  std::thread worker([&sent, theirs = theirs] {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    CHECK(sent.send(socket) == "");
  });
  StateSocket socket{Descriptor(mine), [] { return false; }};
  FileFacts facts;
  CHECK(takeDown(socket, file, facts) == "");
  worker.join();
  return facts;
}

}  // namespace

TEST_CASE("session file: what a worker sends is in it, and comes out of it again") {
  const Sent sent;
  const Descriptor file(memoryFile());
  const FileFacts facts = written(sent, file);
  CHECK(facts.lastFrame == 99);
  CHECK(facts.rowsHash == 5);
  CHECK(facts.driverVersion == 13000);
  CHECK(facts.bytes == static_cast<uint64_t>(lseek(file, 0, SEEK_END)));
  CHECK(checkFile(file, facts) == "");

  const auto [mine, theirs] = connection();
  std::thread player([&file, mine = mine] {
    StateSocket socket{Descriptor(mine), [] { return false; }};
    CHECK(playBack(socket, file) == "");
  });
  StateSocket socket{Descriptor(theirs), [] { return false; }};
  std::vector<std::byte> record;
  Digest digest{};
  REQUIRE((socket.receiveBlock(record, kMostRecordBytes) && socket.receive(digest)));
  CHECK(record == sent.record);
  CHECK(digest == contentDigest(record));
  REQUIRE(socket.answer(""));
  // It has the first image already.
  REQUIRE(socket.sendBlock(std::as_bytes(std::span(&sent.names[1], 1))));
  std::vector<std::byte> image(sent.images[1].size());
  REQUIRE(socket.receive(image));
  CHECK(image == sent.images[1]);
  REQUIRE(socket.answer(""));
  for (size_t i = 0; i < sent.lengths.size(); ++i) {
    std::vector<std::byte> content(sent.lengths[i]);
    REQUIRE(socket.receiveContent(content));
    CHECK(content == pattern(sent.lengths[i], static_cast<unsigned>(i)));
  }
  REQUIRE(socket.answer(""));
  player.join();
}

TEST_CASE("session file: a worker that refuses is heard, and one that asks for other code gets none") {
  const Sent sent;
  const Descriptor file(memoryFile());
  written(sent, file);
  for (const bool refuses : {true, false}) {
    const auto [mine, theirs] = connection();
    std::string said;
    std::thread player([&file, &said, mine = mine] {
      StateSocket socket{Descriptor(mine), [] { return false; }};
      said = playBack(socket, file);
    });
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    std::vector<std::byte> record;
    Digest digest{};
    REQUIRE((socket.receiveBlock(record, kMostRecordBytes) && socket.receive(digest)));
    REQUIRE(socket.answer(refuses ? "no such device here" : ""));
    if (!refuses) {
      schema::ImageName other = sent.names[0];
      other.words[3] ^= 1;
      REQUIRE(socket.sendBlock(std::as_bytes(std::span(&other, 1))));
    }
    player.join();
    CHECK(said == (refuses ? "no such device here" : "the worker asks for code that is not the session's"));
  }
}

TEST_CASE("session file: one that is damaged, cut off, longer or another one is refused") {
  const Sent sent;
  const Descriptor file(memoryFile());
  const FileFacts facts = written(sent, file);
  const auto flip = [&](uint64_t at) {
    std::byte byte{};
    REQUIRE(pread(file, &byte, 1, static_cast<off_t>(at)) == 1);
    byte ^= std::byte{0x10};
    REQUIRE(pwrite(file, &byte, 1, static_cast<off_t>(at)) == 1);
  };
  const uint64_t images = 8 + sent.record.size() + 32, contents = images + 5'000'100;
  for (const uint64_t at :
       {uint64_t{0}, uint64_t{7}, uint64_t{8}, uint64_t{100}, images - 1, images, images + 4'999'999,
        contents, contents + 8, contents + facts.bytes / 2 - 5'000'000, facts.bytes - 1, facts.bytes - 33,
        facts.bytes - 33 - kArray}) {
    CAPTURE(at);
    flip(at);
    CHECK_FALSE(checkFile(file, facts).empty());
    flip(at);
  }
  CHECK(checkFile(file, facts) == "");
  for (const uint64_t length : {facts.bytes - 1, facts.bytes - 32, contents, images, uint64_t{9}, uint64_t{8},
                                uint64_t{3}, uint64_t{0}, facts.bytes + 1}) {
    CAPTURE(length);
    const Descriptor copy(memoryFile());
    std::vector<std::byte> bytes(facts.bytes + 1);
    REQUIRE(pread(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(facts.bytes));
    REQUIRE(write(copy, bytes.data(), length) == static_cast<ssize_t>(length));
    CHECK_FALSE(checkFile(copy, facts).empty());
  }
  FileFacts wrong = facts;
  wrong.digest[0] ^= std::byte{1};
  CHECK(checkFile(file, wrong) == "the file is another one than its manifest tells of");
  wrong = facts;
  ++wrong.lastFrame;
  CHECK(checkFile(file, wrong) == "the file is another one than its manifest tells of");
}

TEST_CASE("session file: a worker that goes at any point, lies, or sends damage") {
  const Sent sent;
  for (int stop = 0; stop < 10; ++stop) {
    CAPTURE(stop);
    const Descriptor file(memoryFile());
    const auto [mine, theirs] = connection();
    std::thread worker([&sent, stop, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      sent.send(socket, stop);
    });
    StateSocket socket{Descriptor(mine), [] { return false; }};
    FileFacts facts;
    CHECK(takeDown(socket, file, facts) == kOtherEnded);
    worker.join();
  }
  for (const int lie : {0, 1, 2, 3}) {
    CAPTURE(lie);
    Sent other;
    if (lie == 0) other.record[other.record.size() / 2] ^= std::byte{1};  // its digest is right
    if (lie == 1) other.lengths[3] -= 1;
    if (lie == 2) other.images[0][77] ^= std::byte{1};
    if (lie == 3) other.record.resize(other.record.size() - 3);
    const Descriptor file(memoryFile());
    const auto [mine, theirs] = connection();
    std::string said;
    std::thread worker([&other, &said, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      said = other.send(socket);
    });
    StateSocket socket{Descriptor(mine), [] { return false; }};
    FileFacts facts;
    const std::string why = takeDown(socket, file, facts);
    worker.join();
    if (lie != 0) CHECK_FALSE(why.empty());
    if (lie == 2 || lie == 3) CHECK_FALSE(said.empty());
  }
}

TEST_CASE("session file: who may not begin or end says so to the worker; a disk that is full does") {
  const Sent sent;
  for (const int how : {0, 1, 2}) {
    CAPTURE(how);
    const Descriptor file(memoryFile());
    const auto [mine, theirs] = connection();
    std::string said;
    std::thread worker([&sent, &said, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      said = sent.send(socket);
      if (said == kOtherEnded) {  // what it has said is there still
        socket.forgetError();
        said = socket.hearAnswer();
      }
    });
    TakeDownSteps steps;
    if (how == 0) steps.stands = [] { return "another session does not stand still"; };
    if (how == 1) steps.written = [] { return "not published"; };
    // In place of a disk that is full: a file that may not grow. SIGXFSZ would come with it.
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    if (how == 2) {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit small{1'000'000, before.rlim_max};
      REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    }
    StateSocket socket{Descriptor(mine), [] { return false; }};
    FileFacts facts;
    const std::string why = takeDown(socket, file, facts, steps);
    setrlimit(RLIMIT_FSIZE, &before);
    worker.join();
    CHECK(why == (how == 0   ? "another session does not stand still"
                  : how == 1 ? "not published"
                             : "the file cannot be written: File too large"));
    CHECK(said == why);
  }
}

TEST_CASE("manifest: what is written is read, and nothing else is") {
  Manifest manifest;
  manifest.id = {1, 2};
  manifest.lease = {3, 4};
  manifest.tenant = "eve";
  manifest.holder = "eve@head";
  manifest.server = "node7";
  manifest.writtenS = 5;
  manifest.held = true;
  manifest.rowsHash = 6;
  manifest.driverVersion = 13000;
  manifest.devices = {{"a GPU", true, 7, 8}};
  manifest.sessions.resize(2);
  manifest.sessions[1].session = {9, 10};
  manifest.sessions[1].epoch = 11;
  manifest.sessions[1].command = "train";
  manifest.sessions[1].transport = "ucx";
  manifest.sessions[1].file = "0a";
  manifest.sessions[1].facts = {12, sha256({}), 13, 6, 13000};
  auto bytes = encodeManifest(manifest);
  const Manifest read = decodeManifest(bytes);
  CHECK(read.id == manifest.id);
  CHECK(read.lease == manifest.lease);
  CHECK(read.tenant == "eve");
  CHECK(read.server == "node7");
  CHECK(read.held);
  CHECK(read.rowsHash == 6);
  CHECK(read.driverVersion == 13000);
  REQUIRE(read.devices.size() == 1);
  CHECK(read.devices[0].name == "a GPU");
  CHECK(read.devices[0].memoryBytes == 8);
  REQUIRE(read.sessions.size() == 2);
  CHECK(read.sessions[1].session == Id{9, 10});
  CHECK(read.sessions[1].facts.bytes == 12);
  CHECK(read.sessions[1].facts.digest == sha256({}));
  CHECK(read.sessions[1].facts.lastFrame == 13);
  for (size_t at = 0; at < bytes.size(); ++at) {
    CAPTURE(at);
    bytes[at] ^= std::byte{4};
    CHECK_THROWS(decodeManifest(bytes));
    bytes[at] ^= std::byte{4};
    CHECK_THROWS(decodeManifest(std::span(bytes).first(at)));
  }
}
