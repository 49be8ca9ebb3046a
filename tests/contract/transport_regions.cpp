// The contract of regions and transfers (transports/transport.h), for every transport.

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "pairs.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

namespace {

// Tells the other side a region's name, as the session does.
void sendName(Connection& connection, Region region) {
  REQUIRE(sendBytes(connection, Channel::control, &region, sizeof region));
}

Region receiveName(Connection& connection) {
  auto message = connection.receive(Channel::control, in(5s));
  REQUIRE(message.size() == sizeof(Region));
  Region region;
  std::memcpy(&region, message.data(), sizeof region);
  return region;
}

Region shareWith(Connection& owner, Connection& user, const std::shared_ptr<SharedMemory>& memory) {
  Region region = owner.share(memory);
  REQUIRE(region.id != 0);
  REQUIRE(region.generation != 0);
  sendName(owner, region);
  Region named = receiveName(user);
  REQUIRE(named == region);
  return named;
}

// Waits until the peer's transfers to `region` are refused: unshare reaches it by itself.
bool becomesRefused(Connection& connection, Region region) {
  uint64_t word = 0;
  for (Deadline limit = in(3s); Clock::now() < limit; std::this_thread::sleep_for(1ms)) {
    Transfer transfer = connection.get(&word, region, 0, sizeof word);
    if (transfer == kRefused || !connection.wait(transfer, in(2s))) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("shared memory is sealed, zeroed, and keeps a fixed address") {
  auto memory = SharedMemory::create(10000);
  CHECK(memory->size() == 12288);
  CHECK(memory->data()[0] == std::byte{0});
  CHECK(memory->data()[12287] == std::byte{0});
  CHECK(ftruncate(memory->descriptor(), 4096) != 0);
  CHECK(ftruncate(memory->descriptor(), 1 << 20) != 0);
  memory->data()[77] = std::byte{9};

  size_t window = 1 << 20;
  void* reserved = mmap(nullptr, window, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(reserved != MAP_FAILED);
  auto* at = static_cast<std::byte*>(reserved) + 65536;
  {
    auto same = SharedMemory::adopt(dup(memory->descriptor()), 10000, at);
    CHECK(same->data() == at);
    CHECK(same->data()[77] == std::byte{9});
    same->data()[78] = std::byte{8};
    CHECK(memory->data()[78] == std::byte{8});
  }
  // The reservation is back: nothing else can have been mapped there.
  unsigned char resident;
  CHECK(mincore(at, 4096, &resident) == 0);
  CHECK(mmap(at, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED);
  munmap(reserved, window);

  CHECK_THROWS(SharedMemory::create(0));
  CHECK_THROWS(SharedMemory::adopt(dup(memory->descriptor()), 20000));
  int open = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(ftruncate(open, 4096) == 0);
  CHECK_THROWS(SharedMemory::adopt(open, 4096));
  CHECK_THROWS(SharedMemory::adopt(::open("/dev/null", O_RDWR | O_CLOEXEC), 4096));
}

TEST_CASE("a mapped region is the same memory, at the address asked for") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  auto memory = SharedMemory::create(1 << 20);
  Region region = shareWith(*pair.worker, *pair.client, memory);
  if (!pair.client->mapsMemory()) {
    CHECK(pair.client->map(region, nullptr, in(1s)) == nullptr);
    return;
  }
  auto mapped = pair.client->map(region, nullptr, in(2s));
  REQUIRE(mapped);
  CHECK(mapped->size() == memory->size());
  fillPattern(memory->data(), memory->size(), 4);
  CHECK(hasPattern(mapped->data(), mapped->size(), 4));

  void* reserved = mmap(nullptr, 4 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(reserved != MAP_FAILED);
  auto* at = static_cast<std::byte*>(reserved) + (1 << 20);
  auto placed = pair.client->map(region, at, in(2s));
  REQUIRE(placed);
  CHECK(placed->data() == at);
  placed->data()[5] = std::byte{0xAB};
  CHECK(memory->data()[5] == std::byte{0xAB});
  pair.worker->unshare(region);
  CHECK(placed->data()[5] == std::byte{0xAB});  // the mapping outlives the name
  placed.reset();
  munmap(reserved, 4 << 20);
}

TEST_CASE("pages of a file are mapped at the address asked for, and no transfer reaches them") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  if (!pair.client->mapsMemory()) return;
  constexpr size_t kPage = 4096;
  const int file = memfd_create("file", MFD_CLOEXEC);
  REQUIRE(ftruncate(file, 8 * kPage) == 0);
  void* reserved = mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(reserved != MAP_FAILED);
  auto* at = static_cast<std::byte*>(reserved);
  auto memory = SharedMemory::ofFile(dup(file), 2 * kPage, 3 * kPage, at);
  Region region = shareWith(*pair.client, *pair.worker, memory);
  CHECK(pair.worker->sizeOf(region, in(2s)) == 3 * kPage);
  CHECK(pair.worker->sizeOf({region.id + 1, 1}, in(10ms)) == 0);

  auto placed = pair.worker->map(region, at + 8 * kPage, in(2s));
  REQUIRE(placed);
  CHECK(placed->isOfFile());
  CHECK(placed->data() == at + 8 * kPage);
  CHECK(placed->size() == 3 * kPage);
  placed->data()[5] = std::byte{0xAB};
  CHECK(memory->data()[5] == std::byte{0xAB});
  std::byte read{};
  CHECK(pread(file, &read, 1, 2 * kPage + 5) == 1);
  CHECK(read == std::byte{0xAB});

  uint64_t word = 0;
  CHECK(pair.worker->map(region, nullptr, in(1s)) == nullptr);
  CHECK(pair.worker->put(&word, region, 0, sizeof word) == kRefused);
  CHECK(pair.worker->get(&word, region, 0, sizeof word) == kRefused);
  CHECK(ftruncate(file, 4 * kPage) == 0);  // the last page is gone
  CHECK(pair.worker->map(region, at + 16 * kPage, in(1s)) == nullptr);
  CHECK(pair.worker->peer() == Peer::alive);
  pair.client->unshare(region);
  memory.reset();
  placed.reset();
  close(file);
  munmap(reserved, 1 << 20);
}

TEST_CASE("only whole pages of a file in memory that may be written to") {
  const int file = memfd_create("file", MFD_CLOEXEC);
  REQUIRE(ftruncate(file, 5000) == 0);
  CHECK(SharedMemory::ofFile(dup(file), 0, 8192, nullptr)->size() == 8192);  // the last one ends in it
  CHECK_THROWS(SharedMemory::ofFile(dup(file), 0, 8193, nullptr));
  CHECK_THROWS(SharedMemory::ofFile(dup(file), 100, 4096, nullptr));
  CHECK_THROWS(SharedMemory::ofFile(dup(file), 8192, 4096, nullptr));
  CHECK_THROWS(SharedMemory::ofFile(dup(file), ~uint64_t{0} - 4095, 8192, nullptr));
  CHECK_THROWS(SharedMemory::ofFile(dup(file), 0, 0, nullptr));
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  CHECK_THROWS(SharedMemory::ofFile(::open(path.c_str(), O_RDONLY | O_CLOEXEC), 0, 4096, nullptr));
  CHECK_THROWS(SharedMemory::ofFile(::open("/dev/zero", O_RDWR | O_CLOEXEC), 0, 4096, nullptr));
  CHECK_THROWS(SharedMemory::ofFile(-1, 0, 4096, nullptr));
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  CHECK_THROWS(SharedMemory::ofFile(ends[1], 0, 4096, nullptr));
  close(ends[0]);
  close(file);
}

TEST_CASE("put and get move any size at any offset") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  const size_t kSize = scaled(transport, 68 << 20);
  const size_t largest = scaled(transport, 64 << 20);
  auto memory = SharedMemory::create(kSize);
  bool up = GENERATE(true, false);
  Connection& owner = up ? *pair.worker : *pair.client;
  Connection& user = up ? *pair.client : *pair.worker;
  Region region = shareWith(owner, user, memory);
  std::vector<std::byte> bytes(largest), back(largest);
  for (size_t size : {size_t{0}, size_t{1}, size_t{13}, size_t{4096}, size_t{65'537}, size_t{1} << 20,
                      (size_t{8} << 20) + 5, largest}) {
    if (size > largest) continue;
    for (uint64_t offset : {uint64_t{0}, uint64_t{4095}, uint64_t{kSize - size}}) {
      CAPTURE(size, offset);
      fillPattern(bytes.data(), size, size + offset);
      Transfer put = user.put(bytes.data(), region, offset, size);
      REQUIRE(put != kRefused);
      REQUIRE(user.wait(put, in(20s)));
      CHECK(hasPattern(memory->data() + offset, size, size + offset));
      Transfer get = user.get(back.data(), region, offset, size);
      REQUIRE(get != kRefused);
      REQUIRE(user.wait(get, in(20s)));
      CHECK(hasPattern(back.data(), size, size + offset));
      if (size > (1 << 20)) break;
    }
  }
}

TEST_CASE("transfers beyond the region or under a stale name are refused") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  auto memory = SharedMemory::create(8192);
  Region region = shareWith(*pair.worker, *pair.client, memory);
  std::byte bytes[16384] = {};
  struct {
    uint64_t offset;
    size_t size;
  } bad[] = {{8192, 1}, {0, 8193}, {4096, 4097}, {UINT64_MAX, 2}, {UINT64_MAX - 4, 16}, {1, SIZE_MAX}};
  for (auto [offset, size] : bad) {
    CAPTURE(offset, size);
    Transfer put = pair.client->put(bytes, region, offset, size);
    CHECK(put == kRefused);
    CHECK_FALSE(pair.client->wait(put, in(1s)));
    CHECK(pair.client->get(bytes, region, offset, size) == kRefused);
  }
  CHECK(pair.client->put(bytes, Region{region.id, region.generation - 1}, 0, 8) == kRefused);
  CHECK(pair.client->peer() == Peer::alive);

  pair.worker->unshare(region);
  CHECK(becomesRefused(*pair.client, region));
  // The slot may be used again; the old name must not reach the new memory.
  auto other = SharedMemory::create(8192);
  Region next = shareWith(*pair.worker, *pair.client, other);
  CHECK_FALSE(next == region);
  std::memset(bytes, 0x55, sizeof bytes);
  Transfer stale = pair.client->put(bytes, region, 0, 4096);
  CHECK((stale == kRefused || !pair.client->wait(stale, in(2s))));
  Transfer fresh = pair.client->put(bytes, next, 4096, 4096);
  REQUIRE(pair.client->wait(fresh, in(5s)));
  CHECK(other->data()[0] == std::byte{0});
  CHECK(other->data()[4096] == std::byte{0x55});
  CHECK(pair.client->map(region, nullptr, in(100ms)) == nullptr);
  CHECK(pair.client->peer() == Peer::alive);
}

TEST_CASE("an unknown region is waited for, up to the deadline") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  auto before = Clock::now();
  CHECK(pair.client->map(Region{4711, 1}, nullptr, in(80ms)) == nullptr);
  CHECK(pair.client->map(Region{}, nullptr, in(80ms)) == nullptr);
  CHECK(Clock::now() - before < 1s * gpupool::test::busy());
  CHECK(pair.client->peer() == Peer::alive);
}

TEST_CASE("a put has landed before a later message is delivered") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  constexpr size_t kSize = 4 << 20;
  auto memory = SharedMemory::create(kSize);
  Region region = shareWith(*pair.worker, *pair.client, memory);
  std::vector<std::vector<std::byte>> sources;
  for (uint64_t round = 0; round < scaled(transport, 60); ++round) {
    // Sizes that take different ways: the small put must not overtake the large one's message.
    size_t size = round % 3 == 0 ? kSize : round % 3 == 1 ? 64 : 100'000;
    sources.emplace_back(size);
    fillPattern(sources.back().data(), size, round);
    Transfer put = pair.client->put(sources.back().data(), region, kSize - size, size);
    REQUIRE(put != kRefused);
    REQUIRE(sendBytes(*pair.client, round % 2 ? Channel::call : Channel::control, &round, sizeof round));
    auto message = pair.worker->receive(round % 2 ? Channel::call : Channel::control, in(10s));
    REQUIRE(message.size() == sizeof round);
    REQUIRE(hasPattern(memory->data() + kSize - size, size, round));
    REQUIRE(pair.client->wait(put, in(10s)));
  }
}

TEST_CASE("many regions at once") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  const uint64_t kRegions = scaled(transport, 150);
  std::vector<std::shared_ptr<SharedMemory>> memories;
  std::vector<Region> regions;
  for (uint64_t i = 0; i < kRegions; ++i) {
    memories.push_back(SharedMemory::create(4096));
    regions.push_back(shareWith(*pair.worker, *pair.client, memories.back()));
    for (uint64_t j = 0; j < i; ++j) REQUIRE_FALSE(regions[j] == regions[i]);
  }
  for (uint64_t i = 0; i < kRegions; ++i) {
    uint64_t value = i * 3 + 1;
    REQUIRE(pair.client->wait(pair.client->put(&value, regions[i], 8 * i % 4000, 8), in(5s)));
  }
  for (uint64_t i = 0; i < kRegions; ++i) {
    uint64_t value = 0;
    std::memcpy(&value, memories[i]->data() + 8 * i % 4000, 8);
    REQUIRE(value == i * 3 + 1);
    pair.worker->unshare(regions[i]);
  }
  CHECK(becomesRefused(*pair.client, regions.back()));
  CHECK(pair.client->peer() == Peer::alive);
}

