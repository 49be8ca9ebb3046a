// Connections beside a stream: who may come, what is dealt out to them, and what happens when one of them
// ends.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <thread>

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
    std::thread other([&] { CHECK(out.connect(*sender, *offer)); });
    CHECK(in.accept(*receiver));
    other.join();
  }
  // Both ends do their parts at a time.
  std::pair<std::string, std::string> together(const ParallelSockets::Work& sends,
                                               const ParallelSockets::Work& receives) {
    std::string sent;
    std::thread other([&] { sent = out.together(*sender, sends); });
    const std::string received = in.together(*receiver, receives);
    other.join();
    return {sent, received};
  }
  std::unique_ptr<StateSocket> sender, receiver;
  ParallelSockets out{never}, in{never};
};

std::string sendNumber(StateSocket& socket, size_t share) {
  const uint64_t number = 100 + share;
  return socket.send(std::as_bytes(std::span(&number, 1))) ? "" : socket.error();
}

std::string receiveNumber(StateSocket& socket, uint64_t& number) {
  return socket.receive(std::as_writable_bytes(std::span(&number, 1))) ? "" : socket.error();
}

}  // namespace

TEST_CASE("parallel sockets: each share has a connection of its own, the same at both ends") {
  Ends ends;
  ends.connect();
  CHECK(ends.out.shares() == kBeside + 1);
  REQUIRE(ends.in.shares() == kBeside + 1);
  uint64_t came[kBeside + 1] = {};
  const auto [sent, received] = ends.together(
      &sendNumber, [&](StateSocket& socket, size_t share) { return receiveNumber(socket, came[share]); });
  CHECK(sent == "");
  CHECK(received == "");
  CHECK(std::set<uint64_t>(std::begin(came), std::end(came)).size() == kBeside + 1);
  CHECK(came[0] == 100);  // the stream's
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
    ParallelSockets::Secret wrong = offer->secret;
    wrong[i % wrong.size()] ^= std::byte{1};
    const size_t bytes = i % 3 == 0 ? 0 : i % 3 == 1 ? 5 : wrong.size();  // silent, or lying
    REQUIRE(send(strangers.back(), wrong.data(), bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
  }
  std::thread other([&] { CHECK(ends.out.connect(*ends.sender, *offer)); });
  CHECK(ends.in.accept(*ends.receiver));
  other.join();
  uint64_t came[kBeside + 1] = {};
  const auto [sent, received] = ends.together(
      &sendNumber, [&](StateSocket& socket, size_t share) { return receiveNumber(socket, came[share]); });
  CHECK(sent == "");
  CHECK(received == "");
  for (const uint64_t number : came) CHECK(number >= 100);
}

TEST_CASE("parallel sockets: where the port does not answer, the stream carries all") {
  Ends ends;
  auto offer = ends.in.offer(*ends.receiver, kBeside);
  REQUIRE(offer);
  {
    const auto [mine, theirs] = connection();
    sockaddr_in address{};
    socklen_t length = sizeof address;
    REQUIRE(getsockname(theirs, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    offer->port = ntohs(address.sin_port);  // of nobody, in a moment
    close(mine);
    close(theirs);
  }
  CHECK(ends.out.connect(*ends.sender, *offer));
  CHECK(ends.in.accept(*ends.receiver));
  CHECK(ends.out.shares() == 1);
  CHECK(ends.in.shares() == 1);
}

TEST_CASE(
    "parallel sockets: a sender that names connections which do not come is not waited for without end") {
  Ends ends;
  REQUIRE(ends.in.offer(*ends.receiver, kBeside));
  SECTION("more than any") {
    const uint64_t many = 1'000'000;
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
    sent = ends.out.together(*ends.sender, work(atSender, true));
    if (!sent.empty() && atSender) ends.sender = nullptr;  // as a worker that gives up does
  });
  const std::string received = ends.in.together(*ends.receiver, work(!atSender, false));
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
