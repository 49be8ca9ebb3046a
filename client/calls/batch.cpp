// Batches of copies, one by one in the stream's order: a batch asks for less order than that.
#include "client/entry.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

CUresult copyBatch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                   CUmemcpyAttributes* attributes, size_t* starts, size_t attributeCount, size_t* failed,
                   CUstream stream) {
  if (failed != nullptr) *failed = SIZE_MAX;  // not the fault of one copy
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  if (to == nullptr || from == nullptr || sizes == nullptr || count == 0 || attributes == nullptr ||
      starts == nullptr || attributeCount == 0 || attributeCount > count || starts[0] != 0 ||
      ref.wire == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  bool during = false;
  for (size_t i = 0; i < attributeCount; ++i) {
    if (starts[i] >= count || (i != 0 && starts[i] <= starts[i - 1])) return CUDA_ERROR_INVALID_VALUE;
    if (attributes[i].srcAccessOrder < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
        attributes[i].srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
      return CUDA_ERROR_INVALID_VALUE;
    during |= attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
  }
  for (size_t i = 0; i < count; ++i) {
    status = custom::cuMemcpyAsync(to[i], from[i], sizes[i], stream);
    if (status == CUDA_SUCCESS) continue;
    if (failed != nullptr) *failed = i;
    return status;
  }
  // The sources may be gone when this returns.
  return during ? synchronizeStream(ref) : CUDA_SUCCESS;
}

}  // namespace

namespace custom {

CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* starts, size_t attributeCount,
                            size_t* failed, CUstream stream) {
  return copyBatch(to, from, sizes, count, attributes, starts, attributeCount, failed, stream);
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* starts, size_t attributeCount,
                               CUstream stream) {
  return copyBatch(to, from, sizes, count, attributes, starts, attributeCount, nullptr, stream);
}

}  // namespace custom
}  // namespace gpupool::client
