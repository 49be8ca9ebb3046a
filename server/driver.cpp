#include "server/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <vector>

namespace gpupool::server {
namespace {

namespace fs = std::filesystem;

// Without these no session can be served at all; anything else may be absent in an older driver.
constexpr const char* kEssential[] = {
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuLaunchKernel",
};

struct Entry {
  std::string_view name;
  void* (*get)(const Driver&);
};

// Multicast objects: on a machine that is shared, these can put GPUs out of service for everybody. They are
// never looked up, so that nothing can call them (tests/coverage/multicast_test.sh).
constexpr std::string_view kMulticast = "cuMulti";
constexpr bool isNeverCalled(std::string_view name) { return name.starts_with(kMulticast); }

constexpr Entry kEntries[] = {
#define NAME(name)                            \
  {isNeverCalled(#name) ? kMulticast : #name, \
   [](const Driver& driver) { return reinterpret_cast<void*>(driver.name); }},
#include "schema/names.def"
#undef NAME
};

// The loader's own idea of where the library lies: "libcuda.so.1" alone may mean another file in another
// process.
std::string loadedPath(void* handle, const std::string& asked) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name[0] == '/')
    return map->l_name;
  return asked;
}

std::vector<std::string> softwareCandidates() {
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  if (error) return {};
  const fs::path folder = executable.parent_path();
  return {folder.parent_path() / "lib" / "libcuda-soft.so",
          folder.parent_path() / "lib" / "gpupool" / "libcuda-soft.so", folder / "libcuda-soft.so"};
}

// The bare name follows the dynamic loader; the folders behind it help where LD_LIBRARY_PATH leads to our
// client.
std::vector<std::string> realCandidates() {
  return {"libcuda.so.1",
          "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
          "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
          "/usr/lib64/libcuda.so.1",
          "/usr/lib64/nvidia/libcuda.so.1",
          "/usr/lib/libcuda.so.1",
          "/usr/local/nvidia/lib64/libcuda.so.1",
          "/run/opengl-driver/lib/libcuda.so.1",
          "/usr/lib/wsl/lib/libcuda.so.1"};
}

}  // namespace

std::unique_ptr<Driver> Driver::open(const std::string& path, std::string& reason) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* text = dlerror();
    reason = text != nullptr ? text : path + ": cannot be loaded";
    return nullptr;
  }
  const std::string file = loadedPath(handle, path);
  if (dlsym(handle, "gpupoolClientVersion") != nullptr) {
    dlclose(handle);
    reason = file + ": is gpupool's own client library, not a driver";
    return nullptr;
  }
  std::string missing;
  for (const char* name : kEssential) {
    if (dlsym(handle, name) == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
  if (!missing.empty()) {
    dlclose(handle);
    reason = file + ": not usable as a CUDA driver, it lacks " + missing;
    return nullptr;
  }
  std::unique_ptr<Driver> driver(new Driver);
  driver->handle_ = handle;
  driver->path_ = file;
  driver->software_ = dlsym(handle, "gpupoolSoftwareGpu") != nullptr ||
                      fs::path(file).filename().string().starts_with("libcuda-soft.so");
#define NAME(name)                     \
  if constexpr (!isNeverCalled(#name)) \
    driver->name = reinterpret_cast<decltype(&::name)>(dlsym(handle, #name));
#include "schema/names.def"
#undef NAME
  return driver;
}

std::unique_ptr<const Driver> Driver::load(const std::string& path) {
  std::string configured = path;
  if (configured.empty()) {
    if (const char* text = std::getenv("GPUPOOL_DRIVER")) configured = text;
  }
  std::string reason;
  if (!configured.empty()) {
    auto driver = open(configured, reason);
    if (!driver) throw std::runtime_error("driver: " + reason);
    return driver;
  }
  std::string tried;
  for (const std::string& candidate : realCandidates()) {
    if (candidate[0] == '/' && !fs::exists(candidate)) continue;
    auto driver = open(candidate, reason);
    if (driver) {
      // Containers often carry a driver library without a GPU behind it.
      int devices = 0;
      CUresult result = driver->cuInit(0);
      if (result == CUDA_SUCCESS) result = driver->cuDeviceGetCount(&devices);
      if (result == CUDA_SUCCESS && devices > 0) return driver;
      reason = driver->path() + ": " +
               (result == CUDA_SUCCESS ? std::string("finds no device") : driver->describe(result));
    }
    tried += "\n  " + reason;
  }
  for (const std::string& candidate : softwareCandidates()) {
    if (!fs::exists(candidate)) {
      tried += "\n  " + candidate + ": not there";
      continue;
    }
    if (auto driver = open(candidate, reason)) return driver;
    tried += "\n  " + reason;
  }
  throw std::runtime_error(
      "driver: no NVIDIA driver with a device and no software GPU found; name one with --driver or "
      "GPUPOOL_DRIVER. Tried:" +
      tried);
}

void* Driver::find(std::string_view name) const {
  size_t low = 0, high = std::size(kEntries);
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (kEntries[middle].name == name) return kEntries[middle].get(*this);
    if (kEntries[middle].name < name) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return nullptr;
}

std::string Driver::describe(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown CUDA error";
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS) text = nullptr;
  std::string line = std::string(name) + " (" + std::to_string(static_cast<int>(result)) + ")";
  if (text != nullptr) line += std::string(": ") + text;
  return line;
}

}  // namespace gpupool::server
