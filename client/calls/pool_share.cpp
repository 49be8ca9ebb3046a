// Pools of other processes (Stream Ordered Memory Allocator). A pool's descriptor names the pool
// and its GPU, and opens no memory. Each allocation is opened by a token of its own, as memory of
// cuIpcGetMemHandle is (share.cpp).
#include <algorithm>
#include <cstring>
#include <iterator>

#include "client/calls/physical.h"
#include "client/capture.h"
#include "client/devices.h"
#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/memory/pools.h"
#include "client/memory/shares.h"

namespace gpupool::client {
namespace {

static_assert(sizeof(CUmemPoolPtrExportData) == CU_IPC_HANDLE_SIZE);
using Bytes = char[CU_IPC_HANDLE_SIZE];
Bytes& bytesOf(CUmemPoolPtrExportData& data) { return reinterpret_cast<Bytes&>(data.reserved); }

Share namedBy(const MemoryPool& pool) {
  Share share;
  std::copy(std::begin(pool.sharing().name), std::end(pool.sharing().name), share.pool);
  return share;
}

bool isDescriptor(CUmemAllocationHandleType type, unsigned long long flags) {
  return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0;
}

}  // namespace

namespace custom {

CUresult cuMemPoolExportToShareableHandle(void* out, CUmemoryPool handle, CUmemAllocationHandleType type,
                                          unsigned long long flags) {
  const auto pool = findPool(handle);
  if (out == nullptr || !isDescriptor(type, flags) || !pool || !pool->sharing().exportable())
    return CUDA_ERROR_INVALID_VALUE;
  Share share = namedBy(*pool);
  static_assert(sizeof share.token.key == sizeof(CUuuid));
  std::memcpy(share.token.key, &propertiesOf(pool->device())->uuid, sizeof share.token.key);
  const int descriptor = makeDescriptor(ShareKind::pool, share);
  if (descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(out, &descriptor, sizeof descriptor);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool* out, void* osHandle, CUmemAllocationHandleType type,
                                            unsigned long long flags) {
  Share share;
  if (out == nullptr || !isDescriptor(type, flags) ||
      !readDescriptor(ShareKind::pool, static_cast<int>(reinterpret_cast<intptr_t>(osHandle)), share))
    return CUDA_ERROR_INVALID_VALUE;
  // Of a device that this process does not see (CUDA_VISIBLE_DEVICES): the current one's, as in openShared.
  const auto is = [&](const schema::DeviceProperties& one) {
    return std::memcmp(share.token.key, &one.uuid, sizeof share.token.key) == 0;
  };
  const schema::WorkerHello& hello = Session::get().hello();
  if (!std::any_of(hello.devices, hello.devices + hello.deviceCount, is)) return openingOtherGpu();
  CUdevice device = currentDevice();
  for (CUdevice seen = 0; seen < deviceCount(); ++seen)
    if (is(*propertiesOf(seen))) device = seen;
  return createPool(device, 0, {PoolSharing::Kind::imported, {share.pool[0], share.pool[1]}}, out);
}

CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData* out, CUdeviceptr pointer) {
  Allocation found;
  if (out == nullptr || !allocations().find(pointer, found) || found.address != pointer ||
      found.kind != Allocation::Kind::device || found.pool == nullptr || found.ofGraph)
    return CUDA_ERROR_INVALID_VALUE;
  const auto pool = findPool(found.pool, true);
  if (!pool || !pool->sharing().exportable()) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = captureForbids();
  Share share = namedBy(*pool);
  if (status == CUDA_SUCCESS) status = offerAllocation(found, share.token);
  if (status == CUDA_SUCCESS) writeHandle(ShareKind::poolMemory, share, bytesOf(*out));
  return status;
}

CUresult cuMemPoolImportPointer(CUdeviceptr* out, CUmemoryPool handle, CUmemPoolPtrExportData* data) {
  const auto pool = findPool(handle);
  Share share;
  if (out == nullptr || data == nullptr || !pool || !pool->sharing().imported() ||
      !readHandle(ShareKind::poolMemory, bytesOf(*data), share))
    return CUDA_ERROR_INVALID_VALUE;
  // Programs try the allocations of several pools until one fits (streamOrderedAllocationIPC).
  if (!std::equal(std::begin(share.pool), std::end(share.pool), pool->sharing().name))
    return CUDA_ERROR_INVALID_VALUE;
  return openShared(share.token, handle, out);
}

}  // namespace custom
}  // namespace gpupool::client
