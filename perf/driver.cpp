#include "perf/driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace gpupool::perf {
namespace {

Driver load() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw std::runtime_error(::dlerror());
  Driver driver;
#define GPUPOOL_PERF_TEXT_OF(name) #name
#define GPUPOOL_PERF_TEXT(name) GPUPOOL_PERF_TEXT_OF(name)  // after cuda.h's renaming
#define GPUPOOL_PERF_LOAD(name)                                                                     \
  driver.name = reinterpret_cast<decltype(driver.name)>(::dlsym(library, GPUPOOL_PERF_TEXT(name))); \
  if (driver.name == nullptr) throw std::runtime_error("libcuda.so.1 has no " GPUPOOL_PERF_TEXT(name));
  GPUPOOL_PERF_CALLS(GPUPOOL_PERF_LOAD)
  return driver;
}

}  // namespace

const Driver& cuda() {
  static const Driver driver = load();
  return driver;
}

void ok(CUresult status, const char* file, int line) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuda().cuGetErrorName(status, &name);
  throw std::runtime_error(std::string(name == nullptr ? "unknown error" : name) + " at " + file + ":" +
                           std::to_string(line));
}

}  // namespace gpupool::perf
