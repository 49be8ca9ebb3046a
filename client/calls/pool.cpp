// Stream Ordered Memory Allocator. The policy is in client/memory/pools.h; here are the names. What concerns
// other processes is in pool_share.cpp.
#include <sys/random.h>

#include <cstring>

#include "client/calls/physical.h"
#include "client/capture.h"
#include "client/devices.h"
#include "client/entry.h"
#include "client/graphs.h"
#include "client/memory/allocations.h"
#include "client/memory/pools.h"
#include "client/memory/shares.h"

namespace gpupool::client {
namespace {

CUresult allocateFrom(CUdeviceptr* out, size_t bytes, CUmemoryPool handle, const StreamRef& ref) {
  if (out == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult status = Session::get().sticky(); status != CUDA_SUCCESS) return status;
  auto pool = findPool(handle);
  if (!pool || pool->sharing().imported()) return CUDA_ERROR_INVALID_VALUE;
  if (ref.stream->capturing) return captureAllocation(ref, handle, bytes, out);
  if (CUresult status = captureForbids(); status != CUDA_SUCCESS) return status;
  uint64_t address = 0;
  CUresult status = pool->allocate(ref, bytes, address);
  if (status == CUDA_ERROR_OUT_OF_MEMORY && reclaimPools(ref.context, pool->device()))
    status = pool->allocate(ref, bytes, address);
  if (status != CUDA_SUCCESS) return status;
  Allocation made{address, bytes, Allocation::Kind::device, pool->device(), ref.context, 0, address,
                  0,       handle};
  allocations().add(made);
  *out = address;
  return CUDA_SUCCESS;
}

// The device a location names, for the one kind of pool there is: pinned memory of a device.
bool poolDevice(const CUmemLocation* location, CUmemAllocationType type, CUdevice& device) {
  if (location == nullptr || type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      location->type != CU_MEM_LOCATION_TYPE_DEVICE)
    return false;
  device = location->id;
  return propertiesOf(device) != nullptr;
}

}  // namespace

namespace custom {

CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream stream) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  CUmemoryPool pool = nullptr;
  status = currentPool(contexts().find(ref.context)->device, &pool);
  return status == CUDA_SUCCESS ? allocateFrom(out, bytes, pool, ref) : status;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  return status == CUDA_SUCCESS ? allocateFrom(out, bytes, pool, ref) : status;
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS || address == 0) return status;
  if (ref.stream->capturing) return captureFree(ref, address);
  Allocation found;
  if (!allocations().find(address, found) || found.address != address) return CUDA_ERROR_INVALID_VALUE;
  if (isOfImportedPool(found)) return closeShared(address, &ref);
  if (found.kind != Allocation::Kind::device) return CUDA_ERROR_INVALID_VALUE;
  if (found.ofGraph) return CUDA_SUCCESS;  // the graphs that hold it give it back
  StreamMark mark = StreamMark::now(ref);
  if (!allocations().remove(address)) return CUDA_ERROR_INVALID_VALUE;  // another thread was first
  offeredAllocations().freed(found);
  if (found.pool != nullptr)
    releaseToPool(found.pool, address, &mark);
  else
    releaseLater(found.device, address, mark);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* properties) {
  if (out == nullptr || properties == nullptr || properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  const bool exportable = properties->handleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (!exportable && properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (propertiesOf(properties->location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  PoolSharing sharing;
  if (exportable) {
    sharing.kind = PoolSharing::Kind::exportable;
    if (getrandom(sharing.name, sizeof sharing.name, 0) != ssize_t{sizeof sharing.name})
      return CUDA_ERROR_OPERATING_SYSTEM;
  }
  return createPool(properties->location.id, properties->maxSize, sharing, out);
}
CUresult cuMemPoolDestroy(CUmemoryPool pool) { return destroyPool(pool); }

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  auto pool = findPool(handle);
  if (!pool) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = contexts().working();
  pool->trim(context, keep);
  return CUDA_SUCCESS;
}
CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute what, void* value) {
  auto pool = findPool(handle);
  return pool && value != nullptr ? pool->setAttribute(what, value) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute what, void* value) {
  auto pool = findPool(handle);
  return pool && value != nullptr ? pool->getAttribute(what, value) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* map, size_t count) {
  auto pool = findPool(handle);
  if (!pool || map == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i)
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i)
    if (CUresult status = pool->setAccess(map[i].location.id, map[i].flags); status != CUDA_SUCCESS)
      return status;
  return CUDA_SUCCESS;
}
CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool handle, CUmemLocation* location) {
  auto pool = findPool(handle);
  if (!pool || flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  if (propertiesOf(location->id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *flags = pool->access(location->id);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice device) { return standardPool(device, out); }
CUresult cuDeviceGetMemPool(CUmemoryPool* out, CUdevice device) { return currentPool(device, out); }
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) { return setCurrentPool(device, pool); }
CUresult cuMemGetDefaultMemPool(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type) {
  CUdevice device = 0;
  return poolDevice(location, type, device) ? standardPool(device, out) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetMemPool(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type) {
  CUdevice device = 0;
  return poolDevice(location, type, device) ? currentPool(device, out) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
  CUdevice device = 0;
  return poolDevice(location, type, device) ? setCurrentPool(device, pool) : CUDA_ERROR_INVALID_VALUE;
}

// Memory of graphs: counted where graphs are kept. Without them there is none.
CUresult cuDeviceGraphMemTrim(CUdevice device) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute what, void* value) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (value == nullptr || what > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) return CUDA_ERROR_INVALID_VALUE;
  uint64_t bytes = graphMemory(device, what);
  std::memcpy(value, &bytes, sizeof bytes);
  return CUDA_SUCCESS;
}
CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute what, void* value) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  uint64_t number = 1;
  if (value != nullptr) std::memcpy(&number, value, sizeof number);
  if (number != 0 || (what != CU_GRAPH_MEM_ATTR_USED_MEM_HIGH && what != CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH))
    return CUDA_ERROR_INVALID_VALUE;
  resetGraphMemoryHigh(device, what);
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
