#include "server/softgpu/runtime/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <mutex>

#include "base/reserve.h"
#include "server/softgpu/address_plan.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::runtime {
namespace {

constexpr uint64_t kPage = 4096;

std::mutex marksMutex;
uint32_t marks[kGranules];
std::atomic<uint64_t> used{0};  // of the plan's room, wrapped around when it is through

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
  const AddressPlan& plan = addressPlan();
  uint64_t address = 0;
  for (int attempt = 0; attempt < 64 && address == 0; ++attempt) {
    uint64_t hint = plan.engine + used.fetch_add(size);
    if (hint + size > plan.engineEnd) {
      used = 0;
      continue;
    }
    if (reserveAt(hint, size)) address = hint;
  }
  if (address == 0) {  // full of others' memory
    void* mapped = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return 0;
    address = reinterpret_cast<uint64_t>(mapped);
  }
  mprotect(reinterpret_cast<void*>(address), size - kPage, PROT_READ | PROT_WRITE);
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
    if (runtime::marks[granule] == 0) return;
    if (--runtime::marks[granule] != 0) return;
    __atomic_store_n(&runtime::gpupoolHidden[granule], uint8_t{1}, __ATOMIC_RELAXED);
  });
}

}  // namespace gpupool::softgpu
