#pragma once
// Memory pools (driver manual: Stream Ordered Memory Allocator). Allocation happens at the call, the free
// when its stream reaches it; an allocation that does not fit waits for the frees under way. Freed memory
// stays with the pool up to its release threshold and goes back to the device when that runs short.

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "server/softgpu/api/handles.h"
#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {

struct MemoryPool {
  using Handle = CUmemoryPool;
  static constexpr Tag kTag = Tag::pool;
  Handle handle = nullptr;
  int device = 0;
  bool isDefault = false;
  uint64_t limit = 0;  // 0: the device's
  std::atomic<uint64_t> used{0}, usedHigh{0};
  std::atomic<uint64_t> threshold{0};
  std::atomic<int> reuseModes[3] = {1, 1, 1};  // attributes 1..3, kept only
  std::atomic<unsigned> access[kMaxDevices] = {};
  std::atomic<bool> destroyed{false};

  std::mutex mutex;
  std::vector<FencePtr> pendingFrees;
  std::multimap<uint64_t, uint64_t> kept;  // bytes -> address of freed blocks that still belong to the pool
  std::atomic<uint64_t> keptBytes{0}, reservedHigh{0};

  uint64_t reserved() const { return used + keptBytes; }
  void add(uint64_t bytes);
  // A kept block of exactly that size, or 0.
  uint64_t reuse(uint64_t bytes);
  // A block that is no longer used: true if the pool keeps it, false if the caller has to free it.
  bool keep(uint64_t address, uint64_t bytes);
  // Frees kept blocks until no more than that is reserved, as far as there are any.
  void trim(uint64_t reservedBytes);
};

std::shared_ptr<MemoryPool> makeDefaultPool(int device);
// What all pools of the device keep goes back to it.
void trimPools(int device);

// Frees in stream order; used by cuMemFreeAsync and cuMemFree.
CUresult freeInStream(Stream& stream, const AllocationPtr& allocation);

}  // namespace gpupool::softgpu::api
