// The stream between two workers: blocks, descriptors, and a peer that lies or goes.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "server/worker/state_socket.h"

#include "catch.h"

using namespace gpupool::server;

namespace {

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
