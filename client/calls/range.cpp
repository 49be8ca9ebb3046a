// Ranges of managed memory: prefetching, advice and attributes. Managed memory stays on the host here: it is
// never prefetched, and advice about its place is accepted without effect, so no place is ever preferred.
#include <cstring>

#include "client/devices.h"
#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

CUresult checkPlace(const CUmemLocation& location) {
  switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return propertiesOf(location.id) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// The older calls name a device, or the host as CU_DEVICE_CPU.
CUmemLocation placeOf(CUdevice device) {
  CUmemLocation place{};
  place.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  place.id = device;
  return place;
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

CUresult checkRanges(const CUdeviceptr* addresses, const size_t* sizes, size_t count,
                     unsigned long long flags, CUstream stream) {
  StreamRef ref;
  if (CUresult status = resolveStream(stream, ref); status != CUDA_SUCCESS) return status;
  if (ref.wire == nullptr) return CUDA_ERROR_INVALID_VALUE;  // the default stream: as the other batches
  if (addresses == nullptr || sizes == nullptr || count == 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i)
    if (!allocations().isManaged(addresses[i], sizes[i])) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// Place i is for the ranges from firsts[i] up to the next place's first.
CUresult checkPlaces(const CUmemLocation* places, const size_t* firsts, size_t placeCount, size_t count) {
  if (places == nullptr || firsts == nullptr || placeCount == 0 || firsts[0] != 0)
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < placeCount; ++i) {
    if (firsts[i] >= count || (i != 0 && firsts[i] <= firsts[i - 1])) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult status = checkPlace(places[i]); status != CUDA_SUCCESS) return status;
  }
  return CUDA_SUCCESS;
}

}  // namespace

namespace custom {

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation place) {
  switch (advice) {
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
      if (CUresult status = checkPlace(place); status != CUDA_SUCCESS) return status;
      break;
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
      break;  // the place is ignored
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return allocations().isManaged(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice device) {
  return custom::cuMemAdvise_v2(address, bytes, advice, placeOf(device));
}
CUresult cuMemPrefetchAsync_v2(CUdeviceptr address, size_t bytes, CUmemLocation place, unsigned flags,
                               CUstream stream) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && flags != 0) status = CUDA_ERROR_INVALID_VALUE;
  if (status == CUDA_SUCCESS) status = checkPlace(place);
  if (status != CUDA_SUCCESS) return status;
  return allocations().isManaged(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemPrefetchAsync(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream) {
  return custom::cuMemPrefetchAsync_v2(address, bytes, placeOf(device), 0, stream);
}
CUresult cuMemPrefetchBatchAsync(CUdeviceptr* addresses, size_t* sizes, size_t count, CUmemLocation* places,
                                 size_t* firsts, size_t placeCount, unsigned long long flags,
                                 CUstream stream) {
  CUresult status = checkRanges(addresses, sizes, count, flags, stream);
  return status == CUDA_SUCCESS ? checkPlaces(places, firsts, placeCount, count) : status;
}
// What is discarded reads as anything until it is written: as what it was, too.
CUresult cuMemDiscardBatchAsync(CUdeviceptr* addresses, size_t* sizes, size_t count, unsigned long long flags,
                                CUstream stream) {
  return checkRanges(addresses, sizes, count, flags, stream);
}
CUresult cuMemDiscardAndPrefetchBatchAsync(CUdeviceptr* addresses, size_t* sizes, size_t count,
                                           CUmemLocation* places, size_t* firsts, size_t placeCount,
                                           unsigned long long flags, CUstream stream) {
  return custom::cuMemPrefetchBatchAsync(addresses, sizes, count, places, firsts, placeCount, flags, stream);
}
CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr address, size_t bytes, unsigned flags) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  Allocation found;
  const bool whole = allocations().isManaged(address, 1) && allocations().find(address, found) &&
                     found.address == address && (bytes == 0 || bytes == found.bytes);
  const bool known =
      flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST || flags == CU_MEM_ATTACH_SINGLE;
  return whole && known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRangeGetAttribute(void* data, size_t bytes, CUmem_range_attribute what, CUdeviceptr address,
                                size_t count) {
  return allocations().isManaged(address, count) ? answer(data, bytes, what) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemRangeGetAttributes(void** data, size_t* sizes, CUmem_range_attribute* what, size_t attributes,
                                 CUdeviceptr address, size_t count) {
  if (data == nullptr || sizes == nullptr || what == nullptr || attributes == 0 ||
      !allocations().isManaged(address, count))
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < attributes; ++i)
    if (CUresult status = answer(data[i], sizes[i], what[i]); status != CUDA_SUCCESS) return status;
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
