// Allocation of device, pinned and managed memory, and what a pointer is.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "client/calls/physical.h"
#include "client/capture.h"
#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/memory/device.h"
#include "client/memory/host.h"
#include "client/memory/pools.h"
#include "client/memory/registered.h"
#include "client/memory/shares.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

using Kind_ = Allocation::Kind;

CUresult currentContext(Context*& context) { return contexts().resolve(nullptr, &context); }

CUresult allocateDevice(CUdeviceptr* out, size_t bytes) {
  Context* context = nullptr;
  CUresult status = currentContext(context);
  if (status != CUDA_SUCCESS) return status;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status = Session::get().sticky(); status != CUDA_SUCCESS) return status;
  if (status = captureForbids(); status != CUDA_SUCCESS) return status;
  uint64_t address = 0;
  DeviceMemory& memory = deviceMemory(context->device);
  status = memory.allocate(context->handle, bytes, address);
  if (status == CUDA_ERROR_OUT_OF_MEMORY && reclaimPools(context->handle, context->device))
    status = memory.allocate(context->handle, bytes, address);
  if (status != CUDA_SUCCESS) return status;
  allocations().add(
      {address, bytes, Kind_::device, context->device, context->handle, 0, address, 0, nullptr});
  *out = address;
  return CUDA_SUCCESS;
}

CUresult allocateHost(void** out, size_t bytes, unsigned flags, Kind_ kind) {
  Context* context = nullptr;
  CUresult status = currentContext(context);
  if (status != CUDA_SUCCESS) return status;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status = captureForbids(); status != CUDA_SUCCESS) return status;
  uint64_t address = 0;
  const bool mirrored = kind == Kind_::managed || (flags & CU_MEMHOSTALLOC_DEVICEMAP) != 0;
  status = hostMemory().allocate(context->handle, bytes, flags,
                                 mirrored ? HostMemory::Use::mirrored : HostMemory::Use::copies, address);
  if (status != CUDA_SUCCESS) return status;
  allocations().add({address, bytes, kind, context->device, context->handle, flags, address, 0, nullptr});
  *out = reinterpret_cast<void*>(address);
  return CUDA_SUCCESS;
}

// Memory is only given back when nothing uses it any more: freeing waits for the device, as natively.
CUresult releaseAllocation(uint64_t address, std::initializer_list<Kind_> kinds) {
  Allocation found;
  if (!allocations().find(address, found) || found.address != address ||
      std::find(kinds.begin(), kinds.end(), found.kind) == kinds.end())
    return CUDA_ERROR_INVALID_VALUE;
  CUresult status = captureForbids();
  if (status == CUDA_SUCCESS) status = synchronizeContext(found.context);
  if (status != CUDA_SUCCESS || found.ofGraph) return status;
  if (!allocations().remove(address)) return CUDA_ERROR_INVALID_VALUE;
  if (found.kind == Kind_::device) offeredAllocations().freed(found);
  if (found.pool != nullptr) {
    releaseToPool(found.pool, address, nullptr);
    return CUDA_SUCCESS;
  }
  if (found.kind == Kind_::device) {
    deviceMemory(found.device).release(found.context, address);
    return CUDA_SUCCESS;
  }
  if (carrier().busy()) carrier().await(address, found.bytes);
  return hostMemory().release(found.context, address);
}

