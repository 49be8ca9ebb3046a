// Driver manual: Unified Addressing, and the hints of managed memory.
#include <cstring>

#include "server/softgpu/api/memory.h"
#include "server/softgpu/api/operation.h"
#include "server/softgpu/api/pool.h"

namespace gpupool::softgpu::api {
namespace {

template <class T>
CUresult put(void* data, T value) {
  std::memcpy(data, &value, sizeof value);
  return CUDA_SUCCESS;
}

unsigned memoryType(const Allocation& allocation) {
  return allocation.host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

CUresult pointerAttribute(void* data, CUpointer_attribute attribute, uint64_t address, const Allocation& a) {
  using Kind = Allocation::Kind;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(data, a.kind == Kind::mapped || a.pool ? nullptr : a.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(data, memoryType(a));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return put(data, address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (!a.host() && a.kind != Kind::managed) return CUDA_ERROR_INVALID_VALUE;
      return put(data, address);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return put(data, unsigned(a.syncMemops));
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put(data, static_cast<unsigned long long>(a.id));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put(data, unsigned(a.kind == Kind::managed));
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(data, a.device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return put(data, 0u);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put(data, a.base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put(data, size_t(a.size));
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put(data, 1u);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return put(data, uint64_t(a.kind == Kind::mapped ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0));
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return put(data, 0u);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return put(data, unsigned(a.writable   ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                                : a.readable ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ
                                             : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE));
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return put(data, a.pool ? a.pool->handle : nullptr);
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return put(data, size_t(a.size));
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return put(data, a.base);
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return put(data, static_cast<unsigned long long>(a.id));
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      return put(data, 0u);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// What cuPointerGetAttributes writes for a pointer the driver does not know.
CUresult unknownAttribute(void* data, CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return put(data, uint64_t(0));
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(data, -2);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      return put(data, 0u);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// Managed memory is host memory here: where it should live is noted by nobody.
CUresult checkManaged(CUdeviceptr address, size_t bytes) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = addresses().find(address);
  if (!allocation || allocation->kind != Allocation::Kind::managed) return CUDA_ERROR_INVALID_VALUE;
  return allocation->contains(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult rangeAttribute(void* data, size_t bytes, CUmem_range_attribute attribute) {
  switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
      return bytes == 4 ? put(data, 0) : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
      return bytes == 4 ? put(data, int(CU_DEVICE_INVALID)) : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
      if (!bytes || bytes % 4) return CUDA_ERROR_INVALID_VALUE;
      for (size_t i = 0; i < bytes / 4; ++i) put(static_cast<int*>(data) + i, int(CU_DEVICE_INVALID));
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

struct NothingOperation : Operation {
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_EMPTY; }
  CUresult run(Context&) const override { return CUDA_SUCCESS; }
};

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS) return CUDA_ERROR_NOT_SUPPORTED;
  auto allocation = addresses().find(address);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  return pointerAttribute(data, attribute, address, *allocation);
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr address) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!count || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = addresses().find(address);
  for (unsigned i = 0; i < count; ++i) {
    if (!data[i]) return CUDA_ERROR_INVALID_VALUE;
    if (allocation && pointerAttribute(data[i], attributes[i], address, *allocation) == CUDA_SUCCESS)
      continue;
    SOFT_TRY(unknownAttribute(data[i], attributes[i]));
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  SOFT_CONTEXT(context);
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = addresses().find(address);
  if (!allocation || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  if (allocation->kind == Allocation::Kind::mapped || allocation->pool) return CUDA_ERROR_NOT_SUPPORTED;
  std::memcpy(&allocation->syncMemops, value, 1);
  return CUDA_SUCCESS;
}

CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice) {
  SOFT_CONTEXT(context);
  if (advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return checkManaged(address, bytes);
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation) {
  return cuMemAdvise(address, bytes, advice, 0);
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags,
                               CUstream handle) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (location.type == CU_MEM_LOCATION_TYPE_DEVICE && !findDevice(location.id))
    return CUDA_ERROR_INVALID_DEVICE;
  SOFT_TRY(checkManaged(address, bytes));
  return submitOperation(*stream, std::make_shared<NothingOperation>(), Submit::inlineIfIdle);
}

CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream) {
  CUmemLocation location{};
  location.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device == CU_DEVICE_CPU ? 0 : device;
  return cuMemPrefetchAsync_v2(address, bytes, location, 0, stream);
}

CUresult cuMemRangeGetAttribute(void* data, size_t bytes, CUmem_range_attribute attribute,
                                CUdeviceptr address, size_t count) {
  SOFT_CONTEXT(context);
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkManaged(address, count));
  return rangeAttribute(data, bytes, attribute);
}

CUresult cuMemRangeGetAttributes(void** data, size_t* sizes, CUmem_range_attribute* attributes, size_t number,
                                 CUdeviceptr address, size_t count) {
  if (!data || !sizes || !attributes || !number) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < number; ++i) {
    SOFT_TRY(cuMemRangeGetAttribute(data[i], sizes[i], attributes[i], address, count));
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t, unsigned int flags) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto allocation = addresses().find(address);
  if (!allocation || allocation->kind != Allocation::Kind::managed) return CUDA_ERROR_INVALID_VALUE;
  allocation->flags = flags;
  return CUDA_SUCCESS;
}
