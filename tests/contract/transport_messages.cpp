// The contract of messages (transports/transport.h), for every transport.

#include <sys/resource.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "pairs.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

namespace {

// Microseconds of processor time in 300 ms of waiting.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr long long kMostUsed = 150'000;
#else
constexpr long long kMostUsed = 60'000;
#endif

struct Numbered {
  uint64_t number;
  uint64_t seed;
};

// Sends `count` messages of varying sizes up to `largest`, each with its number and a pattern.
bool sendStream(Connection& connection, Channel channel, uint64_t count, size_t largest, uint64_t seed) {
  for (uint64_t number = 0; number < count; ++number) {
    size_t size = sizeof(Numbered) + (number * 7919 + seed * 31) % (largest - sizeof(Numbered) + 1);
    std::byte* room = connection.reserve(channel, size, in(20s));
    if (!room || reinterpret_cast<uintptr_t>(room) % 8) return false;
    Numbered header{number, seed};
    std::memcpy(room, &header, sizeof header);
    fillPattern(room + sizeof header, size - sizeof header, number ^ (seed << 32));
    connection.commit(channel, size);
  }
  return true;
}

// Empty: as sent. Otherwise what went wrong.
std::string receiveStream(Connection& connection, Channel channel, uint64_t count, size_t largest,
                          uint64_t seed) {
  for (uint64_t number = 0; number < count; ++number) {
    auto message = connection.receive(channel, in(20s));
    size_t size = sizeof(Numbered) + (number * 7919 + seed * 31) % (largest - sizeof(Numbered) + 1);
    if (message.size() != size) {
      return "message " + std::to_string(number) + " has " + std::to_string(message.size()) + " bytes, not " +
             std::to_string(size) + " (" + connection.reason() + ")";
    }
    Numbered header;
    std::memcpy(&header, message.data(), sizeof header);
    if (header.number != number || header.seed != seed) return "order broken at " + std::to_string(number);
    if (!hasPattern(message.data() + sizeof header, size - sizeof header, number ^ (seed << 32))) {
      return "bytes broken at " + std::to_string(number);
    }
  }
  return "";
}

Options smallRings() {
  Options options;
  options.callBytes = 64 << 10;
  options.controlBytes = 16 << 10;
  return options;
}

}  // namespace

TEST_CASE("messages of every size arrive whole and in order") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport, smallRings());
  for (Channel channel : {Channel::call, Channel::control}) {
    size_t largest = pair.client->maxMessage(channel);
    REQUIRE(largest >= 4096);
    std::string wrong;
    std::thread receiver([&] { wrong = receiveStream(*pair.worker, channel, 400, largest, 5); });
    CHECK(sendStream(*pair.client, channel, 400, largest, 5));
    receiver.join();
    CHECK(wrong == "");
  }
}

TEST_CASE("the edges of sizes: empty, one byte, the largest, too large, less than reserved") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport, smallRings());
  size_t largest = pair.client->maxMessage(Channel::call);
  CHECK(largest == pair.worker->maxMessage(Channel::call));
  CHECK(pair.client->maxMessage() <= largest);
  std::vector<std::byte> bytes(largest + 1);
  for (int round = 0; round < 5; ++round) {
    for (size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{9}, largest - 1, largest}) {
      fillPattern(bytes.data(), size, size);
      REQUIRE(sendBytes(*pair.client, Channel::call, bytes.data(), size));
      auto message = pair.worker->receive(Channel::call, in(10s));
      REQUIRE(message.data() != nullptr);  // also an empty message is one
      REQUIRE(message.size() == size);
      REQUIRE(hasPattern(message.data(), size, size));
    }
  }
  CHECK(pair.client->reserve(Channel::call, largest + 1, in(10s)) == nullptr);
  CHECK(pair.client->peer() == Peer::alive);
  std::byte* room = pair.client->reserve(Channel::call, 1000, in(10s));
  REQUIRE(room);
  fillPattern(room, 10, 3);
  pair.client->commit(Channel::call, 10);
  auto message = pair.worker->receive(Channel::call, in(10s));
  REQUIRE(message.size() == 10);
  CHECK(hasPattern(message.data(), 10, 3));
}

