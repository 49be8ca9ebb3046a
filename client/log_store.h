#pragma once
// Memory of the log of calls (client/call_log.h): entries in their order, which are dropped from the front,
// and the bytes that they name. It comes in large pieces, which are used again: an entry costs no allocation,
// and dropping many costs little. Positions count from the first entry ever. No threads of its own; whoever
// has it locks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace gpupool::client {

// Entry: plain data.
template <class Entry>
class LogStore {
 public:
  static_assert(std::is_trivially_destructible_v<Entry>);

  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }
  // begin() <= position < end(). The entry stays where it is until it is dropped.
  Entry& at(uint64_t position) {
    const uint64_t index = position - blocksBegin_;
    return blocks_[index / kEntries][index % kEntries];
  }
  void add(const Entry& entry) {
    const uint64_t index = end_ - blocksBegin_;
    if (index / kEntries == blocks_.size()) blocks_.push_back(take(spareBlocks_, kEntries));
    at(end_++) = entry;
  }
  // Copies bytes, for the entry that is added next; they are there until it is dropped.
  std::span<std::byte> copy(std::span<const std::byte> bytes) {
    if (bytes.empty()) return {};
    if (bytes.size() > kChunk / 8) return adopt({bytes.begin(), bytes.end()});
    if (chunks_.empty() || chunks_.back().used + bytes.size() > kChunk)
      chunks_.push_back({take(spareChunks_, kChunk), 0, 0});
    Chunk& chunk = chunks_.back();
    std::byte* to = chunk.bytes.get() + chunk.used;
    std::memcpy(to, bytes.data(), bytes.size());
    chunk.used += bytes.size();
    chunk.last = end_;
    return {to, bytes.size()};
  }
  // Likewise, of bytes that are somebody's own, and large.
  std::span<std::byte> adopt(std::vector<std::byte> bytes) {
    large_.emplace_back(end_, std::move(bytes));
    return large_.back().second;
  }
  // All before that position: at most end().
  void drop(uint64_t position) {
    begin_ = std::max(begin_, position);
    for (; blocksBegin_ + kEntries <= begin_ && !blocks_.empty(); blocksBegin_ += kEntries) {
      giveBack(spareBlocks_, std::move(blocks_.front()));
      blocks_.pop_front();
    }
    for (; !chunks_.empty() && chunks_.front().last < begin_; chunks_.pop_front())
      giveBack(spareChunks_, std::move(chunks_.front().bytes));
    while (!large_.empty() && large_.front().first < begin_) large_.pop_front();
  }

 private:
  static constexpr size_t kEntries = 1024, kChunk = size_t{256} << 10;
  static constexpr size_t kSpares = 64;  // of each kind
  template <class T>
  using Pieces = std::vector<std::unique_ptr<T[]>>;
  struct Chunk {
    std::unique_ptr<std::byte[]> bytes;
    size_t used = 0;
    uint64_t last = 0;  // the last entry that has bytes there
  };
  template <class T>
  static std::unique_ptr<T[]> take(Pieces<T>& spares, size_t count) {
    if (spares.empty()) return std::make_unique_for_overwrite<T[]>(count);
    auto piece = std::move(spares.back());
    spares.pop_back();
    return piece;
  }
  template <class T>
  static void giveBack(Pieces<T>& spares, std::unique_ptr<T[]> piece) {
    if (spares.size() < kSpares) spares.push_back(std::move(piece));
  }

  uint64_t begin_ = 0, end_ = 0, blocksBegin_ = 0;
  std::deque<std::unique_ptr<Entry[]>> blocks_;
  std::deque<Chunk> chunks_;
  std::deque<std::pair<uint64_t, std::vector<std::byte>>> large_;
  Pieces<Entry> spareBlocks_;
  Pieces<std::byte> spareChunks_;
};

}  // namespace gpupool::client
