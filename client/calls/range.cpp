// Attributes of managed ranges (Unified Addressing). Managed memory stays on the host here: it is never
// prefetched, and advice about its place is accepted without effect, so no place is ever preferred.
#include <cstring>

#include "client/entry.h"
#include "client/memory/allocations.h"

namespace gpupool::client {
namespace {

bool managedRange(CUdeviceptr address, size_t bytes) {
  Allocation found;
  return bytes != 0 && allocations().find(address, found) &&
         (found.kind == Allocation::Kind::managed || found.kind == Allocation::Kind::managedSymbol) &&
         bytes <= found.bytes - (address - found.address);
}

CUresult answer(void* data, size_t bytes, CUmem_range_attribute what) {
  if (data == nullptr || bytes == 0 || bytes % sizeof(int) != 0) return CUDA_ERROR_INVALID_VALUE;
  int value = 0;
  switch (what) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
      value = CU_DEVICE_INVALID;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
      value = CU_MEM_LOCATION_TYPE_INVALID;
      break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (what != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY && bytes != sizeof(int)) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < bytes / sizeof(int); ++i)
    std::memcpy(static_cast<char*>(data) + i * sizeof(int), &value, sizeof value);
  return CUDA_SUCCESS;
}

}  // namespace

namespace custom {

CUresult cuMemRangeGetAttribute(void* data, size_t bytes, CUmem_range_attribute what, CUdeviceptr address,
                                size_t count) {
  return managedRange(address, count) ? answer(data, bytes, what) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemRangeGetAttributes(void** data, size_t* sizes, CUmem_range_attribute* what, size_t attributes,
                                 CUdeviceptr address, size_t count) {
  if (data == nullptr || sizes == nullptr || what == nullptr || attributes == 0 ||
      !managedRange(address, count))
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < attributes; ++i)
    if (CUresult status = answer(data[i], sizes[i], what[i]); status != CUDA_SUCCESS) return status;
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