TEST_CASE("transfers from several threads while messages flow") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  constexpr size_t kPart = 1 << 20;
  const uint64_t kThreads = 3, kRounds = scaled(transport, 12);
  auto memory = SharedMemory::create(kThreads * kPart);
  Region region = shareWith(*pair.worker, *pair.client, memory);
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::vector<std::byte> out(kPart), back(kPart);
      for (uint64_t round = 0; round < kRounds; ++round) {
        size_t size = (round * 90'001 + thread * 7) % kPart + 1;
        fillPattern(out.data(), size, round ^ (thread << 20));
        bool moved = pair.client->wait(pair.client->put(out.data(), region, thread * kPart, size), in(20s)) &&
                     pair.client->wait(pair.client->get(back.data(), region, thread * kPart, size), in(20s));
        if (!moved || !hasPattern(back.data(), size, round ^ (thread << 20))) ++wrong;
      }
    });
  }
  for (uint64_t i = 0; i < scaled(transport, 2000); ++i) {
    REQUIRE(sendBytes(*pair.client, Channel::call, &i, sizeof i));
    REQUIRE(pair.worker->receive(Channel::call, in(20s)).size() == sizeof i);
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("many puts under way: each message finds those before it landed") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  constexpr size_t kPart = 300'001;
  const uint64_t kRounds = scaled(transport, 100);
  auto memory = SharedMemory::create(kRounds * kPart);
  Region region = shareWith(*pair.worker, *pair.client, memory);
  std::vector<std::byte> source(kRounds * kPart);
  std::atomic<uint64_t> early{0};
  std::thread reader([&] {
    for (uint64_t round = 0; round < kRounds; ++round) {
      auto message = pair.worker->receive(Channel::call, in(20s));
      if (message.size() != sizeof round || !hasPattern(memory->data() + round * kPart, kPart, round))
        ++early;
    }
  });
  std::deque<Transfer> open;
  for (uint64_t round = 0; round < kRounds; ++round) {
    fillPattern(source.data() + round * kPart, kPart, round);
    open.push_back(pair.client->put(source.data() + round * kPart, region, round * kPart, kPart));
    REQUIRE(sendBytes(*pair.client, Channel::call, &round, sizeof round));
  }
  reader.join();
  CHECK(early == 0);
  for (Transfer transfer : open) CHECK(pair.client->wait(transfer, in(20s)));
}

