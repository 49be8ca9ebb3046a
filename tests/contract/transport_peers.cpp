// What becomes of a connection when one side goes: by goodbye, by death, by fork, by a cut wire.

#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "pairs.h"
#include "transports/faulty.h"
#include "transports/last_words.h"
#include "transports/waiting.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

namespace {

bool readable(int descriptor, std::chrono::milliseconds time) {
  pollfd waiting{descriptor, POLLIN, 0};
  return poll(&waiting, 1, static_cast<int>(time.count())) == 1;
}

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

Options smallRings() {
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
  Pair pair = connectPair(transport, smallRings());
  Blocked blocked(*pair.worker);
  std::this_thread::sleep_for(50ms);
  auto start = Clock::now();
  (mine ? *pair.worker : *pair.client).close();
  CHECK(blocked.join(start) < 2s * gpupool::test::busy());
}

TEST_CASE("every wait ends when the peer's process is killed") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  ForkedPeer peer(transport, smallRings(), [](Connection&) { pause(); });
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

TEST_CASE("a client whose worker is killed gives the reason that its server says") {
  auto transport = GENERATE(from_range(processTransports()));
  const bool says = GENERATE(true, false);  // or it is gone itself
  CAPTURE(transport, says);
  auto [clientEnd, serverEnd] = bootstrapSockets(transport);
  const pid_t worker = fork();
  if (worker == 0) {
    ::close(clientEnd);
    try {
      auto connection = acceptAs(transport, serverEnd, {});
      pause();
    } catch (const std::exception& error) {
      fprintf(stderr, "forked worker: %s\n", error.what());
    }
    _exit(3);
  }
  auto client = connectAs(transport, clientEnd, {});
  std::this_thread::sleep_for(200ms);  // signs of life come before the words
  const auto start = Clock::now();
  ::kill(worker, SIGKILL);
  waitpid(worker, nullptr, 0);
  if (says) sayLastWords(serverEnd, "the worker was killed by\x1b signal 9");
  ::close(serverEnd);
  CHECK(readable(client->wakeupDescriptor(), 2s));
  CHECK(Clock::now() - start < 2s * gpupool::test::busy());
  CHECK(client->peer() == Peer::lost);
  CHECK((client->reason() == "the worker was killed by? signal 9") == says);
  CHECK(!client->reason().empty());
}

namespace {

constexpr size_t kFlood = size_t{64} << 20;  // more than sockets hold

// In a process of its own each. The client tells the name of a region, is stopped, and prints what it heard.
void heardLast(Connection& client, int out) {
  const Region region = client.share(SharedMemory::create(kFlood));
  if (!sendBytes(client, Channel::call, &region, sizeof region)) return;
  const auto message = client.receive(Channel::control, kForever);
  const std::string heard(reinterpret_cast<const char*>(message.data()), message.size());
  const std::string said = heard.empty() ? client.reason() : heard;
  [[maybe_unused]] const ssize_t written = ::write(out, said.data(), said.size());
}

void leaveWhileNobodyReads(Connection& worker, int go, int ready) {
  const auto named = worker.receive(Channel::call, in(10s));
  if (named.size() != sizeof(Region)) return;
  Region region;
  std::memcpy(&region, named.data(), sizeof region);
  char byte = 0;
  if (::write(ready, &byte, 1) != 1 || ::read(go, &byte, 1) != 1) return;
  const std::string data(kFlood, 'x');
  worker.put(data.data(), region, 0, data.size());
  sendBytes(worker, Channel::control, "why", 3);
  worker.close();
}

pid_t forked(const std::function<void()>& body) {
  const pid_t process = fork();
  if (process != 0) return process;
  try {
    body();
  } catch (const std::exception& error) {
    fprintf(stderr, "forked end: %s\n", error.what());
  }
  _exit(0);
}

}  // namespace

TEST_CASE("a client that does not run while its worker leaves hears why, from it or from its server") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  auto [clientEnd, serverEnd] = bootstrapSockets(transport);
  int said[2], go[2], ready[2];
  REQUIRE((pipe(said) == 0 && pipe(go) == 0 && pipe(ready) == 0));
  const pid_t client = forked([&, clientEnd = clientEnd, serverEnd = serverEnd] {
    ::close(serverEnd);
    heardLast(*connectAs(transport, clientEnd, {}), said[1]);
  });
  const pid_t worker = forked([&, clientEnd = clientEnd, serverEnd = serverEnd] {
    ::close(clientEnd);
    leaveWhileNobodyReads(*acceptAs(transport, serverEnd, {}), go[0], ready[1]);
  });
  ::close(clientEnd);
  CHECK(readable(ready[0], 10s));
  ::kill(client, SIGSTOP);
  CHECK(::write(go[1], "", 1) == 1);
  waitpid(worker, nullptr, 0);
  sayLastWords(serverEnd, "why");
  ::close(serverEnd);
  ::kill(client, SIGCONT);
  char text[256] = "";
  CHECK(readable(said[0], 10s));
  CHECK(::read(said[0], text, sizeof text - 1) > 0);
  CHECK(std::string(text) == "why");
  ::kill(client, SIGKILL);
  waitpid(client, nullptr, 0);
  for (int descriptor : {said[0], said[1], go[0], go[1], ready[0], ready[1]}) ::close(descriptor);
}

