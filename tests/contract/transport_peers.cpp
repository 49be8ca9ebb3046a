// What becomes of a connection when one side goes: by goodbye, by death, by fork, by a cut wire.

#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "pairs.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

namespace {

// Every kind of call that can block, each in its thread; join() says how long the last one took after
// `start`.
class Blocked {
 public:
  explicit Blocked(Connection& connection) : connection_(connection) {
    for (int i = 0; i < 1000; ++i) {  // fill the control channel, so that reserve blocks
      if (!sendBytes(connection, Channel::control, &i, 4, in(100ms))) break;
    }
    run([this] { connection_.receive(Channel::call, kForever); });
    run([this] { connection_.receive(Channel::control, kForever); });
    run([this] {
      while (sendFull()) {
      }
    });
    run([this] { connection_.map(Region{999, 1}, nullptr, kForever); });
  }
  Clock::duration join(Clock::time_point start) {
    for (auto& thread : threads_) thread.join();
    return Clock::now() - start;
  }

 private:
  bool sendFull() {
    size_t size = connection_.maxMessage(Channel::call);
    if (!connection_.reserve(Channel::call, size, kForever)) return false;
    connection_.commit(Channel::call, size);
    return true;
  }
  void run(std::function<void()> body) { threads_.emplace_back(std::move(body)); }
  Connection& connection_;
  std::vector<std::thread> threads_;
};

Options smallPeerRings() {
  Options options;
  options.callBytes = 64 << 10;
  options.controlBytes = 8 << 10;
  return options;
}

}  // namespace

TEST_CASE("after a goodbye the rest is delivered and the peer is closed") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  CHECK_FALSE(readable(pair.worker->wakeupDescriptor(), 0ms));
  for (uint64_t i = 0; i < 100; ++i) REQUIRE(sendBytes(*pair.client, Channel::call, &i, sizeof i));
  pair.client->close();
  pair.client->close();
  CHECK(pair.client->peer() == Peer::closed);
  CHECK(pair.client->reserve(Channel::call, 8, in(5s)) == nullptr);
  CHECK(pair.client->receive(Channel::call, in(5s)).data() == nullptr);
  for (uint64_t i = 0; i < 100; ++i) {
    auto message = pair.worker->receive(Channel::call, in(5s));
    REQUIRE(message.size() == 8);
    CHECK(std::memcmp(message.data(), &i, 8) == 0);
  }
  CHECK(pair.worker->receive(Channel::call, kForever).data() == nullptr);
  CHECK(readable(pair.worker->wakeupDescriptor(), 2s));
  CHECK(pair.worker->peer() == Peer::closed);
  CHECK_FALSE(pair.worker->reason().empty());
  CHECK(pair.worker->reserve(Channel::call, 8, in(5s)) == nullptr);
  CHECK(pair.worker->share(SharedMemory::create(4096)) == Region{});
}

TEST_CASE("close ends every wait of this side and of the other") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  bool mine = GENERATE(true, false);
  Pair pair = connectPair(transport, smallPeerRings());
  Blocked blocked(*pair.worker);
  std::this_thread::sleep_for(50ms);
  auto start = Clock::now();
  (mine ? *pair.worker : *pair.client).close();
  CHECK(blocked.join(start) < 2s * gpupool::test::busy());
}

TEST_CASE("every wait ends when the peer's process is killed") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  ForkedPeer peer(transport, smallPeerRings(), [](Connection&) { pause(); });
  Blocked blocked(*peer.connection);
  std::this_thread::sleep_for(100ms);
  REQUIRE(peer.connection->peer() == Peer::alive);
  auto start = Clock::now();
  peer.kill();
  CHECK(readable(peer.connection->wakeupDescriptor(), 2s));
  CHECK(Clock::now() - start < 2s * gpupool::test::busy());
  CHECK(blocked.join(start) < 2s * gpupool::test::busy());
  CHECK(peer.connection->peer() == Peer::lost);
  CHECK_FALSE(peer.connection->reason().empty());
  INFO(peer.connection->reason());
}

