#pragma once
// A byte ring for whole messages, one producer and one consumer, possibly in two processes that do not trust
// each other. A record is a length word and the message, padded to 8 bytes:
//
//   position: 0        8                 8 + round8(length)
//             [length ][ message ......  ]
//
// The data is mapped twice, one copy behind the other, so a record that crosses the end is still contiguous.
// Each side keeps its own position privately and reads the other's from shared memory; every value read from
// there is checked before use, so a peer that writes garbage there ends its own session and does no other
// harm. The owner does the waking: publish and release return whether the other side sleeps.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transports/waiting.h"

namespace gpupool::transport {

// Lives in shared memory, zeroed at creation.
struct RingWords {
  alignas(64) std::atomic<uint64_t> tail;  // bytes ever published; written by the producer
  alignas(64) std::atomic<uint64_t> head;  // bytes ever consumed; written by the consumer
  alignas(64) ArmWord consumerArmed;       // the consumer sleeps until tail moves
  alignas(64) ArmWord producerArmed;       // the producer sleeps until head moves
};
static_assert(sizeof(RingWords) == 256 && std::atomic<uint64_t>::is_always_lock_free);

inline constexpr size_t kRecordHeader = 8;
constexpr size_t recordBytes(size_t message) { return kRecordHeader + ((message + 7) & ~size_t{7}); }
// At most half of the ring, so that a full-size message can be written while another is read.
constexpr size_t maxRingMessage(size_t ringBytes) { return ringBytes / 2 - kRecordHeader; }

// The writing end. One thread at a time.
class RingProducer {
 public:
  // `data`: `size` bytes (a power of two) mapped twice.
  RingProducer(RingWords* words, std::byte* data, size_t size, bool expedited)
      : words_(words), data_(data), size_(size), expedited_(expedited) {}

  // Room for a record of that message, or nullptr. Reads the consumer's position only when the known one is
  // short.
  std::byte* tryReserve(size_t message) {
    size_t need = recordBytes(message);
    if (size_ - (tail_ - head_) < need && !refresh(need)) return nullptr;
    return data_ + (tail_ & (size_ - 1)) + kRecordHeader;
  }
  // Publishes the reserved message. True: the consumer sleeps and must be woken.
  bool publish(size_t message) {
    auto* length = reinterpret_cast<uint64_t*>(data_ + (tail_ & (size_ - 1)));
    *length = message;
    return publishBytes(recordBytes(message));
  }
  // For bytes that already are whole records (they came over a network).
  std::byte* tryReserveBytes(size_t bytes) {
    if (size_ - (tail_ - head_) < bytes && !refresh(bytes)) return nullptr;
    return data_ + (tail_ & (size_ - 1));
  }
  bool publishBytes(size_t bytes) {
    tail_ += bytes;
    prefetch();
    words_->tail.store(tail_, expedited_ ? std::memory_order_release : std::memory_order_seq_cst);
    return mustWake(words_->consumerArmed, expedited_);
  }

  bool corrupt() const { return corrupt_; }
  bool expedited() const { return expedited_; }
  RingWords* words() const { return words_; }

 private:
  // Prefetches the cache lines of the next messages, which the consumer read last.
  void prefetch() {
    for (size_t line = 0; line < 4; ++line)
      __builtin_prefetch(data_ + ((tail_ + 256 + 64 * line) & (size_ - 1)), 1);
  }
  bool refresh(size_t need) {
    uint64_t head = words_->head.load(std::memory_order_seq_cst);
    if (head > tail_ || head < head_) {  // positions never wrap: 2^64 bytes
      corrupt_ = true;
      return false;
    }
    head_ = head;
    return size_ - (tail_ - head_) >= need;
  }

  RingWords* words_;
  std::byte* data_;
  size_t size_;
  uint64_t tail_ = 0;
  uint64_t head_ = 0;  // the last one seen
  bool expedited_;
  bool corrupt_ = false;
};

// The reading end. One thread at a time, except pending().
class RingConsumer {
 public:
  RingConsumer(RingWords* words, std::byte* data, size_t size, bool expedited)
      : words_(words), data_(data), size_(size), expedited_(expedited) {}

  bool ready() { return tail_ != head_ || refresh(); }
  // Any thread: something lies unread.
  bool pending() const {
    return words_->tail.load(std::memory_order_acquire) != position_.load(std::memory_order_relaxed);
  }
  // Copies the next message into private memory; ready() was true. An empty optional-like null data() means
  // corrupt. `wakeProducer`: it sleeps for room.
  bool take(std::span<const std::byte>& message, bool& wakeProducer);

  // For a reader that sends the bytes on as they are: whole records from `from`, at most `limit` bytes.
  std::span<const std::byte> peek(uint64_t from, size_t limit);
  // Gives `bytes` back to the producer. True: it sleeps and must be woken.
  bool release(size_t bytes) {
    head_ += bytes;
    // The head first: who sees the position gives the room behind it away, and the producer must find it.
    words_->head.store(head_, expedited_ ? std::memory_order_release : std::memory_order_seq_cst);
    position_.store(head_, std::memory_order_release);
    return mustWake(words_->producerArmed, expedited_);
  }

  // Any thread: bytes ever consumed.
  uint64_t position() const { return position_.load(std::memory_order_acquire); }
  bool corrupt() const { return corrupt_; }
  bool expedited() const { return expedited_; }
  RingWords* words() const { return words_; }

 private:
  bool refresh() {
    uint64_t tail = words_->tail.load(std::memory_order_seq_cst);
    if (tail - head_ > size_ || tail < tail_ || ((tail - head_) & 7)) {
      corrupt_ = true;
      return true;  // so that the waiter stops and take() reports it
    }
    tail_ = tail;
    return tail_ != head_;
  }

  RingWords* words_;
  std::byte* data_;
  size_t size_;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;                   // the last one seen
  std::atomic<uint64_t> position_ = 0;  // head_, for other threads
  std::vector<uint64_t> copy_;          // the message handed up last
  bool expedited_;
  bool corrupt_ = false;
};

// The mapping of one connection's rings: a page of words, then the data of each ring, every one mapped twice.
class RingMemory {
 public:
  struct Sizes {
    size_t ring[2 * kChannels];  // worker -> client first, by channel; powers of two, at least a page
  };
  static Sizes sizes(const Options& options);  // [direction * kChannels + channel], rounded up
  static size_t totalBytes(const Sizes& sizes);

  // Maps the memory of `descriptor` (borrowed), which has totalBytes(sizes) bytes. Not inherited by fork.
  // Throws std::runtime_error.
  RingMemory(int descriptor, const Sizes& sizes);
  ~RingMemory();
  RingMemory(const RingMemory&) = delete;
  RingMemory& operator=(const RingMemory&) = delete;

  // In a forked child: the mapping is not there, and something else may be.
  void abandon() { base_ = nullptr; }

  // Has the pages of one ring present; without effect where the kernel cannot.
  void populate(int ring) const;
  RingWords* words(int ring) const;
  std::byte* data(int ring) const;
  size_t size(int ring) const { return sizes_.ring[ring]; }
  // Counts up while that side's process runs. side: 0 the worker, 1 the client.
  std::atomic<uint64_t>& beats(int side) const;

 private:
  Sizes sizes_;
  std::byte* base_;
  size_t mapped_;
};

}  // namespace gpupool::transport