TEST_CASE("both directions and both channels at once") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport, smallRings());
  std::string wrong[4];
  std::atomic<int> sent{0};
  std::vector<std::thread> threads;
  int slot = 0;
  for (Channel channel : {Channel::call, Channel::control}) {
    for (bool up : {true, false}) {
      Connection& from = up ? *pair.client : *pair.worker;
      Connection& to = up ? *pair.worker : *pair.client;
      uint64_t seed = static_cast<uint64_t>(slot) + 1;
      threads.emplace_back([&, channel, seed] { sent += sendStream(from, channel, 2000, 2000, seed); });
      threads.emplace_back(
          [&, channel, seed, slot] { wrong[slot] = receiveStream(to, channel, 2000, 2000, seed); });
      ++slot;
    }
  }
  for (auto& thread : threads) thread.join();
  CHECK(sent == 4);
  for (auto& text : wrong) CHECK(text == "");
}

TEST_CASE("a full channel blocks its producer until the deadline, and no other channel") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport, smallRings());
  std::vector<std::byte> bytes(4000);
  uint64_t sent = 0;
  while (true) {
    fillPattern(bytes.data(), bytes.size(), sent);
    if (!sendBytes(*pair.client, Channel::call, bytes.data(), bytes.size(), in(300ms))) break;
    REQUIRE(++sent < 1000);  // bounded by the buffers, not by memory
  }
  CHECK(sent >= 8);
  auto before = Clock::now();
  CHECK(pair.client->reserve(Channel::call, 4000, in(50ms)) == nullptr);
  auto waited = Clock::now() - before;
  CHECK(waited >= 50ms);
  CHECK(waited < 1s * gpupool::test::busy());
  CHECK(pair.client->peer() == Peer::alive);
  uint64_t word = 42;
  REQUIRE(sendBytes(*pair.client, Channel::control, &word, sizeof word, in(2s)));
  REQUIRE(pair.worker->receive(Channel::control, in(2s)).size() == sizeof word);
  REQUIRE(sendBytes(*pair.worker, Channel::call, &word, sizeof word, in(2s)));
  REQUIRE(pair.client->receive(Channel::call, in(2s)).size() == sizeof word);
  // The consumer comes back: nothing was lost, and the blocked producer goes on.
  std::atomic<bool> more{false};
  std::thread producer([&] {
    std::vector<std::byte> last(4000);
    fillPattern(last.data(), last.size(), sent);
    more = sendBytes(*pair.client, Channel::call, last.data(), last.size());
  });
  for (uint64_t number = 0; number <= sent; ++number) {
    auto message = pair.worker->receive(Channel::call, in(10s));
    REQUIRE(message.size() == 4000);
    REQUIRE(hasPattern(message.data(), message.size(), number));
  }
  producer.join();
  CHECK(more);
}

TEST_CASE("receive waits to its deadline and pending tells what is there") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  CHECK_FALSE(pair.worker->pending(Channel::call));
  CHECK(pair.worker->receive(Channel::call, Clock::now()).data() == nullptr);
  auto before = Clock::now();
  CHECK(pair.worker->receive(Channel::call, in(60ms)).data() == nullptr);
  CHECK(Clock::now() - before >= 60ms);
  CHECK(Clock::now() - before < 1s * gpupool::test::busy());
  uint64_t word = 1;
  REQUIRE(sendBytes(*pair.client, Channel::call, &word, sizeof word));
  Deadline limit = in(5s);
  while (!pair.worker->pending(Channel::call) && Clock::now() < limit) std::this_thread::sleep_for(1ms);
  CHECK(pair.worker->pending(Channel::call));
  CHECK_FALSE(pair.worker->pending(Channel::control));
  CHECK(pair.worker->receive(Channel::call, Clock::now()).size() == sizeof word);
  CHECK_FALSE(pair.worker->pending(Channel::call));
}