TEST_CASE("a transfer under way ends when the peer's process is killed") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  ForkedPeer peer(transport, {}, [](Connection& connection) {
    auto memory = SharedMemory::create(64 << 20);
    Region region = connection.share(memory);
    sendBytes(connection, Channel::control, &region, sizeof region);
    pause();
  });
  auto message = peer.connection->receive(Channel::control, in(10s));
  REQUIRE(message.size() == sizeof(Region));
  Region region;
  std::memcpy(&region, message.data(), sizeof region);
  std::vector<std::byte> bytes(64 << 20);
  std::atomic<bool> stop{false};
  std::atomic<Clock::duration::rep> ended{0};
  std::thread mover([&] {
    while (!stop) {
      Transfer transfer = peer.connection->put(bytes.data(), region, 0, bytes.size());
      if (transfer == kRefused || !peer.connection->wait(transfer, kForever)) break;
    }
    ended = Clock::now().time_since_epoch().count();
  });
  std::this_thread::sleep_for(100ms);
  auto start = Clock::now();
  peer.kill();
  mover.join();
  CHECK(Clock::now() - start < 2s * gpupool::test::busy());
  CHECK(readable(peer.connection->wakeupDescriptor(), 2s));
  CHECK(peer.connection->peer() == Peer::lost);
}

TEST_CASE("messages flow between processes until the peer leaves with a goodbye") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  ForkedPeer peer(transport, {}, [&](Connection& connection) {
    for (;;) {
      auto message = connection.receive(Channel::call, in(10s));
      if (message.size() != 8) return;
      if (!sendBytes(connection, Channel::call, message.data(), 8)) return;
      uint64_t number;
      std::memcpy(&number, message.data(), 8);
      if (number == scaled(transport, 1000) - 1) return;
    }
  });
  const uint64_t rounds = scaled(transport, 1000);
  for (uint64_t i = 0; i < rounds; ++i) {
    REQUIRE(sendBytes(*peer.connection, Channel::call, &i, 8));
    auto message = peer.connection->receive(Channel::call, in(10s));
    CAPTURE(i, peer.connection->reason());
    REQUIRE(message.size() == 8);
  }
  CHECK(readable(peer.connection->wakeupDescriptor(), 2s));
  CHECK(peer.connection->peer() == Peer::closed);
}

TEST_CASE("a forked child abandons its copy and the parent's connection lives on") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  uint64_t word = 1;
  REQUIRE(sendBytes(*pair.client, Channel::call, &word, 8));
  pid_t child = fork();
  if (child == 0) {
    pair.client->abandon();
    pair.worker->abandon();
    bool quiet = pair.client->peer() == Peer::lost && !pair.client->reserve(Channel::call, 8, kForever) &&
                 pair.client->receive(Channel::call, kForever).data() == nullptr &&
                 pair.client->share(nullptr) == Region{} &&
                 !pair.client->map(Region{1, 1}, nullptr, kForever) &&
                 pair.client->put(&word, Region{1, 1}, 0, 8) == kRefused;
    pair.client->close();
    pair.client.reset();
    pair.worker.reset();
    _exit(quiet ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(pair.worker->receive(Channel::call, in(5s)).size() == 8);
  REQUIRE(sendBytes(*pair.worker, Channel::call, &word, 8));
  CHECK(pair.client->receive(Channel::call, in(5s)).size() == 8);
  CHECK(pair.client->peer() == Peer::alive);
}

TEST_CASE("a forked child that keeps the socket does not hide its parent's death") {
  int pipes[2];
  REQUIRE(pipe(pipes) == 0);
  ForkedPeer peer("shm", {}, [&](Connection&) {
    pid_t child = fork();
    if (child == 0) {  // never abandons; leaves when the test is over
      char byte;
      ::close(pipes[1]);
      [[maybe_unused]] ssize_t got = read(pipes[0], &byte, 1);
      _exit(0);
    }
    pause();
  });
  ::close(pipes[0]);
  std::this_thread::sleep_for(100ms);
  auto start = Clock::now();
  peer.kill();
  CHECK(readable(peer.connection->wakeupDescriptor(), 2s));
  CHECK(Clock::now() - start < 2s * gpupool::test::busy());
  CHECK(peer.connection->peer() == Peer::lost);
  ::close(pipes[1]);
}

namespace {

bool setLoopback(bool up) {
  int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  bool read = ioctl(control, SIOCGIFFLAGS, &request) == 0;
  request.ifr_flags = static_cast<short>(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
  bool written = read && ioctl(control, SIOCSIFFLAGS, &request) == 0;
  ::close(control);
  return written;
}

// In a process and a network of its own. 0: lost in time; 77: no such network to be had here.
int loseTheNetwork() {
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 || !setLoopback(true)) return 77;
  Options options = smallPeerRings();
  options.peerTimeout = 800ms;
  ForkedPeer peer("ucx", options, [](Connection&) { pause(); });
  std::this_thread::sleep_for(300ms);
  if (peer.connection->peer() != Peer::alive) return 1;
  auto start = Clock::now();
  if (!setLoopback(false)) return 77;
  bool told = readable(peer.connection->wakeupDescriptor(), 3s);
  auto took = Clock::now() - start;
  bool right = told && took < 2s && took > 300ms && peer.connection->peer() == Peer::lost &&
               !peer.connection->receive(Channel::call, kForever).data();
  if (!right) fprintf(stderr, "cut network: %s\n", peer.connection->reason().c_str());
  return right ? 0 : 1;
}

}  // namespace

TEST_CASE("a peer behind a cut network is lost after the time allowed") {
  auto names = processTransports();
  if (std::find(names.begin(), names.end(), "ucx") == names.end()) return;
  pid_t child = fork();
  if (child == 0) {
    int result = 2;
    try {
      result = loseTheNetwork();
    } catch (const std::exception& error) {
      fprintf(stderr, "cut network: %s\n", error.what());
    }
    _exit(result);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) {
    WARN("no network namespaces for this user: not tested");
  } else {
    CHECK(WEXITSTATUS(status) == 0);
  }
}

TEST_CASE("a connection over which nothing moves lets its processes sleep") {
  // Each time one of this process's threads slept.
  const auto sleeps = [] {
    uint64_t sum = 0;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream status(thread.path() / "status");
      for (std::string word; status >> word;)
        if (uint64_t count = 0; word == "voluntary_ctxt_switches:" && status >> count) sum += count;
    }
    return sum;
  };
  for (auto& transport : processTransports()) {
    ForkedPeer peer(transport, smallPeerRings(), [](Connection&) { pause(); });
    uint64_t slept = 0, passed = 0;
    for (const auto shift : {50ms, 80ms, 110ms}) {  // of the two sides' signs of life against each other
      ::kill(peer.process, SIGSTOP);
      std::this_thread::sleep_for(200ms + shift);
      ::kill(peer.process, SIGCONT);
      std::this_thread::sleep_for(200ms);
      const auto start = Clock::now();
      const uint64_t before = sleeps();
      std::this_thread::sleep_for(1s);
      slept += sleeps() - before;
      passed += static_cast<uint64_t>((Clock::now() - start) / 1ms);
    }
    INFO(transport << ": slept " << slept << " times in " << passed << " ms");
#ifdef __SANITIZE_THREAD__
    const uint64_t others = passed / 50;  // ThreadSanitizer's own thread wakes ten times a second
#else
    const uint64_t others = 0;
#endif
    CHECK(slept <= 6 + passed / 100 + others);  // for its own signs of life, and not for the peer's
    CHECK(peer.connection->peer() == Peer::alive);
  }
}

