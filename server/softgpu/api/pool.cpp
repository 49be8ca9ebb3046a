// Driver manual: Stream Ordered Memory Allocator.
#include "server/softgpu/api/pool.h"

#include <algorithm>

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/graph_memory.h"

namespace gpupool::softgpu::api {
namespace {

std::shared_ptr<MemoryPool> makePool(int device, bool isDefault) {
  auto pool = std::make_shared<MemoryPool>();
  pool->device = device;
  pool->isDefault = isDefault;
  for (int i = 0; i < kMaxDevices; ++i) pool->access[i] = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  pool->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  table<MemoryPool>().add(pool);
  return pool;
}

CUresult findPool(CUmemoryPool handle, std::shared_ptr<MemoryPool>& pool) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  pool = table<MemoryPool>().find(handle);
  return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Memory for `bytes`, waiting for frees that are still in their streams if that is what it takes.
AllocationPtr allocateFromPool(const std::shared_ptr<MemoryPool>& pool, uint64_t bytes) {
  Device& device = *devices()[size_t(pool->device)];
  while (true) {
    AllocationPtr allocation;
    if (uint64_t kept = pool->reuse(VaHeap::rounded(bytes))) {
      allocation = std::make_shared<Allocation>();
      allocation->kind = Allocation::Kind::pool;
      allocation->base = kept;
      allocation->size = bytes;
      allocation->device = pool->device;
      addresses().insert(allocation);
    } else if (!pool->limit || pool->used + bytes <= pool->limit) {
      allocation = allocateDevice(device, bytes, 0, Allocation::Kind::pool, nullptr);
    }
    if (allocation) {
      allocation->pool = pool;
      pool->add(VaHeap::rounded(bytes));
      return allocation;
    }
    FencePtr pending;
    {
      std::lock_guard lock(pool->mutex);
      std::erase_if(pool->pendingFrees, [](const FencePtr& fence) { return fence->done(); });
      if (pool->pendingFrees.empty()) return nullptr;
      pending = pool->pendingFrees.front();
    }
    pending->wait();
  }
}

CUresult allocateAsync(CUdeviceptr* out, size_t bytes, const std::shared_ptr<MemoryPool>& pool,
                       Stream& stream) {
  if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
  if (capturing(stream)) return captureAllocation(stream, pool->device, bytes, out);
  auto allocation = allocateFromPool(pool, bytes);
  if (!allocation) return CUDA_ERROR_OUT_OF_MEMORY;
  allocation->context = stream.context->handle;
  *out = allocation->base;
  return CUDA_SUCCESS;
}

std::shared_ptr<MemoryPool> poolAt(CUmemLocation* location, CUmemAllocationType type, bool isDefault) {
  if (!location || type != CU_MEM_ALLOCATION_TYPE_PINNED || location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return nullptr;
  }
  Device* device = findDevice(location->id);
  return !device ? nullptr : isDefault ? device->defaultPool : device->pool();
}

}  // namespace

std::shared_ptr<MemoryPool> makeDefaultPool(int device) { return makePool(device, true); }

void MemoryPool::add(uint64_t bytes) {
  uint64_t now = used += bytes;
  uint64_t high = usedHigh;
  while (now > high && !usedHigh.compare_exchange_weak(high, now)) {
  }
  uint64_t all = reserved();
  high = reservedHigh;
  while (all > high && !reservedHigh.compare_exchange_weak(high, all)) {
  }
}

uint64_t MemoryPool::reuse(uint64_t bytes) {
  std::lock_guard lock(mutex);
  auto found = kept.find(bytes);
  if (found == kept.end()) return 0;
  uint64_t address = found->second;
  kept.erase(found);
  keptBytes -= bytes;
  return address;
}

bool MemoryPool::keep(uint64_t address, uint64_t bytes) {
  used -= bytes;
  std::lock_guard lock(mutex);
  if (destroyed || reserved() + bytes > threshold) return false;
  kept.emplace(bytes, address);
  keptBytes += bytes;
  return true;
}

void MemoryPool::trim(uint64_t reservedBytes) {
  Device& owner = *devices()[size_t(device)];
  std::lock_guard lock(mutex);
  while (!kept.empty() && reserved() > reservedBytes) {
    auto [bytes, address] = *kept.begin();
    kept.erase(kept.begin());
    keptBytes -= bytes;
    owner.heap().free(address, bytes);
    owner.release(bytes);
  }
}

void trimPools(int device) {
  std::vector<std::shared_ptr<MemoryPool>> pools;
  table<MemoryPool>().forEach([&](const std::shared_ptr<MemoryPool>& pool) {
    if (pool->device == device) pools.push_back(pool);
  });
  for (auto& pool : pools) pool->trim(0);
}

CUresult freeInStream(Stream& stream, const AllocationPtr& allocation) {
  if (allocation->freeing.exchange(true)) return CUDA_ERROR_INVALID_VALUE;
  Task task;
  task.always = true;  // memory comes back even where work failed
  task.run = [base = allocation->base] {
    if (auto taken = addresses().take(base)) freeAllocation(*taken);
    return CUDA_SUCCESS;
  };
  FencePtr done = task.done;
  if (auto& pool = allocation->pool) {
    std::lock_guard lock(pool->mutex);
    std::erase_if(pool->pendingFrees, [](const FencePtr& fence) { return fence->done(); });
    pool->pendingFrees.push_back(done);
  }
  stream.submit(std::move(task), Submit::inlineIfIdle);
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream handle) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  return allocateAsync(out, bytes, context->deviceObject().pool(), *stream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool poolHandle, CUstream handle) {
  SOFT_CONTEXT(context);
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(poolHandle, pool));
  SOFT_STREAM(stream, handle, context);
  return allocateAsync(out, bytes, pool, *stream);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (!address) return CUDA_SUCCESS;
  if (capturing(*stream)) return captureFree(*stream, address);
  auto allocation = addresses().at(address);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  if (allocation->kind == Allocation::Kind::graph) return freeGraphMemory(address);
  if (allocation->kind != Allocation::Kind::pool && allocation->kind != Allocation::Kind::device) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return freeInStream(*stream, allocation);
}

CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* properties) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || !properties || properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (!findDevice(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  auto pool = makePool(properties->location.id, false);
  pool->limit = properties->maxSize;
  *out = pool->handle;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(handle, pool));
  if (pool->isDefault) return CUDA_ERROR_INVALID_VALUE;
  // Allocations keep it; a device that uses it goes back to its default.
  for (auto& device : devices()) {
    if (device->pool() == pool) device->setPool(device->defaultPool);
  }
  if (!table<MemoryPool>().take(handle)) return CUDA_ERROR_INVALID_VALUE;
  pool->destroyed = true;
  pool->trim(0);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t bytes) {
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(handle, pool));
  pool->trim(bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(handle, pool));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      pool->reuseModes[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] =
          *static_cast<int*>(value) != 0;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      pool->threshold = *static_cast<uint64_t*>(value);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      if (*static_cast<uint64_t*>(value)) return CUDA_ERROR_INVALID_VALUE;
      pool->reservedHigh = pool->reserved();
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      if (*static_cast<uint64_t*>(value)) return CUDA_ERROR_INVALID_VALUE;
      pool->usedHigh = pool->used.load();
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(handle, pool));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *static_cast<int*>(value) =
          pool->reuseModes[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *static_cast<uint64_t*>(value) = pool->threshold;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      *static_cast<uint64_t*>(value) = pool->reserved();
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *static_cast<uint64_t*>(value) = pool->used;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      *static_cast<uint64_t*>(value) = pool->reservedHigh;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *static_cast<uint64_t*>(value) = pool->usedHigh;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* map, size_t count) {
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(handle, pool));
  if (!map || !count) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (!findDevice(map[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
    if (map[i].location.id == pool->device && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  for (size_t i = 0; i < count; ++i) pool->access[map[i].location.id] = map[i].flags;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle, CUmemLocation* location) {
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(handle, pool));
  if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (!findDevice(location->id)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = CUmemAccess_flags(pool->access[location->id].load());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice ordinal) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = device->defaultPool->handle;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool* out, CUdevice ordinal) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = device->pool()->handle;
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice ordinal, CUmemoryPool handle) {
  std::shared_ptr<MemoryPool> pool;
  SOFT_TRY(findPool(handle, pool));
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (pool->device != ordinal) return CUDA_ERROR_INVALID_VALUE;
  device->setPool(pool);
  return CUDA_SUCCESS;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto pool = poolAt(location, type, true);
  if (!out || !pool) return CUDA_ERROR_INVALID_VALUE;
  *out = pool->handle;
  return CUDA_SUCCESS;
}

CUresult cuMemGetMemPool(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto pool = poolAt(location, type, false);
  if (!out || !pool) return CUDA_ERROR_INVALID_VALUE;
  *out = pool->handle;
  return CUDA_SUCCESS;
}

CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!poolAt(location, type, true)) return CUDA_ERROR_INVALID_VALUE;
  return cuDeviceSetMemPool(location->id, pool);
}

CUresult cuMemPoolExportToShareableHandle(void*, CUmemoryPool, CUmemAllocationHandleType,
                                          unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool*, void*, CUmemAllocationHandleType,
                                            unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData*, CUdeviceptr) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemPoolImportPointer(CUdeviceptr*, CUmemoryPool, CUmemPoolPtrExportData*) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