TEST_CASE("what receive returned stays as it is until the next receive") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport, smallRings());
  std::vector<std::byte> bytes(3000);
  fillPattern(bytes.data(), bytes.size(), 1);
  REQUIRE(sendBytes(*pair.client, Channel::call, bytes.data(), bytes.size()));
  auto message = pair.worker->receive(Channel::call, in(5s));
  REQUIRE(message.size() == bytes.size());
  fillPattern(bytes.data(), bytes.size(), 2);
  for (int i = 0; i < 15; ++i) REQUIRE(sendBytes(*pair.client, Channel::call, bytes.data(), bytes.size()));
  uint64_t word = 7;
  REQUIRE(sendBytes(*pair.client, Channel::control, &word, sizeof word));
  REQUIRE(pair.worker->receive(Channel::control, in(5s)).size() == sizeof word);
  CHECK(hasPattern(message.data(), message.size(), 1));
}

TEST_CASE("several producers under one lock") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport, smallRings());
  constexpr uint64_t kProducers = 4, kEach = 2500;
  std::mutex enqueue;
  std::vector<std::thread> producers;
  producers.reserve(kProducers);
  std::atomic<uint64_t> failed{0};
  for (uint64_t producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&, producer] {
      for (uint64_t number = 0; number < kEach; ++number) {
        Numbered message{number, producer};
        std::lock_guard lock(enqueue);
        failed += !sendBytes(*pair.client, Channel::call, &message, sizeof message);
      }
    });
  }
  uint64_t expected[kProducers] = {};
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < kProducers * kEach; ++i) {
    auto message = pair.worker->receive(Channel::call, in(10s));
    if (message.size() != sizeof(Numbered)) {
      ++wrong;
      break;
    }
    Numbered header;
    std::memcpy(&header, message.data(), sizeof header);
    if (header.seed >= kProducers || header.number != expected[header.seed]++) ++wrong;
  }
  for (auto& producer : producers) producer.join();
  CHECK(failed == 0);
  CHECK(wrong == 0);
}

namespace {

// Ping-pong of `rounds` messages. Returns how many rounds took as long as a lost wake-up does: the bound of a
// sleep is 500 ms.
uint64_t slowRounds(const std::string& transport, uint64_t rounds) {
  Pair pair = connectPair(transport);
  std::thread echo([&] {
    for (uint64_t i = 0; i < rounds; ++i) {
      auto message = pair.worker->receive(Channel::call, in(20s));
      if (message.size() != 8 || !sendBytes(*pair.worker, Channel::call, message.data(), 8)) return;
    }
  });
  uint64_t slow = 0, done = 0;
  for (; done < rounds; ++done) {
    auto before = Clock::now();
    if (!sendBytes(*pair.client, Channel::call, &done, sizeof done)) break;
    auto message = pair.client->receive(Channel::call, in(20s));
    uint64_t answer = ~done;
    if (message.size() == 8) std::memcpy(&answer, message.data(), 8);
    if (answer != done) break;
    if (Clock::now() - before >= 400ms) ++slow;
  }
  echo.join();
  CHECK(done == rounds);
  return slow;
}

}  // namespace

TEST_CASE("no wake-up is lost: ping-pong") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  bool faulty = transport.rfind("faulty-", 0) == 0;
  const uint64_t rounds = faulty                    ? 2'000
                          : transport == "ucx-rdma" ? 1'000
                          : transport == "ucx"      ? 20'000
                                                    : 100'000;
  // A busy machine can hold up one round for as long; it does not do so twice in a row, a lost wake-up does.
  uint64_t slow = slowRounds(transport, rounds);
  if (slow) slow = slowRounds(transport, rounds);
  CHECK(slow == 0);
}

TEST_CASE("waiting costs no processor time") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  auto used = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    auto time = [](const timeval& t) { return t.tv_sec * 1'000'000LL + t.tv_usec; };
    return time(usage.ru_utime) + time(usage.ru_stime);
  };
  auto before = used();
  CHECK(pair.worker->receive(Channel::call, in(300ms)).data() == nullptr);
  CHECK(used() - before < kMostUsed);
}