TEST_CASE("a stopped peer is lost after the time allowed for it, and not before") {
  for (auto& transport : processTransports()) {
    Options options = smallPeerRings();
    options.peerTimeout = 100ms;  // its host still answers: this one does not count
    options.stallTimeout = 600ms;
    ForkedPeer peer(transport, options, [](Connection&) { pause(); });
    Blocked blocked(*peer.connection);
    std::this_thread::sleep_for(1200ms);
    CHECK(peer.connection->peer() == Peer::alive);  // idle is not silent
    auto start = Clock::now();
    ::kill(peer.process, SIGSTOP);
    CHECK(readable(peer.connection->wakeupDescriptor(), 2s));
    CHECK(Clock::now() - start < 1s * gpupool::test::busy());
    CHECK(Clock::now() - start > 300ms);
    CHECK(blocked.join(start) < 2s * gpupool::test::busy());
    CHECK(peer.connection->peer() == Peer::lost);
    ::kill(peer.process, SIGCONT);
  }
}

TEST_CASE("a stopped peer is waited for where patience was asked for, and goes on") {
  for (auto& transport : processTransports()) {
    Options options = smallPeerRings();
    options.peerTimeout = 100ms;
    options.stallTimeout = 1h;
    ForkedPeer peer(transport, options, [](Connection& client) {
      for (;;) {
        auto message = client.receive(Channel::call, kForever);
        if (message.empty()) return;
        std::byte* room = client.reserve(Channel::call, message.size(), kForever);
        if (room == nullptr) return;
        std::memcpy(room, message.data(), message.size());
        client.commit(Channel::call, message.size());
      }
    });
    ::kill(peer.process, SIGSTOP);
    std::byte* room = peer.connection->reserve(Channel::call, 8, Clock::now() + 2s);
    REQUIRE(room != nullptr);
    std::memset(room, 7, 8);
    peer.connection->commit(Channel::call, 8);
    CHECK(peer.connection->receive(Channel::call, Clock::now() + 2500ms).empty());
    CHECK(peer.connection->peer() == Peer::alive);
    ::kill(peer.process, SIGCONT);
    auto answer = peer.connection->receive(Channel::call, Clock::now() + 2s);
    REQUIRE(answer.size() == 8);
    CHECK(answer[7] == std::byte{7});
  }
}
