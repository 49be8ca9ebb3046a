#include "transports/regions.h"

#include <signal.h>
#include <sys/resource.h>

#include <optional>
#include <thread>

#include "base/signals.h"
#include "catch.h"

using namespace gpupool::transport;
using namespace std::chrono_literals;

// A client makes its memory while it holds signals back for the threads it starts.
TEST_CASE("where files may not grow, shared memory is an error and no signal, blocked or not") {
  const bool blocked = GENERATE(false, true);
  CAPTURE(blocked);
  std::optional<gpupool::SignalsBlocked> held;
  if (blocked) held.emplace();
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit small{4096, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  CHECK_THROWS_AS(SharedMemory::create(1 << 20), ShortOfMemory);
  setrlimit(RLIMIT_FSIZE, &before);
  sigset_t pending;
  sigpending(&pending);
  CHECK(sigismember(&pending, SIGXFSZ) == 0);
  held.reset();
  CHECK(SharedMemory::create(1 << 20)->size() == 1 << 20);
}

TEST_CASE("a local region is found by its exact name until it is removed") {
  LocalRegions regions;
  auto memory = SharedMemory::create(4096);
  Region first = regions.add(memory);
  Region second = regions.add(memory);
  CHECK(first.id != 0);
  CHECK_FALSE(first == second);
  CHECK(regions.find(first) == memory);
  CHECK(regions.find({first.id, first.generation + 1}) == nullptr);
  CHECK(regions.find({0, 0}) == nullptr);
  CHECK(regions.find({99, 1}) == nullptr);
  CHECK(regions.remove(first));
  CHECK_FALSE(regions.remove(first));
  CHECK(regions.find(first) == nullptr);
  Region third = regions.add(memory);
  CHECK(third.id == first.id);
  CHECK(third.generation == first.generation + 1);
  CHECK(regions.find(first) == nullptr);
  CHECK(regions.find(third) == memory);
  CHECK(memory.use_count() == 3);
  regions.clear();
  CHECK(memory.use_count() == 1);
}

TEST_CASE("announcements that make no sense are refused") {
  RemoteRegions regions;
  CHECK_FALSE(regions.announce({0, 1}, 4096, {}, nullptr));
  CHECK_FALSE(regions.announce({1, 0}, 4096, {}, nullptr));
  CHECK_FALSE(regions.announce({1, 1}, 0, {}, nullptr));
  CHECK_FALSE(regions.announce({kMaxRegions + 1, 1}, 4096, {}, nullptr));
  CHECK(regions.announce({1, 1}, 4096, {}, nullptr));
  CHECK_FALSE(regions.announce({1, 1}, 4096, {}, nullptr));
  CHECK_FALSE(regions.announce({1, 2}, 4096, {}, nullptr));  // not withdrawn yet
  CHECK_FALSE(regions.withdraw({1, 2}));
  CHECK(regions.withdraw({1, 1}));
  CHECK_FALSE(regions.withdraw({1, 1}));
  CHECK_FALSE(regions.announce({1, 1}, 4096, {}, nullptr));  // an old generation
  CHECK(regions.announce({1, 2}, 8192, {}, nullptr));
  CHECK(regions.wait({1, 2}, Clock::now())->size == 8192);
  CHECK_FALSE(regions.wait({1, 1}, kForever));  // stale: at once
}

TEST_CASE("waiting for a region ends with its announcement, its deadline, or stop") {
  RemoteRegions regions;
  std::optional<RemoteRegions::Entry> got;
  std::thread waiter([&] { got = regions.wait({3, 1}, Clock::now() + 5s); });
  std::this_thread::sleep_for(10ms);
  CHECK(regions.announce({3, 1}, 4096, {}, nullptr));
  waiter.join();
  CHECK(got.has_value());
  auto before = Clock::now();
  CHECK_FALSE(regions.wait({4, 1}, before + 30ms));
  CHECK(Clock::now() - before >= 30ms);
  std::thread stopped([&] { got = regions.wait({5, 1}, kForever); });
  std::this_thread::sleep_for(10ms);
  regions.stop();
  stopped.join();
  CHECK_FALSE(got);
  CHECK(regions.wait({3, 1}, kForever));  // what is known stays known
}

TEST_CASE("bounds of a region") {
  CHECK(within(4096, 0, 4096));
  CHECK(within(4096, 4096, 0));
  CHECK_FALSE(within(4096, 4096, 1));
  CHECK_FALSE(within(4096, 4097, 0));
  CHECK_FALSE(within(4096, UINT64_MAX, 2));
  CHECK_FALSE(within(4096, 1, SIZE_MAX));
}
