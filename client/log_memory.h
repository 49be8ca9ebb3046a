#pragma once
// Memory of the log of calls (client/call_log.h), in pieces. A piece that is given back is used again: a log
// of some seconds is hundreds of MiB, and memory that is new costs a page fault for each 4 KiB, several times
// what it costs to write there. Pieces of 2 MiB and more lie on huge pages where the kernel grants them
// (madvise(2), MADV_HUGEPAGE). What is kept for later together with what is in use never exceeds the most
// that was in use since the checkpoint before the last one. No threads of its own; whoever has it locks.

#include <cstddef>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace gpupool::client {

class LogMemory {
 public:
  // Memory that is taken, of `size()` bytes; unmapped with it unless it is given back.
  class Piece {
   public:
    Piece() = default;
    Piece(Piece&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
    Piece& operator=(Piece&& other) noexcept {
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Piece();
    std::byte* data() const { return bytes_.data(); }
    size_t size() const { return bytes_.size(); }

   private:
    friend LogMemory;
    explicit Piece(std::span<std::byte> bytes) : bytes_(bytes) {}
    std::span<std::byte> bytes_;
  };

  // At least so many bytes, with what was there before. Throws std::bad_alloc.
  Piece take(size_t bytes);
  void giveBack(Piece piece);
  // A checkpoint is kept, and what came before it has been given back. What is not kept for later: whoever
  // destroys it unmaps it, for which the lock is not needed.
  [[nodiscard]] std::vector<Piece> endInterval();

  size_t used() const { return used_; }
  size_t spare() const { return spare_; }

 private:
  std::vector<Piece> surplus(size_t most);

  std::map<size_t, std::vector<Piece>> spares_;  // by their size; no list is empty
  size_t used_ = 0, spare_ = 0;                  // bytes
  size_t peak_ = 0, peakBefore_ = 0;             // of used_ in this interval, and in the one before
};

}  // namespace gpupool::client
