// The forms of before CUDA 3.2 and 4.0, whose device pointers have 32 bits: the session's lie far above, so
// what would have to return one fails, and what takes one finds nothing.
#include "client/entry.h"

namespace gpupool::client::custom {

CUresult cuMemAllocPitch(CUdeviceptr_v1*, unsigned*, unsigned, unsigned, unsigned) {
  return CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFree(CUdeviceptr_v1 address) { return custom::cuMemFree_v2(address); }
CUresult cuMemGetAddressRange(CUdeviceptr_v1*, unsigned*, CUdeviceptr_v1) { return CUDA_ERROR_NOT_FOUND; }

CUresult cuMemHostGetDevicePointer(CUdeviceptr_v1* out, void* host, unsigned flags) {
  CUdeviceptr address = 0;
  CUresult status =
      out == nullptr ? CUDA_ERROR_INVALID_VALUE : custom::cuMemHostGetDevicePointer_v2(&address, host, flags);
  if (status != CUDA_SUCCESS) return status;
  if (address > UINT32_MAX) return CUDA_ERROR_NOT_SUPPORTED;
  *out = static_cast<CUdeviceptr_v1>(address);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal(CUdeviceptr_v1* out, unsigned* bytes, CUmodule module, const char* name) {
  CUdeviceptr address = 0;
  size_t size = 0;
  CUresult status = custom::cuModuleGetGlobal_v2(&address, &size, module, name);
  if (status != CUDA_SUCCESS) return status;
  if (out != nullptr && address > UINT32_MAX) return CUDA_ERROR_NOT_SUPPORTED;
  if (out != nullptr) *out = static_cast<CUdeviceptr_v1>(address);
  if (bytes != nullptr) *bytes = static_cast<unsigned>(size);
  return CUDA_SUCCESS;
}

}  // namespace gpupool::client::custom