TEST_CASE("lent memory is written by the peer until it is taken back") {
  auto transport = GENERATE(from_range(allTransports()));
  CAPTURE(transport);
  Pair pair = connectPair(transport);
  constexpr size_t kSize = (3 << 20) + 17;
  std::vector<std::byte> mine(kSize), theirs(kSize);
  Region stale;
  for (uint64_t round = 0; round < scaled(transport, 20); ++round) {
    Lent lent(*pair.client, mine.data(), mine.size());
    if (pair.client->mapsMemory()) {
      CHECK(lent.region() == Region{});
      return;
    }
    sendName(*pair.client, lent.region());
    Region region = receiveName(*pair.worker);
    fillPattern(theirs.data(), theirs.size(), round);
    CHECK(pair.worker->put(theirs.data(), region, 1, kSize) == kRefused);
    REQUIRE(pair.worker->put(theirs.data(), region, 0, kSize) != kRefused);
    REQUIRE(sendBytes(*pair.worker, Channel::control, &round, sizeof round));
    REQUIRE(pair.client->receive(Channel::control, in(10s)).size() == sizeof round);
    CHECK(hasPattern(mine.data(), mine.size(), round));
    stale = region;
  }
  // Taken back while a put is under way: it lands before, or not at all.
  for (uint64_t round = 0; round < scaled(transport, 20); ++round) {
    Transfer transfer;
    {
      Lent lent(*pair.client, mine.data(), mine.size());
      sendName(*pair.client, lent.region());
      transfer = pair.worker->put(theirs.data(), receiveName(*pair.worker), 0, kSize);
    }
    std::memset(mine.data(), 0, mine.size());
    pair.worker->wait(transfer, in(10s));
    CHECK(mine[0] == std::byte{0});
    CHECK(mine[kSize - 1] == std::byte{0});
  }
  CHECK(becomesRefused(*pair.worker, stale));
  CHECK(pair.client->peer() == Peer::alive);
}
