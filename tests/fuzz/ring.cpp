// The message ring, whose other end is a peer that may write anything into the shared memory at any time.
//
// Input: steps {u8 what; for memory: u16 where, u8 length, bytes; for positions: u16}.
#include <memory>

#include "tests/fuzz/input.h"
#include "transports/ring.h"

using namespace gpupool;
using namespace gpupool::transport;

namespace {

constexpr size_t kSize = 4096;

// As RingMemory maps it, but with ends that are watched: the second half stands for the second mapping.
struct Memory {
  RingWords words{};
  std::unique_ptr<std::byte[]> data{new std::byte[2 * kSize]};
  void put(size_t at, std::span<const std::byte> bytes) {
    for (size_t i = 0; i < bytes.size(); ++i)
      data[(at + i) % kSize] = data[(at + i) % kSize + kSize] = bytes[i];
  }
};

void consume(Memory& memory, RingConsumer& in) {
  std::span<const std::byte> message;
  bool wake = false;
  in.pending();
  if (!in.ready()) return;
  if (!in.take(message, wake)) return;
  if (message.size() > maxRingMessage(kSize)) __builtin_trap();
  fuzz::touch(message.data(), message.size());
  (void)memory;
}

void produce(RingProducer& out, size_t bytes) {
  if (out.corrupt() || bytes > maxRingMessage(kSize)) return;
  std::byte* room = out.tryReserve(bytes);
  if (room == nullptr) return;
  std::memset(room, 0x5a, bytes);
  out.publish(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  Memory incoming, outgoing;
  std::memset(incoming.data.get(), 0, 2 * kSize);
  std::memset(outgoing.data.get(), 0, 2 * kSize);
  RingConsumer in(&incoming.words, incoming.data.get(), kSize, true);
  RingProducer out(&outgoing.words, outgoing.data.get(), kSize, true);
  for (int steps = 0; steps < 256 && !input.empty(); ++steps) {
    switch (input.value<uint8_t>() % 8) {
      case 0: {
        const size_t at = input.value<uint16_t>();
        incoming.put(at, input.take(input.value<uint8_t>()));
        break;
      }
      case 1:  // the producer goes on, or says so
        incoming.words.tail.fetch_add(input.value<uint16_t>());
        break;
      case 2:
        incoming.words.tail = input.value<uint64_t>();
        break;
      case 3:
        outgoing.words.head.fetch_add(input.value<uint16_t>());
        break;
      case 4:
        outgoing.words.head = input.value<uint64_t>();
        break;
      case 5:
        incoming.words.producerArmed = outgoing.words.consumerArmed = input.value<uint32_t>();
        break;
      case 6:
        consume(incoming, in);
        break;
      default:
        produce(out, input.value<uint16_t>());
    }
  }
  return 0;
}
