// A driver library for tests: two devices, no room for a context on the second, no memory, no kernels.
// FAKE_DRIVER_LACKING leaves out an essential name, FAKE_DRIVER_CLIENT carries the marker of gpupool's own
// client library. FAKE_DRIVER_INIT=<n> in the environment makes cuInit return n; "crash" makes it crash.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT CUresult cuInit(unsigned int) {
  const char* text = std::getenv("FAKE_DRIVER_INIT");
  if (text == nullptr) return CUDA_SUCCESS;
  if (std::strcmp(text, "crash") == 0) std::abort();
  return static_cast<CUresult>(std::atoi(text));
}
EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  *count = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  std::snprintf(name, bytes, "Fake GPU %d", device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  std::memset(uuid->bytes, 0x40 + device, sizeof uuid->bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = size_t{8} << 30;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}
EXPORT CUresult cuDeviceGetPCIBusId(char* text, int bytes, CUdevice device) {
  std::snprintf(text, bytes, "0000:%02x:00.0", device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : nullptr;
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_NO_DEVICE ? "no CUDA-capable device is detected" : nullptr;
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = nullptr;
  return device == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// The rest is only looked up.
#define REFUSED(name, ...) \
  EXPORT CUresult name(__VA_ARGS__) { return CUDA_ERROR_NOT_SUPPORTED; }
REFUSED(cuCtxSetCurrent, CUcontext)
REFUSED(cuMemAddressReserve, CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long)
REFUSED(cuMemCreate, CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long)
REFUSED(cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
REFUSED(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc*, size_t)
REFUSED(cuMemUnmap, CUdeviceptr, size_t)
REFUSED(cuMemRelease, CUmemGenericAllocationHandle)
REFUSED(cuStreamCreate, CUstream*, unsigned int)
REFUSED(cuStreamSynchronize, CUstream)
#ifndef FAKE_DRIVER_LACKING
REFUSED(cuLaunchKernel, CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
        unsigned int, unsigned int, CUstream, void**, void**)
#endif
#ifdef FAKE_DRIVER_CLIENT
EXPORT int gpupoolClientVersion() { return 1; }
#endif
