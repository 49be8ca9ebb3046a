#include "transports/ring.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace gpupool::transport {

namespace {

// The length word lies in memory the peer can change: read it exactly once.
uint64_t readLength(const std::byte* record) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(const_cast<std::byte*>(record)))
      .load(std::memory_order_relaxed);
}

// In the page of words, behind the rings' own.
constexpr size_t kBeatsOffset = 2048;

size_t pageBytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t ringSize(size_t wanted) {
  constexpr size_t kLargest = size_t{1} << 30;
  if (wanted > kLargest) throw std::runtime_error("transport: a channel buffer may have at most 1 GiB");
  return std::bit_ceil(std::max(wanted, pageBytes()));
}

}  // namespace

bool RingConsumer::take(std::span<const std::byte>& message, bool& wakeProducer) {
  wakeProducer = false;
  size_t available = tail_ - head_;
  const std::byte* record = data_ + (head_ & (size_ - 1));
  uint64_t length = available >= kRecordHeader && !corrupt_ ? readLength(record) : UINT64_MAX;
  if (length > maxRingMessage(size_) || recordBytes(length) > available) {
    corrupt_ = true;
    return false;
  }
  if (size_t words = (length + 7) / 8; words >= copy_.size()) copy_.resize(std::bit_ceil(words + 64));
  std::memcpy(copy_.data(), record + kRecordHeader, length);
  message = {reinterpret_cast<const std::byte*>(copy_.data()), length};
  wakeProducer = release(recordBytes(length));
  return true;
}

std::span<const std::byte> RingConsumer::peek(uint64_t from, size_t limit) {
  if (tail_ == from) refresh();
  if (tail_ == from || corrupt_) return {};
  size_t available = tail_ - from;
  const std::byte* start = data_ + (from & (size_ - 1));
  if (available <= limit) return {start, available};
  size_t whole = 0;
  while (whole < available) {
    size_t record = recordBytes(readLength(start + whole));
    if (whole + record > limit) break;
    whole += record;
  }
  return {start, whole};
}

RingMemory::Sizes RingMemory::sizes(const Options& options) {
  size_t call = ringSize(options.callBytes);
  size_t control = ringSize(options.controlBytes);
  return {{call, control, call, control}};
}

size_t RingMemory::totalBytes(const Sizes& sizes) {
  size_t total = pageBytes();
  for (size_t ring : sizes.ring) total += ring;
  return total;
}

RingMemory::RingMemory(int descriptor, const Sizes& sizes) : sizes_(sizes) {
  size_t page = pageBytes();
  static_assert(size_t{2} * kChannels * sizeof(RingWords) <= kBeatsOffset && kBeatsOffset + 128 <= 4096);
  mapped_ = page;
  for (size_t ring : sizes.ring) mapped_ += 2 * ring;
  auto fail = [&](const char* what) {
    int code = errno;
    if (base_) munmap(base_, mapped_);
    throw std::runtime_error(std::string("transport: cannot ") + what +
                             " the message rings: " + std::strerror(code));
  };
  base_ = nullptr;
  void* reserved = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) fail("reserve addresses for");
  base_ = static_cast<std::byte*>(reserved);
  auto place = [&](std::byte* at, size_t bytes, off_t offset) {
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, offset) == MAP_FAILED)
      fail("map");
  };
  place(base_, page, 0);
  off_t offset = static_cast<off_t>(page);
  for (int ring = 0; ring < 2 * kChannels; ++ring) {
    place(data(ring), sizes.ring[ring], offset);
    place(data(ring) + sizes.ring[ring], sizes.ring[ring], offset);
    offset += static_cast<off_t>(sizes.ring[ring]);
  }
  if (madvise(base_, mapped_, MADV_DONTFORK) != 0) fail("keep from children");
}

void RingMemory::populate([[maybe_unused]] int ring) const {
#ifdef MADV_POPULATE_WRITE
  madvise(data(ring), size(ring), MADV_POPULATE_WRITE);
#endif
}

RingMemory::~RingMemory() {
  if (base_) munmap(base_, mapped_);
}

RingWords* RingMemory::words(int ring) const {
  return reinterpret_cast<RingWords*>(base_ + static_cast<size_t>(ring) * sizeof(RingWords));
}

std::atomic<uint64_t>& RingMemory::beats(int side) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(base_ + kBeatsOffset + 64 * static_cast<size_t>(side));
}

std::byte* RingMemory::data(int ring) const {
  std::byte* at = base_ + pageBytes();
  for (int before = 0; before < ring; ++before) at += 2 * sizes_.ring[before];
  return at;
}

}  // namespace gpupool::transport
