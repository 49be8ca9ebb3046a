// Pointer attributes, from the client's own books (Unified Addressing chapter).
#include <cstring>

#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/memory/registered.h"

namespace gpupool::client {
namespace {

using Where = Allocation::Kind;

bool onDevice(const Allocation& a) {
  return a.kind == Where::device || a.kind == Where::symbol || a.kind == Where::mapped;
}
bool isManaged(const Allocation& a) { return a.kind == Where::managed || a.kind == Where::managedSymbol; }

template <class T>
CUresult give(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
  return CUDA_SUCCESS;
}

CUresult attribute(void* data, CUpointer_attribute what, CUdeviceptr pointer, const Allocation& a) {
  uint64_t offset = pointer - a.address;
  switch (what) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return give(data, a.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return give<unsigned>(data, onDevice(a) || isManaged(a) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (a.kind == Where::registered) registeredMemory().addressTold(pointer);
      return give<CUdeviceptr>(data, a.deviceAddress + offset);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (onDevice(a)) return CUDA_ERROR_INVALID_VALUE;
      return give(data, reinterpret_cast<void*>(pointer));
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return give<unsigned>(data, 0);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return give<unsigned long long>(data, a.bufferId);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return give<unsigned>(data, isManaged(a));
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return give<int>(data, a.openedOn >= 0 ? a.openedOn : a.device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return give<unsigned>(data, a.kind == Where::device && a.pool == nullptr);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return give<CUdeviceptr>(data, a.address);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return give<size_t>(data, a.bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return give<unsigned>(data, 1);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return give<unsigned long long>(data, 0);
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return give<unsigned>(data, 0);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return give<unsigned>(data, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return give(data, a.pool);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// Width of an attribute's value: what an unknown pointer's answers are zeroed by.
size_t widthOf(CUpointer_attribute what) {
  switch (what) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return 4;
    default:
      return 8;
  }
}

}  // namespace

namespace custom {

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute what, CUdeviceptr pointer) {
  Allocation found;
  if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!allocations().find(pointer, found)) return CUDA_ERROR_INVALID_VALUE;
  return attribute(data, what, pointer, found);
}

// Unknown host pointers are no error here: memory type 0 and null values.
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* what, void** data, CUdeviceptr pointer) {
  if (what == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Allocation found;
  bool known = allocations().find(pointer, found);
  for (unsigned i = 0; i < count; ++i) {
    if (data[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (known && attribute(data[i], what[i], pointer, found) == CUDA_SUCCESS) continue;
    std::memset(data[i], 0, widthOf(what[i]));
    if (what[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL && !known) give<int>(data[i], -2);
  }
  return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute what, CUdeviceptr pointer) {
  Allocation found;
  if (value == nullptr || !allocations().find(pointer, found)) return CUDA_ERROR_INVALID_VALUE;
  // Copies through the worker are ordered as SYNC_MEMOPS asks already; no other attribute can be set.
  return what == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace custom
}  // namespace gpupool::client
