#include "base/descriptor_passing.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "catch.h"

using namespace gpupool;

namespace {

struct Pair {
  int ends[2] = {-1, -1};
  explicit Pair(int type) { REQUIRE(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends) == 0); }
  ~Pair() {
    for (int end : ends)
      if (end >= 0) close(end);
  }
};

std::span<const std::byte> bytesOf(const char* text) {
  return std::as_bytes(std::span(text, std::strlen(text)));
}

// A pipe whose reading end is passed on: what arrives must be that pipe.
struct Pipe {
  int ends[2] = {-1, -1};
  Pipe() { REQUIRE(pipe2(ends, O_CLOEXEC) == 0); }
  ~Pipe() {
    for (int end : ends) close(end);
  }
};

}  // namespace

TEST_CASE("two descriptors in order, close-on-exec") {
  Pair pair(SOCK_SEQPACKET);
  Pipe one, two;
  const int passed[] = {one.ends[0], two.ends[0]};
  REQUIRE(sendWithDescriptors(pair.ends[0], bytesOf("hello"), passed) == 5);
  std::array<std::byte, 16> room{};
  const ReceivedMessage received = receiveWithDescriptors(pair.ends[1], room);
  CHECK(received.bytes == 5);
  CHECK(received.whole);
  CHECK(std::memcmp(room.data(), "hello", 5) == 0);
  REQUIRE(received.descriptors.size() == 2);
  REQUIRE(write(two.ends[1], "2", 1) == 1);
  REQUIRE(write(one.ends[1], "1", 1) == 1);
  for (size_t i = 0; i < 2; ++i) {
    CHECK((fcntl(received.descriptors[i], F_GETFD) & FD_CLOEXEC) != 0);
    char text = 0;
    CHECK(read(received.descriptors[i], &text, 1) == 1);
    CHECK(text == static_cast<char>('1' + i));
    close(received.descriptors[i]);
  }
}

TEST_CASE("none, and the end") {
  Pair pair(SOCK_STREAM);
  REQUIRE(sendWithDescriptors(pair.ends[0], bytesOf("abc"), {}) == 3);
  std::array<std::byte, 8> room{};
  ReceivedMessage received = receiveWithDescriptors(pair.ends[1], room);
  CHECK(received.bytes == 3);
  CHECK(received.descriptors.empty());
  CHECK(received.sender == 0);
  received = receiveWithDescriptors(pair.ends[1], room, MSG_DONTWAIT);
  CHECK(received.bytes == -1);
  CHECK(errno == EAGAIN);
  close(std::exchange(pair.ends[0], -1));
  CHECK(receiveWithDescriptors(pair.ends[1], room).bytes == 0);
}

TEST_CASE("who sent it, and a datagram that does not fit") {
  Pair pair(SOCK_SEQPACKET);
  const int on = 1;
  REQUIRE(setsockopt(pair.ends[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
  Pipe pipe;
  const int passed[] = {pipe.ends[0]};
  REQUIRE(sendWithDescriptors(pair.ends[0], bytesOf("long"), passed, 0, true) == 4);
  std::array<std::byte, 2> room{};
  const ReceivedMessage received = receiveWithDescriptors(pair.ends[1], room);
  CHECK_FALSE(received.whole);
  CHECK(received.sender == getpid());
  REQUIRE(received.descriptors.size() == 1);
  close(received.descriptors[0]);
}

TEST_CASE("more descriptors than one message takes") {
  Pair pair(SOCK_SEQPACKET);
  const std::array<int, kMostDescriptors + 1> many{};
  CHECK(sendWithDescriptors(pair.ends[0], bytesOf("x"), many) == -1);
  CHECK(errno == EINVAL);
}
