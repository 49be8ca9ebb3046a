#include "transports/ring.h"

#include <cstring>
#include <random>
#include <thread>

#include "catch.h"

using namespace gpupool::transport;

namespace {

// One ring of a page, both ends in this process.
struct Fixture {
  RingMemory::Sizes sizes{{4096, 4096, 4096, 4096}};
  std::shared_ptr<SharedMemory> backing = SharedMemory::create(RingMemory::totalBytes(sizes));
  RingMemory memory{backing->descriptor(), sizes};
  bool expedited = false;
  RingProducer producer{memory.words(1), memory.data(1), 4096, expedited};
  RingConsumer consumer{memory.words(1), memory.data(1), 4096, expedited};

  bool send(const std::string& text) {
    std::byte* room = producer.tryReserve(text.size());
    if (!room) return false;
    std::memcpy(room, text.data(), text.size());
    producer.publish(text.size());
    return true;
  }
  std::string take() {
    std::span<const std::byte> message;
    bool wake;
    if (!consumer.ready() || !consumer.take(message, wake)) return "(nothing)";
    return {reinterpret_cast<const char*>(message.data()), message.size()};
  }
};

}  // namespace

TEST_CASE("the data of a ring is mapped twice, one copy behind the other") {
  Fixture ring;
  for (int i = 0; i < 4; ++i) {
    REQUIRE(ring.memory.size(i) == 4096);
    ring.memory.data(i)[0] = std::byte(i + 1);
    CHECK(ring.memory.data(i)[4096] == std::byte(i + 1));
    ring.memory.data(i)[4096 + 4095] = std::byte(i + 100);
    CHECK(ring.memory.data(i)[4095] == std::byte(i + 100));
  }
  CHECK(ring.memory.data(0)[0] == std::byte{1});
}

TEST_CASE("records wrap around a ring at every offset") {
  Fixture ring;
  std::mt19937 random(7);
  std::string text(maxRingMessage(4096), 'x');
  for (int i = 0; i < 20000; ++i) {
    size_t size = random() % (text.size() + 1);
    std::string message = text.substr(0, size);
    for (char& c : message) c = static_cast<char>(random());
    REQUIRE(ring.send(message));
    REQUIRE(ring.take() == message);
  }
  CHECK_FALSE(ring.consumer.ready());
  CHECK_FALSE(ring.consumer.corrupt());
}

TEST_CASE("a ring is full when it is full and says who must be woken") {
  Fixture ring;
  int sent = 0;
  while (ring.send(std::string(56, static_cast<char>(sent)))) ++sent;
  CHECK(sent == 4096 / 64);
  CHECK_FALSE(ring.producer.corrupt());
  RingWords* words = ring.memory.words(1);
  words->producerArmed = 1;
  std::span<const std::byte> message;
  bool wake = false;
  REQUIRE(ring.consumer.ready());
  REQUIRE(ring.consumer.take(message, wake));
  CHECK(wake);
  words->producerArmed = 0;
  words->consumerArmed = 1;
  REQUIRE(ring.producer.tryReserve(56));
  CHECK(ring.producer.publish(56));
  words->consumerArmed = 0;
  CHECK(ring.producer.tryReserve(0) == nullptr);
}

TEST_CASE("a reader that sends records on sees whole ones only") {
  Fixture ring;
  for (int i = 0; i < 10; ++i) REQUIRE(ring.send(std::string(24, 'a')));  // 32 bytes each
  CHECK(ring.consumer.peek(0, 4096).size() == 320);
  CHECK(ring.consumer.peek(0, 100).size() == 96);
  CHECK(ring.consumer.peek(64, 100).size() == 96);
  CHECK(ring.consumer.peek(0, 31).empty());
  CHECK(ring.consumer.peek(320, 4096).empty());
  ring.consumer.release(320);
  REQUIRE(ring.send("b"));
  CHECK(ring.consumer.peek(320, 4096).size() == 16);
}

TEST_CASE("what a hostile producer writes never leads outside the ring") {
  Fixture ring;
  RingWords* words = ring.memory.words(1);
  auto* length = reinterpret_cast<uint64_t*>(ring.memory.data(1));
  SECTION("length beyond what was published") {
    *length = 9;
    words->tail = 16;
  }
  SECTION("length beyond the largest message") {
    *length = 4000;
    words->tail = 4096;
  }
  SECTION("length that overflows") {
    *length = UINT64_MAX - 3;
    words->tail = 4096;
  }
  SECTION("tail beyond the ring") {
    *length = 8;
    words->tail = 4104;
  }
  SECTION("tail not on a record") {
    *length = 0;
    words->tail = 12;
  }
  SECTION("tail inside a header") {
    *length = 0;
    words->tail = 4;
  }
  REQUIRE(ring.consumer.ready());
  std::span<const std::byte> message;
  bool wake;
  CHECK_FALSE(ring.consumer.take(message, wake));
  CHECK(ring.consumer.corrupt());
  CHECK_FALSE(ring.consumer.take(message, wake));  // for good
}

TEST_CASE("a tail that goes back is corrupt") {
  Fixture ring;
  REQUIRE(ring.send("one"));
  REQUIRE(ring.send("two"));
  REQUIRE(ring.take() == "one");
  REQUIRE(ring.take() == "two");
  ring.memory.words(1)->tail = 16;
  std::span<const std::byte> message;
  bool wake;
  CHECK(ring.consumer.ready());
  CHECK_FALSE(ring.consumer.take(message, wake));
}

TEST_CASE("what a hostile consumer writes never lets the producer overrun") {
  Fixture ring;
  while (ring.send(std::string(56, 'x'))) {
  }
  RingWords* words = ring.memory.words(1);
  SECTION("head beyond tail") { words->head = 4096 + 8; }
  SECTION("head that overflows") { words->head = UINT64_MAX; }
  CHECK(ring.producer.tryReserve(56) == nullptr);
  CHECK(ring.producer.corrupt());
}

TEST_CASE("a ring shared by two threads keeps order and sleeps without losing a wake-up") {
  bool expedited = GENERATE(false, true);
  if (expedited && !expeditedBarrier()) return;
  RingMemory::Sizes sizes{{4096, 4096, 4096, 4096}};
  auto backing = SharedMemory::create(RingMemory::totalBytes(sizes));
  RingMemory memory(backing->descriptor(), sizes);
  RingWords* words = memory.words(0);
  constexpr uint64_t kCount = 100'000;
  std::thread sender([&] {
    RingProducer producer(words, memory.data(0), 4096, expedited);
    for (uint64_t i = 0; i < kCount; ++i) {
      std::byte* room = nullptr;
      waitFor(words->producerArmed, expedited, kForever,
              [&] { return (room = producer.tryReserve(8)) != nullptr; });
      std::memcpy(room, &i, 8);
      if (producer.publish(8)) futexWake(words->consumerArmed);
    }
  });
  RingConsumer consumer(words, memory.data(0), 4096, expedited);
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    waitFor(words->consumerArmed, expedited, kForever, [&] { return consumer.ready(); });
    std::span<const std::byte> message;
    bool wake;
    uint64_t value = ~i;
    if (consumer.take(message, wake) && message.size() == 8) std::memcpy(&value, message.data(), 8);
    if (value != i) ++wrong;
    if (wake) futexWake(words->producerArmed);
  }
  sender.join();
  CHECK(wrong == 0);
}
