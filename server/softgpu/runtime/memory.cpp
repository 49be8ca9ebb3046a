#include "server/softgpu/runtime/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <mutex>

#include "server/softgpu/engine.h"

namespace gpupool::softgpu::runtime {
namespace {

constexpr uint64_t kFirstAddress = 0x1100'0000'0000;
constexpr uint64_t kEndAddress = 0x1F00'0000'0000;
constexpr uint64_t kPage = 4096;

std::mutex marksMutex;
uint32_t marks[kGranules];
std::atomic<uint64_t> nextAddress{kFirstAddress};

uint64_t roundUp(uint64_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

template <typename Change>
void forGranules(uint64_t address, uint64_t bytes, Change change) {
  if (bytes == 0) return;
  std::lock_guard lock(marksMutex);
  uint64_t last = (address + bytes - 1) >> kGranuleShift;
  for (uint64_t granule = address >> kGranuleShift; granule <= last && granule < kGranules; ++granule)
    change(granule);
}

}  // namespace

#define GPUPOOL_HIDDEN_16 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1
constinit uint8_t gpupoolHidden[kGranules] = {GPUPOOL_HIDDEN_16, GPUPOOL_HIDDEN_16, GPUPOOL_HIDDEN_16,
                                              GPUPOOL_HIDDEN_16, GPUPOOL_HIDDEN_16, GPUPOOL_HIDDEN_16,
                                              GPUPOOL_HIDDEN_16, GPUPOOL_HIDDEN_16};

uint64_t mapVisible(uint64_t bytes) {
  uint64_t size = roundUp(bytes) + kPage;
  void* mapped = MAP_FAILED;
  for (int attempt = 0; attempt < 64 && mapped == MAP_FAILED; ++attempt) {
    uint64_t hint = nextAddress.fetch_add(size);
    if (hint + size > kEndAddress) {
      nextAddress = kFirstAddress;
      continue;
    }
    mapped = mmap(reinterpret_cast<void*>(hint), size, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  }
  if (mapped == MAP_FAILED)  // a sanitizer owns those addresses
    mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  auto address = reinterpret_cast<uint64_t>(mapped);
  mprotect(reinterpret_cast<void*>(address + size - kPage), kPage, PROT_NONE);
  markVisible(address, size);
  return address;
}

void unmapVisible(uint64_t address, uint64_t bytes) {
  if (address == 0) return;
  uint64_t size = roundUp(bytes) + kPage;
  unmarkVisible(address, size);
  munmap(reinterpret_cast<void*>(address), size);
}

}  // namespace gpupool::softgpu::runtime

namespace gpupool::softgpu {

void markVisible(uint64_t address, uint64_t bytes) {
  runtime::forGranules(address, bytes, [](uint64_t granule) {
    ++runtime::marks[granule];
    __atomic_store_n(&runtime::gpupoolHidden[granule], uint8_t{0}, __ATOMIC_RELAXED);
  });
}

void unmarkVisible(uint64_t address, uint64_t bytes) {
  runtime::forGranules(address, bytes, [](uint64_t granule) {
    if (runtime::marks[granule] == 0 || --runtime::marks[granule] != 0) return;
    __atomic_store_n(&runtime::gpupoolHidden[granule], uint8_t{1}, __ATOMIC_RELAXED);
  });
}

}  // namespace gpupool::softgpu
