// Beginning, end, and what concerns no single GPU.
#include <cstdio>

#include "client/nvml/answers.h"

using gpupool::nvml::answer;
using gpupool::nvml::Fact;
using gpupool::nvml::give;
using gpupool::nvml::giveText;
using gpupool::nvml::Library;
using gpupool::schema::NvmlFigures;

namespace {

// The server of the lease's first GPU is the server of all.
template <class Pick>
nvmlReturn_t ofServer(bool valid, Pick pick) {
  if (!Library::get().initialised()) return NVML_ERROR_UNINITIALIZED;
  return answer<Fact>(Library::get().handle(0), valid, pick);
}

nvmlReturn_t cudaVersion(int* version) {
  return ofServer(version != nullptr,
                  [&](const NvmlFigures& figures) { return give(figures.cudaVersion, version); });
}

}  // namespace

namespace gpupool::nvml {

int notSupported();
int notSupported() {
  return Library::get().initialised() ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_UNINITIALIZED;
}

}  // namespace gpupool::nvml

NVML_EXPORT nvmlReturn_t nvmlInit_v2() { return Library::get().init(); }
NVML_EXPORT nvmlReturn_t nvmlInit() { return Library::get().init(); }
// Its flags say what to do without GPUs, which no lease is.
NVML_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned) { return Library::get().init(); }
NVML_EXPORT nvmlReturn_t nvmlShutdown() { return Library::get().shutdown(); }

NVML_EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char* version, unsigned room) {
  return ofServer(version != nullptr,
                  [&](const NvmlFigures& figures) { return give(figures.driverVersion, version, room); });
}

// Where the server has none: of the interface that this library has.
NVML_EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char* version, unsigned room) {
  return ofServer(version != nullptr, [&](const NvmlFigures& figures) {
    if (figures.nvmlVersion.status == NVML_SUCCESS) return give(figures.nvmlVersion, version, room);
    return giveText(NVML_API_VERSION_STR, version, room);
  });
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) { return cudaVersion(version); }
NVML_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) { return cudaVersion(version); }

// Processes of this machine: those of the lease run here.
NVML_EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char* name, unsigned room) {
  if (!Library::get().initialised()) return NVML_ERROR_UNINITIALIZED;
  if (name == nullptr || room == 0) return NVML_ERROR_INVALID_ARGUMENT;
  char path[48];
  std::snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return NVML_ERROR_NOT_FOUND;
  const size_t size = std::fread(name, 1, room - 1, file);
  std::fclose(file);
  name[size] = 0;
  return size != 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

NVML_EXPORT const char* nvmlErrorString(nvmlReturn_t status) {
  switch (status) {
#define TEXT(name, text) \
  case NVML_##name:      \
    return text;
    TEXT(SUCCESS, "Success")
    TEXT(ERROR_UNINITIALIZED, "Uninitialized")
    TEXT(ERROR_INVALID_ARGUMENT, "Invalid Argument")
    TEXT(ERROR_NOT_SUPPORTED, "Not Supported")
    TEXT(ERROR_NO_PERMISSION, "Insufficient Permissions")
    TEXT(ERROR_ALREADY_INITIALIZED, "Already Initialized")
    TEXT(ERROR_NOT_FOUND, "Not Found")
    TEXT(ERROR_INSUFFICIENT_SIZE, "Insufficient Size")
    TEXT(ERROR_INSUFFICIENT_POWER, "Insufficient External Power")
    TEXT(ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded")
    TEXT(ERROR_TIMEOUT, "Timeout")
    TEXT(ERROR_IRQ_ISSUE, "Interrupt Request Issue")
    TEXT(ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found")
    TEXT(ERROR_FUNCTION_NOT_FOUND, "Function Not Found")
    TEXT(ERROR_CORRUPTED_INFOROM, "Corrupted infoROM")
    TEXT(ERROR_GPU_IS_LOST, "GPU is lost")
    TEXT(ERROR_RESET_REQUIRED, "GPU requires reset")
    TEXT(ERROR_OPERATING_SYSTEM, "GPU access blocked by the operating system")
    TEXT(ERROR_LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch")
    TEXT(ERROR_IN_USE, "In use by another client")
    TEXT(ERROR_MEMORY, "Insufficient Memory")
    TEXT(ERROR_NO_DATA, "No data")
    TEXT(ERROR_INSUFFICIENT_RESOURCES, "Insufficient Resources")
    TEXT(ERROR_FREQ_NOT_SUPPORTED, "Frequency Not Supported")
    TEXT(ERROR_ARGUMENT_VERSION_MISMATCH, "Argument version mismatch")
    TEXT(ERROR_DEPRECATED, "Deprecated")
    TEXT(ERROR_NOT_READY, "Not Ready")
    TEXT(ERROR_GPU_NOT_FOUND, "GPU Not Found")
    TEXT(ERROR_INVALID_STATE, "Invalid State")
#undef TEXT
    default:
      return "Unknown Error";
  }
}
