#include "server/arena_mmap.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "base/log.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define GPUPOOL_OWNS_MMAP 0
#else
#define GPUPOOL_OWNS_MMAP 1
#endif

namespace gpupool::server {
namespace {

// Plain and constant-initialised: mmap is called before any constructor has run.
constinit thread_local int guards = 0;
constinit std::atomic<bool> reserved{false};
constinit std::atomic<uint64_t> used{0};
constinit std::atomic<uint64_t> misses{0};

#if GPUPOOL_OWNS_MMAP
void* kernelMmap(void* address, size_t bytes, int protection, int flags, int descriptor, off64_t offset) {
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, bytes, protection, flags, descriptor, offset));
}

// Never an address twice, freed or not: a replay that frees and places again meets the same addresses.
uint64_t take(size_t bytes) {
  const uint64_t rounded = (bytes + kGlobalArenaAlignment - 1) & ~uint64_t{kGlobalArenaAlignment - 1};
  uint64_t offset = used.load(std::memory_order_relaxed);
  do {
    if (rounded < bytes || rounded > kGlobalArenaBytes - offset) return 0;
  } while (!used.compare_exchange_weak(offset, offset + rounded, std::memory_order_relaxed));
  return kGlobalArenaBase + offset;
}

void* placedMmap(void* address, size_t bytes, int protection, int flags, int descriptor, off64_t offset) {
  constexpr int kOtherwisePlaced = MAP_FIXED | MAP_FIXED_NOREPLACE | MAP_32BIT | MAP_GROWSDOWN | MAP_HUGETLB;
  if (guards > 0 && address == nullptr && bytes >= kGlobalArenaSmallest && (flags & MAP_ANONYMOUS) != 0 &&
      (flags & kOtherwisePlaced) == 0 && reserved.load(std::memory_order_acquire)) {
    if (const uint64_t place = take(bytes)) {
      return kernelMmap(reinterpret_cast<void*>(place), bytes, protection, flags | MAP_FIXED, descriptor,
                        offset);
    }
    misses.fetch_add(1, std::memory_order_relaxed);
  }
  return kernelMmap(address, bytes, protection, flags, descriptor, offset);
}
#endif

}  // namespace

bool reserveGlobalArena() {
#if GPUPOOL_OWNS_MMAP
  if (reserved.load(std::memory_order_acquire)) return true;
  void* place = kernelMmap(reinterpret_cast<void*>(kGlobalArenaBase), kGlobalArenaBytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (place == MAP_FAILED) return false;
  if (place != reinterpret_cast<void*>(kGlobalArenaBase)) {  // a kernel that ignores MAP_FIXED_NOREPLACE
    munmap(place, kGlobalArenaBytes);
    return false;
  }
  reserved.store(true, std::memory_order_release);
  return true;
#else
  return false;
#endif
}

GlobalArenaUse globalArenaUse() { return {used.load(), misses.load()}; }

PlaceGlobals::PlaceGlobals() : before_(used.load()) { ++guards; }
PlaceGlobals::~PlaceGlobals() {
  if (--guards != 0) return;
  if (const uint64_t now = used.load(); now != before_)
    GPUPOOL_DEBUG("globals: %zu MiB placed behind %zu", static_cast<size_t>((now - before_) >> 20),
                  static_cast<size_t>(before_ >> 20));
}

}  // namespace gpupool::server

#if GPUPOOL_OWNS_MMAP
extern "C" {
__attribute__((visibility("default"))) void* mmap(void* address, size_t bytes, int protection, int flags,
                                                  int descriptor, off_t offset) noexcept {
  return gpupool::server::placedMmap(address, bytes, protection, flags, descriptor, offset);
}
__attribute__((visibility("default"))) void* mmap64(void* address, size_t bytes, int protection, int flags,
                                                    int descriptor, off64_t offset) noexcept {
  return gpupool::server::placedMmap(address, bytes, protection, flags, descriptor, offset);
}
}
#endif
