// Connections beside a stream: who may come, what is dealt out to them, and what happens when one of them
// ends.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "server/worker/parallel_sockets.h"
#include "server/worker/tests/connection.h"

#include "catch.h"

using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

namespace {

constexpr unsigned kBeside = 3;

bool never() { return false; }

int dial(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  const int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  REQUIRE(connect(stranger, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  return stranger;
}

std::string sendNumber(StateSocket& socket, size_t share) {
  const uint64_t number = 100 + share;
  return socket.send(std::as_bytes(std::span(&number, 1))) ? "" : socket.error();
}

std::string receiveNumber(StateSocket& socket, uint64_t& number) {
  return socket.receive(std::as_writable_bytes(std::span(&number, 1))) ? "" : socket.error();
}

// Both ends of a stream over TCP, and their parallel connections.
struct Ends {
  Ends() {
    ParallelSockets::want(kBeside);
    const auto [mine, theirs] = connection();
    sender = std::make_unique<StateSocket>(Descriptor(mine), never);
    receiver = std::make_unique<StateSocket>(Descriptor(theirs), never);
  }
  void connect() {
    const auto offer = in.offer(*receiver, kBeside);
    REQUIRE(offer);
    agree(*offer);
  }
  // offer: as the sender has it.
  void agree(const ParallelSockets::Offer& offer) {
    bool connected = false;
    std::thread other([&] { connected = out.connect(*sender, offer); });
    const bool accepted = in.accept(*receiver);
    other.join();
    CHECK(connected);
    CHECK(accepted);
  }
  // Both ends do their parts at a time.
  std::pair<std::string, std::string> together(const ParallelSockets::Work& sends,
                                               const ParallelSockets::Work& receives) {
    std::string sent;
    std::thread other([&] { sent = out.together(*sender, out.shares(), sends); });
    const std::string received = in.together(*receiver, in.shares(), receives);
    other.join();
    return {sent, received};
  }
  void haveTheSame() {
    REQUIRE(in.shares() == out.shares());
    std::vector<uint64_t> came(in.shares());
    const auto [sent, received] = together(
        &sendNumber, [&](StateSocket& socket, size_t share) { return receiveNumber(socket, came[share]); });
    CHECK(sent == "");
    CHECK(received == "");
    for (size_t i = 0; i < came.size(); ++i) CHECK(came[i] == 100 + i);
  }
  std::unique_ptr<StateSocket> sender, receiver;
  ParallelSockets out{never}, in{never};
};

}  // namespace

TEST_CASE("parallel sockets: each share has a connection of its own, the same at both ends") {
  Ends ends;
  ends.connect();
  CHECK(ends.out.shares() == kBeside + 1);
  ends.haveTheSame();
}

TEST_CASE("parallel sockets: the smaller number counts, and none where the sender wants none") {
  Ends ends;
  const auto offer = ends.in.offer(*ends.receiver, 1);
  REQUIRE(offer);
  CHECK(offer->most == 1);
  ParallelSockets another(never);
  CHECK_FALSE(another.offer(*ends.receiver, 0));
  CHECK_FALSE(ends.in.offer(*ends.receiver, kBeside));  // once
}

TEST_CASE("parallel sockets: whoever does not know the secret is not taken for the sender") {
  Ends ends;
  const auto offer = ends.in.offer(*ends.receiver, kBeside);
  REQUIRE(offer);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 20; ++i) {
    strangers.emplace_back(dial(offer->port));
    ParallelSockets::Greeting wrong;
    wrong.secret = offer->secret;
    wrong.number = i % kBeside;
    if (i % 2 == 0)
      wrong.secret[i % wrong.secret.size()] ^= std::byte{1};
    else
      wrong.magic ^= 1;
    const size_t bytes = i % 3 == 0 ? 0 : i % 3 == 1 ? 5 : sizeof wrong;  // silent, or lying
    REQUIRE(send(strangers.back(), &wrong, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
  }
  ends.agree(*offer);
  ends.haveTheSame();
}

// As over a network, where one is late, or comes in pieces, or twice.
TEST_CASE("parallel sockets: connections are told apart by their numbers, in whatever order they come") {
  Ends ends;
  const auto offer = ends.in.offer(*ends.receiver, kBeside);
  REQUIRE(offer);
  std::vector<std::unique_ptr<StateSocket>> made;
  made.reserve(kBeside);
  for (unsigned i = 0; i < kBeside; ++i)
    made.push_back(std::make_unique<StateSocket>(Descriptor(dial(offer->port)), never));
  StateSocket twice(Descriptor(dial(offer->port)), never), wild(Descriptor(dial(offer->port)), never);
  const auto greet = [&](StateSocket& socket, uint64_t number, size_t from, size_t bytes) {
    ParallelSockets::Greeting greeting;
    greeting.number = number;
    greeting.secret = offer->secret;
    REQUIRE(socket.send(std::as_bytes(std::span(&greeting, 1)).subspan(from, bytes)));
  };
  bool accepted = false;
  std::thread other([&] { accepted = ends.in.accept(*ends.receiver); });
  const uint64_t count = kBeside;
  REQUIRE(ends.sender->send(std::as_bytes(std::span(&count, 1))));
  greet(*made[0], 0, 0, 7);
  greet(*made[2], 2, 0, sizeof(ParallelSockets::Greeting));
  greet(wild, kBeside, 0, sizeof(ParallelSockets::Greeting));
  std::this_thread::sleep_for(100ms);
  greet(twice, 2, 0, sizeof(ParallelSockets::Greeting));
  greet(*made[1], 1, 0, sizeof(ParallelSockets::Greeting));
  std::this_thread::sleep_for(100ms);
  greet(*made[0], 0, 7, sizeof(ParallelSockets::Greeting) - 7);
  other.join();
  CHECK(accepted);
  uint64_t numbers = 0;
  REQUIRE(ends.sender->receive(std::as_writable_bytes(std::span(&numbers, 1))));
  CHECK(numbers == 0b111);
  for (unsigned i = 0; i < kBeside; ++i) CHECK(sendNumber(*made[i], i + 1).empty());
  CHECK(sendNumber(*ends.sender, 0).empty());
  uint64_t came[kBeside + 1] = {};
  CHECK(ends.in.together(*ends.receiver, kBeside + 1, [&](StateSocket& socket, size_t share) {
    return receiveNumber(socket, came[share]);
  }) == "");
  for (unsigned i = 0; i <= kBeside; ++i) CHECK(came[i] == 100 + i);
}

TEST_CASE("parallel sockets: where the port does not answer, the stream carries all") {
  Ends ends;
  auto offer = ends.in.offer(*ends.receiver, kBeside);
  REQUIRE(offer);
  SECTION("nobody listens there") {
    const auto [mine, theirs] = connection();
    sockaddr_in address{};
    socklen_t length = sizeof address;
    REQUIRE(getsockname(theirs, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    offer->port = ntohs(address.sin_port);  // of nobody, in a moment
    close(mine);
    close(theirs);
  }
  SECTION("it is a service's") { offer->port = 22; }
  ends.agree(*offer);
  CHECK(ends.out.shares() == 1);
  CHECK(ends.in.shares() == 1);
}

// A proxy, or another machine with that address, may have taken them.
TEST_CASE("parallel sockets: connections that do not come are done without, by both ends") {
  Ends ends;
  const auto offer = ends.in.offer(*ends.receiver, kBeside);
  REQUIRE(offer);
  Ends elsewhere;
  const auto other = elsewhere.in.offer(*elsewhere.receiver, kBeside);
  REQUIRE(other);
  auto astray = *offer;
  astray.port = other->port;
  const auto began = std::chrono::steady_clock::now();
  ends.agree(astray);
  CHECK(std::chrono::steady_clock::now() - began >= ParallelSockets::kComes);
  CHECK(ends.out.shares() == 1);
  CHECK(ends.in.shares() == 1);
  ends.haveTheSame();
}

TEST_CASE("parallel sockets: a sender that lies, or ends, is not waited for") {
  Ends ends;
  REQUIRE(ends.in.offer(*ends.receiver, kBeside));
  SECTION("more than were offered") {
    const uint64_t many = kBeside + 1;
    REQUIRE(ends.sender->send(std::as_bytes(std::span(&many, 1))));
    CHECK_FALSE(ends.in.accept(*ends.receiver));
    CHECK(ends.receiver->error() == "the other worker has more connections than were offered");
  }
  SECTION("it ends") {
    ends.sender = nullptr;
    CHECK_FALSE(ends.in.accept(*ends.receiver));
    CHECK(ends.receiver->error() == kOtherEnded);
  }
}

TEST_CASE("parallel sockets: an exception in one share ends all of them") {
  Ends ends;
  ends.connect();
  const auto [sent, received] = ends.together(
      [](StateSocket&, size_t share) -> std::string {
        if (share == 2) throw std::runtime_error("no memory");
        return "";
      },
      [](StateSocket& socket, size_t) {
        uint64_t number = 0;
        return receiveNumber(socket, number);
      });
  CHECK(sent == "no memory");
  CHECK(received == kOtherEnded);
}

// The others wait for bytes that do not come, or send what nobody takes.
TEST_CASE("parallel sockets: when one share fails at either end, all end, and the first reason is told") {
  const size_t failing = GENERATE(size_t{0}, size_t{2});
  const bool atSender = GENERATE(false, true);
  CAPTURE(failing, atSender);
  Ends ends;
  ends.connect();
  const auto goesOn = [](StateSocket& socket, bool sends) -> std::string {
    std::vector<std::byte> room(size_t{1} << 20);
    while (sends ? socket.send(room) : socket.receive(room)) {
    }
    return socket.error();
  };
  const auto work = [&](bool fails, bool sends) {
    return [&, fails, sends](StateSocket& socket, size_t share) -> std::string {
      if (!fails || share != failing) return goesOn(socket, sends);
      std::this_thread::sleep_for(50ms);
      return "the device does not answer";
    };
  };
  std::string sent;
  std::thread other([&] {
    sent = ends.out.together(*ends.sender, ends.out.shares(), work(atSender, true));
    if (!sent.empty() && atSender) ends.sender = nullptr;  // as a worker that gives up does
  });
  const std::string received = ends.in.together(*ends.receiver, ends.in.shares(), work(!atSender, false));
  if (!atSender) ends.receiver->answer(received);
  other.join();
  if (atSender) {
    CHECK(sent == "the device does not answer");
    CHECK(received == kOtherEnded);
    return;
  }
  CHECK(received == "the device does not answer");
  CHECK_FALSE(sent.empty());
  CHECK_FALSE(ends.sender->error().empty());  // and then what the other end says of it is heard
  ends.sender->forgetError();
  CHECK(ends.sender->hearAnswer() == "the device does not answer");
}
