#include "pool-manager/cli/smi_library.h"

#include <dlfcn.h>

namespace gpupool::cli {

NvmlLibrary::NvmlLibrary(const std::string& path) : library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) {
    const char* error = dlerror();
    throw NvmlError(NVML_ERROR_LIBRARY_NOT_FOUND, error != nullptr ? error : path + " cannot be loaded");
  }
  const nvmlReturn_t status = ask("nvmlInit_v2");
  if (status == NVML_SUCCESS) return;
  const std::string text = errorText(status);
  dlclose(library_);
  throw NvmlError(status, text);
}

NvmlLibrary::~NvmlLibrary() {
  ask("nvmlShutdown");
  dlclose(library_);
}

void* NvmlLibrary::find(const char* name) const { return dlsym(library_, name); }

std::string NvmlLibrary::errorText(nvmlReturn_t status) const {
  const auto text = reinterpret_cast<const char* (*)(nvmlReturn_t)>(find("nvmlErrorString"));
  return text == nullptr ? "error " + std::to_string(status) : text(status);
}

}  // namespace gpupool::cli
