#pragma once
// Reserves address space at a chosen address.

#include <sys/mman.h>

#include <cstdint>

namespace gpupool {

// Reserves [address, + bytes), inaccessible and uncommitted: exactly there, or fails. Without
// MAP_FIXED_NOREPLACE, which the kernel understands since 4.17 only and ThreadSanitizer not at all: it drops
// an address it needs itself, keeps the flag, and the mapping comes to lie at address 0.
inline bool reserveAt(uint64_t address, uint64_t bytes) {
  void* want = reinterpret_cast<void*>(address);
  void* got = mmap(want, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return false;
  if (got == want) return true;
  munmap(got, bytes);
  return false;
}

}  // namespace gpupool
