// A libcuda.so.1 of the local part alone, with two invented devices and no server: enough for a real CUDA
// runtime to go through its whole start, its self-test of the driver included.
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "client/contexts.h"
#include "client/errors.h"
#include "client/export_tables.h"
#include "client/exports.h"
#include "client/lookup.h"
#include "client/process.h"

using namespace gpupool::client;

#define DRIVER extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI
#define REQUIRE_READY() \
  if (const CUresult notReady = process::ready(); notReady != CUDA_SUCCESS) return notReady

namespace {

constexpr int kDevices = 2;
int activations = 0, destructions = 0;

const RemoteContexts kRemote{[](CUdevice, unsigned, CUcontext) {
                               ++activations;
                               return CUDA_SUCCESS;
                             },
                             [](CUdevice, unsigned, CUcontext) { return CUDA_SUCCESS; },
                             [](CUcontext, unsigned) { return CUDA_SUCCESS; },
                             [](CUcontext) {
                               ++destructions;
                               return CUDA_SUCCESS;
                             }};

CUuuid uuidOf(int device) {
  CUuuid uuid;
  std::memset(uuid.bytes, 0x40 + device, sizeof uuid.bytes);
  return uuid;
}

int attributeOf(CUdevice_attribute attribute, int device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
      return 1;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return 0x10 + device;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
      return 3;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return 0;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    default:
      return 1;
  }
}

const ExportTableHooks kHooks{[](CUcontext, CUstream, uint64_t*) { return CUDA_ERROR_INVALID_HANDLE; },
                              [](CUmodule, std::vector<CUfunction>*) { return CUDA_ERROR_INVALID_HANDLE; },
                              [](CUmodule*, const void*) { return CUDA_ERROR_NOT_SUPPORTED; },
                              [] { return kDevices; },
                              [](int ordinal, CUuuid* uuid, int* domain, int* bus, int* device) {
                                *uuid = uuidOf(ordinal);
                                *domain = attributeOf(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, ordinal);
                                *bus = attributeOf(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, ordinal);
                                *device = attributeOf(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, ordinal);
                                return CUDA_SUCCESS;
                              },
                              [](std::vector<unsigned char>* gpcs, std::vector<unsigned char>* ranks) {
                                *gpcs = {0, 1, 0};
                                *ranks = {0, 0, 1};
                                return CUDA_SUCCESS;
                              }};

bool isDevice(CUdevice device) { return device >= 0 && device < kDevices; }

}  // namespace

DRIVER cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_SUCCESS;
  if (!process::begin(&result)) return result;
  contexts().start(kDevices, kRemote);
  setExportTableHooks(kHooks);
  process::finish(CUDA_SUCCESS);
  return CUDA_SUCCESS;
}
DRIVER cuDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}
DRIVER cuGetProcAddress_v2(const char* name, void** address, int version, cuuint64_t flags,
                           CUdriverProcAddressQueryResult* status) {
  return lookup(name, version, flags, address, status);
}
DRIVER cuGetExportTable(const void** table, const CUuuid* id) { return getExportTable(table, id); }
DRIVER cuGetErrorName(CUresult error, const char** text) { return errorName(error, text); }
DRIVER cuGetErrorString(CUresult error, const char** text) { return errorString(error, text); }
DRIVER cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  REQUIRE_READY();
  *mode = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}
DRIVER cuDeviceGetCount(int* count) {
  REQUIRE_READY();
  *count = kDevices;
  return CUDA_SUCCESS;
}
DRIVER cuDeviceGet(CUdevice* device, int ordinal) {
  REQUIRE_READY();
  *device = ordinal;
  return isDevice(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER cuDeviceGetName(char* name, int length, CUdevice device) {
  REQUIRE_READY();
  std::strncpy(name, "Invented", static_cast<size_t>(length));
  return isDevice(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  REQUIRE_READY();
  *bytes = size_t{1} << 34;
  return isDevice(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  REQUIRE_READY();
  *value = attributeOf(attribute, device);
  return isDevice(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  REQUIRE_READY();
  *uuid = uuidOf(device);
  return isDevice(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  REQUIRE_READY();
  return contexts().primaryRetain(context, device);
}
DRIVER cuDevicePrimaryCtxRelease(CUdevice device) {
  REQUIRE_READY();
  return contexts().primaryRelease(device);
}
DRIVER cuDevicePrimaryCtxReset(CUdevice device) {
  REQUIRE_READY();
  return contexts().primaryReset(device);
}
DRIVER cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  REQUIRE_READY();
  return contexts().primaryGetState(device, flags, active);
}
DRIVER cuCtxGetCurrent(CUcontext* context) {
  REQUIRE_READY();
  return contexts().getCurrent(context);
}
DRIVER cuCtxSetCurrent(CUcontext context) {
  REQUIRE_READY();
  return contexts().setCurrent(context);
}
DRIVER cuCtxGetDevice(CUdevice* device) {
  REQUIRE_READY();
  return contexts().getDevice(device, nullptr);
}
DRIVER cuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
  REQUIRE_READY();
  return contexts().getDevice(device, context);
}
DRIVER cuCtxGetApiVersion(CUcontext context, unsigned* version) {
  REQUIRE_READY();
  return contexts().getApiVersion(context, version);
}
DRIVER cuMemFree_v2(CUdeviceptr address) {
  REQUIRE_READY();
  Context* context = nullptr;
  if (const CUresult result = contexts().resolve(nullptr, &context); result != CUDA_SUCCESS) return result;
  return address == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
extern "C" __attribute__((visibility("default"))) void testDriverCounts(int* activated, int* destroyed) {
  *activated = activations;
  *destroyed = destructions;
}

namespace gpupool::client {

std::span<const Export> exports() {
#define ENTRY(name) {#name, reinterpret_cast<void*>(&name), true}
  static std::vector<Export>& list = *[] {
    auto* made = new std::vector<Export>{ENTRY(cuInit),
                                         ENTRY(cuDriverGetVersion),
                                         ENTRY(cuGetProcAddress_v2),
                                         ENTRY(cuGetExportTable),
                                         ENTRY(cuGetErrorName),
                                         ENTRY(cuGetErrorString),
                                         ENTRY(cuModuleGetLoadingMode),
                                         ENTRY(cuDeviceGetCount),
                                         ENTRY(cuDeviceGet),
                                         ENTRY(cuDeviceGetName),
                                         ENTRY(cuDeviceTotalMem_v2),
                                         ENTRY(cuDeviceGetAttribute),
                                         ENTRY(cuDeviceGetUuid),
                                         ENTRY(cuDevicePrimaryCtxRetain),
                                         ENTRY(cuDevicePrimaryCtxRelease),
                                         ENTRY(cuDevicePrimaryCtxReset),
                                         ENTRY(cuDevicePrimaryCtxGetState),
                                         ENTRY(cuCtxGetCurrent),
                                         ENTRY(cuCtxSetCurrent),
                                         ENTRY(cuCtxGetDevice),
                                         ENTRY(cuCtxGetDevice_v2),
                                         ENTRY(cuCtxGetApiVersion),
                                         ENTRY(cuMemFree_v2)};
    std::sort(made->begin(), made->end(),
              [](const Export& a, const Export& b) { return std::strcmp(a.name, b.name) < 0; });
    return made;
  }();
  return list;
}

}  // namespace gpupool::client
