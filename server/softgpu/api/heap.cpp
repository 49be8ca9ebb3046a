#include "server/softgpu/api/heap.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/reserve.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kLarge = 2 << 20;

uint64_t up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

uint64_t reserveAddresses(uint64_t hint, uint64_t bytes, bool exactly) {
  if (hint && reserveAt(hint, bytes)) return hint;
  if (exactly) return 0;
  void* got = mmap(reinterpret_cast<void*>(hint), bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return got == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(got);
}

VaHeap::VaHeap(uint64_t hint, uint64_t bytes) {
  // Sanitizers and small address limits may refuse a large piece: take what there is.
  for (; bytes >= kLarge && !base_; bytes /= 2) {
    base_ = reserveAddresses(hint, bytes, false);
    bytes_ = bytes;
  }
  if (!base_) return;
  uint64_t aligned = up(base_, kLarge);
  insertFree(aligned, base_ + bytes_ - aligned);
  markVisible(base_, bytes_);
}

void VaHeap::insertFree(uint64_t address, uint64_t bytes) {
  if (!bytes) return;
  free_.emplace(address, bytes);
  bySize_.emplace(bytes, address);
}

void VaHeap::eraseFree(std::map<uint64_t, uint64_t>::iterator block) {
  bySize_.erase({block->second, block->first});
  free_.erase(block);
}

uint64_t VaHeap::allocate(uint64_t bytes, uint64_t alignment) {
  bytes = rounded(std::max<uint64_t>(bytes, 1));
  alignment = std::max(alignment, kGrain);
  if (bytes >= kLarge) alignment = std::max(alignment, kLarge);
  std::lock_guard lock(mutex_);
  for (auto i = bySize_.lower_bound({bytes, 0}); i != bySize_.end(); ++i) {
    auto [blockBytes, blockAddress] = *i;
    uint64_t address = up(blockAddress, alignment);
    if (address + bytes > blockAddress + blockBytes) continue;
    uint64_t first = address / kPage * kPage, last = up(address + bytes, kPage);
    if (mprotect(reinterpret_cast<void*>(first), last - first, PROT_READ | PROT_WRITE)) return 0;
    if (bytes >= kLarge) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
    eraseFree(free_.find(blockAddress));
    insertFree(blockAddress, address - blockAddress);
    insertFree(address + bytes, blockAddress + blockBytes - address - bytes);
    return address;
  }
  return 0;
}

void VaHeap::decommit(uint64_t address, uint64_t bytes) {
  uint64_t first = up(address, kPage), last = (address + bytes) / kPage * kPage;
  if (first >= last) return;
  void* const pages = reinterpret_cast<void*>(first);
  // Where the process has as many mappings as it may, at least the memory goes.
  if (mmap(pages, last - first, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
      MAP_FAILED)
    madvise(pages, last - first, MADV_DONTNEED);
}

void VaHeap::free(uint64_t address, uint64_t bytes) {
  bytes = rounded(std::max<uint64_t>(bytes, 1));
  std::lock_guard lock(mutex_);
  uint64_t begin = address, end = address + bytes;
  auto next = free_.lower_bound(address);
  // Only the pages at the seams can become free beyond the block itself.
  uint64_t dropBegin = begin, dropEnd = end;
  if (next != free_.end() && next->first == end) {
    end += next->second;
    dropEnd = std::min(end, up(dropEnd, kPage));
    next = std::next(next);
    eraseFree(std::prev(next));
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      dropBegin = std::max(begin, dropBegin / kPage * kPage);
      eraseFree(before);
    }
  }
  decommit(dropBegin, dropEnd - dropBegin);
  insertFree(begin, end - begin);
}

}  // namespace gpupool::softgpu::api
