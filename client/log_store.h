#pragma once
// What the log of calls (client/call_log.h) consists of: entries in their order, which are dropped from the
// front, and the bytes that they name. Both lie in large pieces of memory, which are used again: an entry
// costs no allocation, and dropping many costs little. Positions count from the first entry ever. No threads
// of its own; whoever has it locks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "client/log_memory.h"

namespace gpupool::client {

// Entry: plain data.
template <class Entry>
class LogStore {
 public:
  static_assert(std::is_trivially_copyable_v<Entry> && std::is_trivially_destructible_v<Entry>);
  static constexpr size_t kMostCopied = size_t{256} << 10;

  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }
  // begin() <= position < end(). The entry stays where it is until it is dropped.
  Entry& at(uint64_t position) {
    const uint64_t index = position - blocksBegin_;
    return *std::launder(place(index));
  }
  void add(const Entry& entry) {
    const uint64_t index = end_ - blocksBegin_;
    if (index / kEntries == blocks_.size()) blocks_.push_back(memory_.take(kPiece));
    new (place(index)) Entry(entry);
    ++end_;
  }
  // Copies bytes, at most kMostCopied, for the entry that is added next; they are there until it is dropped.
  std::span<std::byte> copy(std::span<const std::byte> bytes) {
    if (bytes.empty()) return {};
    if (chunks_.empty() || chunks_.back().used + bytes.size() > chunks_.back().bytes.size())
      chunks_.push_back({memory_.take(kPiece), 0, 0});
    Chunk& chunk = chunks_.back();
    std::byte* to = chunk.bytes.data() + chunk.used;
    std::memcpy(to, bytes.data(), bytes.size());
    chunk.used += bytes.size();
    chunk.last = end_;
    return {to, bytes.size()};
  }
  // Memory for more than that, which the caller fills without the lock: for the entry that is added next when
  // it is adopted. What is not adopted is given back.
  LogMemory::Piece take(size_t bytes) { return memory_.take(bytes); }
  void giveBack(LogMemory::Piece piece) { memory_.giveBack(std::move(piece)); }
  std::span<std::byte> adopt(LogMemory::Piece piece, size_t bytes) {
    large_.emplace_back(end_, std::move(piece));
    return {large_.back().second.data(), bytes};
  }
  // All before that position: at most end(). Memory that is not needed any more, to be unmapped without the
  // lock.
  [[nodiscard]] std::vector<LogMemory::Piece> drop(uint64_t position) {
    begin_ = std::max(begin_, position);
    for (; blocksBegin_ + kEntries <= begin_ && !blocks_.empty(); blocksBegin_ += kEntries) {
      memory_.giveBack(std::move(blocks_.front()));
      blocks_.pop_front();
    }
    for (; !chunks_.empty() && chunks_.front().last < begin_; chunks_.pop_front())
      memory_.giveBack(std::move(chunks_.front().bytes));
    for (; !large_.empty() && large_.front().first < begin_; large_.pop_front())
      memory_.giveBack(std::move(large_.front().second));
    return memory_.endInterval();
  }

 private:
  static constexpr size_t kPiece = size_t{2} << 20;
  static constexpr size_t kEntries = kPiece / sizeof(Entry);
  static_assert(kMostCopied <= kPiece);
  struct Chunk {
    LogMemory::Piece bytes;
    size_t used = 0;
    uint64_t last = 0;  // the last entry that has bytes there
  };
  Entry* place(uint64_t index) {
    return reinterpret_cast<Entry*>(blocks_[index / kEntries].data()) + index % kEntries;
  }

  uint64_t begin_ = 0, end_ = 0, blocksBegin_ = 0;
  LogMemory memory_;
  std::deque<LogMemory::Piece> blocks_;
  std::deque<Chunk> chunks_;
  std::deque<std::pair<uint64_t, LogMemory::Piece>> large_;  // by the position of who has it
};

}  // namespace gpupool::client
