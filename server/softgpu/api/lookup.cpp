// Driver manual: Driver Entry Point Access, Profiler Control, and the marker by which gpupool knows this
// library.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "server/softgpu/api/cuda_api.h"

extern "C" {
__attribute__((visibility("default"))) extern const int gpupoolSoftwareGpu;
const int gpupoolSoftwareGpu = 1;
}

#pragma GCC visibility push(default)
#include <cudaProfiler.h>
#pragma GCC visibility pop

namespace {

// The newest version exported: all callers are built with cuda.h 13, whose newest names these are.
void* newest(const char* symbol) {
  char name[128];
  static void* const self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&newest), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  for (int version = 4; version >= 2; --version) {
    int length = std::snprintf(name, sizeof name, "%s_v%d", symbol, version);
    if (length < 0 || size_t(length) >= sizeof name) return nullptr;
    if (void* found = dlsym(self, name)) return found;
  }
  return dlsym(self, symbol);
}

}  // namespace

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  if (!symbol || !function) return CUDA_ERROR_INVALID_VALUE;
  if (flags &
      ~cuuint64_t(CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  constexpr int kOldest = 2000;
  void* found = std::strncmp(symbol, "cu", 2) ? nullptr : newest(symbol);
  if (status) {
    *status = !found              ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
              : version < kOldest ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                  : CU_GET_PROC_ADDRESS_SUCCESS;
  }
  *function = version < kOldest ? nullptr : found;
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

// The private tables belong to the client, which faces applications; nothing here needs them.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  if (table) *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuProfilerInitialize(const char*, const char*, CUoutput_mode) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuProfilerStart() { return CUDA_SUCCESS; }
CUresult cuProfilerStop() { return CUDA_SUCCESS; }
