#include "client/log_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace gpupool::client {

namespace {

constexpr size_t kUnit = size_t{64} << 10, kHugePage = size_t{2} << 20;

std::byte* map(size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(at);
}

std::byte* mapOnHugePages(size_t bytes) {
  std::byte* at = map(bytes + kHugePage);
  const size_t before = -reinterpret_cast<uintptr_t>(at) % kHugePage;
  if (before != 0) ::munmap(at, before);
  ::munmap(at + before + bytes, kHugePage - before);
  ::madvise(at + before, bytes, MADV_HUGEPAGE);  // without them it is slower
  return at + before;
}

}  // namespace

LogMemory::Piece::~Piece() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

LogMemory::Piece LogMemory::take(size_t bytes) {
  const size_t size = (std::max<size_t>(bytes, 1) + kUnit - 1) / kUnit * kUnit;
  Piece piece;
  if (const auto known = spares_.find(size); known != spares_.end()) {
    piece = std::move(known->second.back());
    known->second.pop_back();
    if (known->second.empty()) spares_.erase(known);
    spare_ -= size;
  } else {
    const size_t most = std::max(peak_, peakBefore_), now = used_ + size;
    surplus(most > now ? most - now : 0);
    piece = Piece({size < kHugePage ? map(size) : mapOnHugePages(size), size});
  }
  used_ += size;
  peak_ = std::max(peak_, used_);
  return piece;
}

void LogMemory::giveBack(Piece piece) {
  const size_t size = piece.size();
  if (size == 0) return;
  used_ -= size;
  spare_ += size;
  spares_[size].push_back(std::move(piece));
}

std::vector<LogMemory::Piece> LogMemory::endInterval() {
  const size_t most = std::max(peak_, peakBefore_);
  auto pieces = surplus(most > used_ ? most - used_ : 0);
  peakBefore_ = peak_;
  peak_ = used_;
  return pieces;
}

// Spares that are too many, where at most so many bytes of them may be kept.
std::vector<LogMemory::Piece> LogMemory::surplus(size_t most) {
  std::vector<Piece> pieces;
  while (spare_ > most) {
    const auto last = std::prev(spares_.end());
    spare_ -= last->first;
    pieces.push_back(std::move(last->second.back()));
    last->second.pop_back();
    if (last->second.empty()) spares_.erase(last);
  }
  return pieces;
}

}  // namespace gpupool::client
