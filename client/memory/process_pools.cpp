// The process's pools: which there are, which is current, and memory that is freed in stream order without
// one.
#include <algorithm>

#include "client/devices.h"
#include "client/memory/device.h"
#include "client/memory/pools.h"

namespace gpupool::client {
namespace {

HandleTable<MemoryPool> pools{Kind::memPool};

struct Later {
  CUdevice device;
  uint64_t address;
  StreamMark mark;
};
struct Registry {
  std::mutex mutex;
  CUmemoryPool standard[schema::kMaxDevices] = {}, current[schema::kMaxDevices] = {};
  std::vector<Later> later;
};
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

// A destroyed pool ends with its last block.
void bury(CUmemoryPool handle, MemoryPool& pool) {
  if (!pool.destroyed) return;
  pool.settle();
  if (pool.empty()) pools.destroy(toId(handle));
}

// Gives back ordinary memory freed in stream order whose stream got there, or whose context ended.
bool releaseReached(CUdevice device, CUcontext ended) {
  std::vector<Later> done;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    std::erase_if(all.later, [&](const Later& entry) {
      bool over = entry.device == device &&
                  (entry.mark.reached() || (ended != nullptr && entry.mark.context == ended));
      if (over) done.push_back(entry);
      return over;
    });
  }
  for (auto& entry : done) deviceMemory(device).release(entry.mark.context, entry.address);
  return !done.empty();
}

CUresult standardLocked(Registry& all, CUdevice device, CUmemoryPool* out) {
  if (all.standard[device] == nullptr) {
    auto made = pools.create(device, true, uint64_t{0});
    if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    all.standard[device] = fromId<CUmemoryPool>(made.id);
  }
  *out = all.standard[device];
  return CUDA_SUCCESS;
}

}  // namespace

CUresult standardPool(CUdevice device, CUmemoryPool* out) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  return standardLocked(all, device, out);
}

CUresult currentPool(CUdevice device, CUmemoryPool* out) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  if (all.current[device] == nullptr) return standardLocked(all, device, out);
  *out = all.current[device];
  return CUDA_SUCCESS;
}

CUresult setCurrentPool(CUdevice device, CUmemoryPool handle) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  auto pool = findPool(handle);
  if (!pool || pool->device() != device || pool->sharing().imported()) return CUDA_ERROR_INVALID_VALUE;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  all.current[device] = handle;
  return CUDA_SUCCESS;
}

CUresult createPool(CUdevice device, uint64_t maximum, const PoolSharing& sharing, CUmemoryPool* out) {
  auto made = pools.create(device, false, maximum, sharing);
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = fromId<CUmemoryPool>(made.id);
  return CUDA_SUCCESS;
}

CUresult destroyPool(CUmemoryPool handle) {
  auto pool = findPool(handle);
  if (!pool || pool->standard() || pool->destroyed.exchange(true)) return CUDA_ERROR_INVALID_VALUE;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    CUmemoryPool& current = all.current[pool->device()];
    if (current == handle) current = nullptr;
  }
  bury(handle, *pool);
  return CUDA_SUCCESS;
}

HandleTable<MemoryPool>::Pin findPool(CUmemoryPool handle, bool dead) {
  auto pool = pools.pin(toId(handle));
  if (pool && pool->destroyed && !dead) return {};
  return pool;
}

void releaseToPool(CUmemoryPool handle, uint64_t address, const StreamMark* mark) {
  auto pool = findPool(handle, true);
  if (!pool) return;
  pool->release(address, mark);
  bury(handle, *pool);
}

void releaseLater(CUdevice device, uint64_t address, const StreamMark& mark) {
  Registry& all = registry();
  {
    std::lock_guard lock(all.mutex);
    all.later.push_back({device, address, mark});
  }
  releaseReached(device, nullptr);
}

void settlePools(CUdevice device) {
  releaseReached(device, nullptr);
  pools.forEach([&](uint64_t id, MemoryPool& pool) {
    if (pool.device() != device) return;
    pool.settle();
    bury(fromId<CUmemoryPool>(id), pool);
  });
}

bool reclaimPools(CUcontext context, CUdevice device) {
  size_t before = 0, after = 0, total = 0;
  DeviceMemory& memory = deviceMemory(device);
  memory.info(before, total);
  std::vector<StreamMark> open;
  {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    for (auto& entry : all.later)
      if (entry.device == device) open.push_back(entry.mark);
  }
  if (!Session::get().capturing())
    for (auto& mark : open) mark.wait();
  releaseReached(device, nullptr);
  bool drained = false;
  pools.forEach([&](uint64_t id, MemoryPool& pool) {
    if (pool.device() != device) return;
    drained |= pool.drain();
    pool.trim(context, 0);
    bury(fromId<CUmemoryPool>(id), pool);
  });
  memory.info(after, total);
  return after > before || drained;
}

void poolsForgetContext(CUcontext context, CUdevice device) {
  releaseReached(device, context);
  pools.forEach([&](uint64_t id, MemoryPool& pool) {
    if (pool.device() != device) return;
    pool.contextEnded(context);
    bury(fromId<CUmemoryPool>(id), pool);
  });
}

}  // namespace gpupool::client
