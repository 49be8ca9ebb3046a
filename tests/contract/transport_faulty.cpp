// Faults that a test has a connection suffer (transports/faulty.h), and what becomes of the peer then.

#include <cstring>
#include <string>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "pairs.h"
#include "transports/faulty.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

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
