#pragma once
// Memory pools (driver manual: Stream Ordered Memory Allocator). Allocation happens at the call, the free
// when its stream reaches it; an allocation that does not fit waits for the frees under way. Nothing is
// cached: reserved memory is used memory.

#include <atomic>
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
  std::atomic<int> reuse[3] = {1, 1, 1};  // attributes 1..3, kept only
  std::atomic<unsigned> access[kMaxDevices] = {};
  std::atomic<bool> destroyed{false};

  std::mutex mutex;
  std::vector<FencePtr> pendingFrees;

  void add(uint64_t bytes);
  void remove(uint64_t bytes) { used -= bytes; }
};

std::shared_ptr<MemoryPool> makeDefaultPool(int device);

// Frees in stream order; used by cuMemFreeAsync and cuMemFree.
CUresult freeInStream(Stream& stream, const AllocationPtr& allocation);

}  // namespace gpupool::softgpu::api
