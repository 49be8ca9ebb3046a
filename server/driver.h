#pragma once
// The interface to the driver: the only place that calls a real libcuda.so.1 or the software GPU
// (libcuda-soft.so).
//
// A Driver is a table of typed function pointers, one for every name in schema/names.def, called as
// `driver.cuMemAlloc_v2(&pointer, bytes)`. Names are the exported ones: this header shows cuda.h with
// __CUDA_API_VERSION_INTERNAL, so `cuMemAlloc` is the 32-bit function of 2008 and `cuMemAlloc_v2` today's. A
// name that the loaded library lacks is null; of those in driver.cpp's list of essentials none is.
//
// Threads: load once, then read-only from any thread. The library is never unloaded: CUDA does not survive
// that.

#if defined(CUDA_VERSION) && !defined(__CUDA_API_VERSION_INTERNAL)
#error "include server/driver.h before cuda.h, or cuda.h rewrites the driver's names"
#endif
#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#include <cuda.h>
#include <cudaProfiler.h>

#include <memory>
#include <string>
#include <string_view>

namespace gpupool::server {

class Driver {
 public:
  // Loads the library at `path` and looks every name up. Empty: $GPUPOOL_DRIVER, else the first real driver
  // on the dynamic loader's path whose cuInit finds a device, else libcuda-soft.so in ../lib or beside the
  // executable. Refuses gpupool's own client library, which answers to the same file name. Throws
  // std::runtime_error that names what was tried and why it was not usable. Only the search calls cuInit.
  static std::unique_ptr<const Driver> load(const std::string& path = {});

  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // The file that was loaded, as a path that loads it again.
  const std::string& path() const { return path_; }
  // The software GPU: its library exports the marker gpupoolSoftwareGpu, or is named libcuda-soft.so.
  bool software() const { return software_; }
  // The function of that name, or null; for names that arrive as text.
  void* find(std::string_view name) const;
  // "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"
  std::string describe(CUresult result) const;

#define NAME(name) decltype(&::name) name = nullptr;
#include "schema/names.def"
#undef NAME

 private:
  Driver() = default;
  // Null and `reason` filled if the library cannot serve.
  static std::unique_ptr<Driver> open(const std::string& path, std::string& reason);

  void* handle_ = nullptr;
  std::string path_;
  bool software_ = false;
};

}  // namespace gpupool::server