CUresult registerHost(void* pointer, size_t bytes, unsigned flags) {
  Context* context = nullptr;
  CUresult status = currentContext(context);
  if (status != CUDA_SUCCESS) return status;
  constexpr unsigned known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                             CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
  if (pointer == nullptr || bytes == 0 || (flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (status = captureForbids(); status != CUDA_SUCCESS) return status;
  uint64_t host = reinterpret_cast<uint64_t>(pointer);
  Allocation other;
  if (allocations().find(host, other) || allocations().find(host + bytes - 1, other))
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  return registeredMemory().add(context->handle, host, bytes, flags, context->device);
}

}  // namespace

namespace custom {

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) { return allocateDevice(out, bytes); }
CUresult cuMemAlloc(CUdeviceptr_v1*, unsigned) {
  return CUDA_ERROR_OUT_OF_MEMORY;  // 32-bit addresses: the device's lie far above
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* out, size_t* pitch, size_t width, size_t height,
                            unsigned elementBytes) {
  if (pitch == nullptr || (elementBytes != 4 && elementBytes != 8 && elementBytes != 16))
    return CUDA_ERROR_INVALID_VALUE;
  if (width == 0 || height == 0 || width > SIZE_MAX - 511) return CUDA_ERROR_INVALID_VALUE;
  size_t row = (width + 511) / 512 * 512;
  if (height > SIZE_MAX / row) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult status = allocateDevice(out, row * height);
  if (status == CUDA_SUCCESS) *pitch = row;
  return status;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  Context* context = nullptr;
  CUresult status = currentContext(context);
  if (address == 0) return captureForbids();
  if (status != CUDA_SUCCESS) return status;
  Allocation found;
  if (allocations().find(address, found) && isOfImportedPool(found)) return closeShared(address, nullptr);
  return releaseAllocation(address, {Kind_::device, Kind_::managed});
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  Context* context = nullptr;
  CUresult status = currentContext(context);
  if (status != CUDA_SUCCESS) return status;
  size_t f = 0, t = 0;
  settlePools(context->device);
  status = deviceMemory(context->device).leaseInfo(context->handle, f, t);
  if (status != CUDA_SUCCESS) return status;
  if (free != nullptr) *free = f;
  if (total != nullptr) *total = t;
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo(unsigned* free, unsigned* total) {
  size_t f = 0, t = 0;
  CUresult status = custom::cuMemGetInfo_v2(&f, &t);
  if (status == CUDA_SUCCESS && free != nullptr)
    *free = static_cast<unsigned>(std::min<size_t>(f, UINT32_MAX));
  if (status == CUDA_SUCCESS && total != nullptr)
    *total = static_cast<unsigned>(std::min<size_t>(t, UINT32_MAX));
  return status;
}

CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
  constexpr unsigned known =
      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if ((flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
  return allocateHost(out, bytes, flags, Kind_::pinned);
}
CUresult cuMemAllocHost_v2(void** out, size_t bytes) { return allocateHost(out, bytes, 0, Kind_::pinned); }
CUresult cuMemAllocHost(void** out, unsigned bytes) { return allocateHost(out, bytes, 0, Kind_::pinned); }
CUresult cuMemFreeHost(void* pointer) {
  return releaseAllocation(reinterpret_cast<uint64_t>(pointer), {Kind_::pinned});
}

CUresult cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned flags) {
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  void* pointer = nullptr;
  CUresult status =
      out == nullptr ? CUDA_ERROR_INVALID_VALUE : allocateHost(&pointer, bytes, flags, Kind_::managed);
  if (status == CUDA_SUCCESS) {
    *out = reinterpret_cast<CUdeviceptr>(pointer);
    std::memset(pointer, 0, bytes);
  }
  return status;
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  return registerHost(pointer, bytes, flags);
}
CUresult cuMemHostRegister(void* pointer, size_t bytes, unsigned flags) {
  return registerHost(pointer, bytes, flags);
}
CUresult cuMemHostUnregister(void* pointer) {
  uint64_t host = reinterpret_cast<uint64_t>(pointer);
  Allocation found;
  if (!allocations().find(host, found) || found.address != host || found.kind != Kind_::registered)
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  CUresult status = captureForbids();
  if (status == CUDA_SUCCESS) status = synchronizeContext(found.context);
  if (status != CUDA_SUCCESS) return status;
  return registeredMemory().remove(host);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* pointer, unsigned flags) {
  Allocation found;
  uint64_t host = reinterpret_cast<uint64_t>(pointer);
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!allocations().find(host, found)) return CUDA_ERROR_INVALID_VALUE;
  if (found.kind != Kind_::pinned && found.kind != Kind_::managed && found.kind != Kind_::registered)
    return CUDA_ERROR_INVALID_VALUE;
  if (found.kind == Kind_::pinned) mirrorArena(host);
  if (found.kind == Kind_::registered) registeredMemory().mirror(host);
  *out = found.deviceAddress + (host - found.address);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned* flags, void* pointer) {
  Allocation found;
  if (flags == nullptr || !allocations().find(reinterpret_cast<uint64_t>(pointer), found) ||
      (found.kind != Kind_::pinned && found.kind != Kind_::registered))
    return CUDA_ERROR_INVALID_VALUE;
  *flags = found.flags | CU_MEMHOSTALLOC_DEVICEMAP;  // under unified addressing all pinned memory is mapped
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  Allocation found;
  if (!allocations().find(address, found)) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = found.address;
  if (bytes != nullptr) *bytes = found.bytes;
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