TEST_CASE("last words that are cut short, or none, are no reason") {
  auto [from, to] = bootstrapSockets("shm");
  sayLastWords(from, std::string(1000, 'x'));
  std::vector<std::byte> bytes(4096);
  bytes.resize(static_cast<size_t>(read(to, bytes.data(), bytes.size())));
  for (size_t length = 0; length <= bytes.size(); ++length) {
    LastWords words;
    for (size_t i = 0; i < length; ++i) {  // in pieces
      if (i == 0) words.take(std::array{LastWords::kBeatByte, LastWords::kBeatByte});
      words.take({&bytes[i], 1});
    }
    CAPTURE(length);
    CHECK(words.text() == (length == bytes.size() ? std::string(255, 'x') : ""));
  }
  LastWords noise;
  noise.take(std::vector<std::byte>(4096, std::byte{7}));
  CHECK(noise.text().empty());
  ::close(from);
  ::close(to);
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
  Options options = smallRings();
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
    ForkedPeer peer(transport, smallRings(), [](Connection&) { pause(); });
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
    Options options = smallRings();
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
    Options options = smallRings();
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

TEST_CASE("a faulty connection loses its peer after its lifetime") {
  auto transport = GENERATE(from_range(allTransports()));
  if (transport.rfind("faulty-", 0) == 0) return;
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  auto faultyEnd = faulty(std::move(pair.client), Faults{.seed = 3, .lifetime = 20});
  uint64_t sent = 0;
  while (sendBytes(*faultyEnd, Channel::call, &sent, 8, in(2s)) && sent < 1000) ++sent;
  CHECK(sent >= 20);
  CHECK(sent <= 21);
  CHECK(faultyEnd->peer() == Peer::lost);
  CHECK(readable(pair.worker->wakeupDescriptor(), 2s));
  CHECK(pair.worker->peer() == Peer::lost);
  CHECK_FALSE(pair.worker->reason().empty());
}

TEST_CASE(
    "a faulty connection loses its peer in the middle of a transfer, and nothing touches its memory then") {
  auto transport = GENERATE(from_range(allTransports()));
  if (transport.rfind("faulty-", 0) == 0) return;
  CAPTURE(transport);
  const size_t kBytes = scaled(transport, 32) << 20;  // some of them arrive
  for (bool put : {true, false}) {
    for (uint64_t doomed : {1, 2, 3, 4, 5, 6}) {
      Pair pair = connectPair(transport);
      Region region = pair.worker->share(SharedMemory::create(kBytes));
      auto faultyEnd = faulty(std::move(pair.client), Faults{.seed = doomed, .transfers = doomed});
      std::string local(kBytes,
                        '\1');  // its copies and comparisons are calls of libc's: quick under a sanitizer too
      auto start = Clock::now();
      for (uint64_t transfer = 1; transfer <= doomed; ++transfer) {
        start = Clock::now();
        Transfer moved = put ? faultyEnd->put(local.data(), region, 0, kBytes)
                             : faultyEnd->get(local.data(), region, 0, kBytes);
        CHECK(faultyEnd->wait(moved, in(10s)) == (transfer != doomed));
      }
      std::memset(local.data(), 2, kBytes);  // ours again
      CHECK(faultyEnd->peer() == Peer::lost);
      CHECK(faultyEnd->put(local.data(), region, 0, 8) == kRefused);
      CHECK(Clock::now() - start < 5s * gpupool::test::busy());
      CHECK(readable(pair.worker->wakeupDescriptor(), 2s));
      std::this_thread::sleep_for(20ms);
      CHECK((local == std::string(kBytes, '\2')));
    }
  }
}

TEST_CASE("a faulty connection stalls and delays, and loses nothing") {
  auto transport = GENERATE(from_range(allTransports()));
  if (transport.rfind("faulty-", 0) == 0) return;
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  auto faultyEnd = faulty(std::move(pair.client), parseFaults("seed=5,delay=100us,stall=20ms"));
  auto start = Clock::now();
  std::thread sender([&] {
    for (uint64_t i = 0; i < 3000; ++i)
      if (!sendBytes(*faultyEnd, Channel::call, &i, sizeof i)) return;
  });
  bool right = true;
  for (uint64_t i = 0; i < 3000; ++i) {
    auto message = pair.worker->receive(Channel::call, in(10s));
    right = right && message.size() == 8 && std::memcmp(message.data(), &i, 8) == 0;
  }
  sender.join();
  CHECK(right);
  CHECK(Clock::now() - start > 60ms);  // of about twelve stalls
}

TEST_CASE("faults are read from a text, and what is none of them is named") {
  Faults faults = parseFaults("seed=7,delay=200us,stall=3ms,lifetime=1000,transfers=4");
  CHECK(faults.seed == 7);
  CHECK(faults.delay == 200us);
  CHECK(faults.stall == 3ms);
  CHECK(faults.lifetime == 1000);
  CHECK(faults.transfers == 4);
  CHECK(parseFaults("lifetime=5").seed == 1);
  for (const char* text : {"", "seed", "seed=", "seed=x", "seed=1,", "delay=200", "delay=-1us",
                           "lifetime=5ms", "colour=1", "seed=1 lifetime=2"}) {
    CAPTURE(text);
    CHECK_THROWS(parseFaults(text));
  }
}

TEST_CASE("what UCX has to say is no output of the application") {
  auto [client, worker] = bootstrapSockets("ucx");
  Options options;
  options.networkDevice = "nowhere";  // UCX warns of it
  std::FILE* said = std::tmpfile();
  REQUIRE(said != nullptr);
  std::fflush(stdout);
  const int before = dup(STDOUT_FILENO);
  dup2(fileno(said), STDOUT_FILENO);
  CHECK_THROWS(acceptAs("ucx", worker, options));
  std::fflush(stdout);
  dup2(before, STDOUT_FILENO);
  ::close(before);
  ::close(client);
  CHECK(lseek(fileno(said), 0, SEEK_END) == 0);
  std::fclose(said);
}

TEST_CASE("set-up that cannot succeed ends with an error in time") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  Options options;
  options.setupTimeout = 300ms;
  {
    auto [client, worker] = bootstrapSockets(transport);
    auto start = Clock::now();
    CHECK_THROWS(acceptAs(transport, worker, options));  // nobody connects
    CHECK(Clock::now() - start < 2s * gpupool::test::busy());
    ::close(client);
  }
  {
    auto [client, worker] = bootstrapSockets(transport);
    ::close(worker);
    CHECK_THROWS(connectAs(transport, client, options));
  }
  {
    auto [client, worker] = bootstrapSockets(transport);
    const char nonsense[64] = "this is not the greeting of a gpupool worker, but something.";
    REQUIRE(write(worker, nonsense, sizeof nonsense) == sizeof nonsense);
    CHECK_THROWS(connectAs(transport, client, options));
    ::close(worker);
  }
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  CHECK_THROWS(accept("carrier-pigeon", ends[0], options));
  CHECK_THROWS(acceptAs(transport, ends[1], options));
}

TEST_CASE("a client that is stopped during its set-up has its time still") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  constexpr auto kBound = 1000ms, kStop = 700ms;
  auto [client, worker] = bootstrapSockets(transport);
  const auto start = Clock::now();
  const pid_t child = fork();
  if (child == 0) {
    ::close(worker);
    Options options;
    options.setupTimeout = kBound;
    bool refused = false;
    try {
      connectAs(transport, client, options);  // nobody greets
    } catch (const std::exception&) {
      refused = true;
    }
    _exit(refused ? 0 : 1);
  }
  ::close(client);
  std::this_thread::sleep_for(100ms);
  const auto stopping = Clock::now();
  kill(child, SIGSTOP);
  int status = 0;
  REQUIRE(waitpid(child, &status, WUNTRACED) == child);
  if (WIFSTOPPED(status)) {  // else this process had no processor until the bound was over
    std::this_thread::sleep_for(kStop);
    const auto stopped = Clock::now() - stopping;
    kill(child, SIGCONT);
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(Clock::now() - start - stopped >= kBound - 2 * TimeLeft::kLongestStep - 50ms);
  }
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  ::close(worker);
}
