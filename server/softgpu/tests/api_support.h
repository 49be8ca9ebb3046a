#pragma once
// What the API tests share: the primary context, the test kernels, a launch in one line. The tests use
// nothing but the public driver API, so they can be linked against a real driver to see whether it agrees.

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"

namespace apitest {

extern const char kKernels[];  // PTX

inline std::string name(CUresult result) {
  const char* text = nullptr;
  cuGetErrorName(result, &text);
  return text ? text : "?";
}

#define OK(call)                                       \
  do {                                                 \
    CUresult result_ = (call);                         \
    INFO(#call << " gave " << apitest::name(result_)); \
    REQUIRE(result_ == CUDA_SUCCESS);                  \
  } while (false)
#define GIVES(code, call)                              \
  do {                                                 \
    CUresult result_ = (call);                         \
    INFO(#call << " gave " << apitest::name(result_)); \
    CHECK(result_ == (code));                          \
  } while (false)

// The primary context of device 0, current on this thread, with the kernels loaded.
struct Session {
  CUcontext context = nullptr;
  CUmodule module = nullptr;
  Session() {
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, kKernels));
  }
  ~Session() {
    cuModuleUnload(module);
    cuCtxSetCurrent(nullptr);
    cuDevicePrimaryCtxRelease(0);
  }
  CUfunction function(const char* functionName) const {
    CUfunction found = nullptr;
    OK(cuModuleGetFunction(&found, module, functionName));
    return found;
  }
};

// One block of `threads` threads.
template <class... Arguments>
CUresult launch(CUfunction f, unsigned threads, unsigned shared, CUstream stream, Arguments... arguments) {
  void* pointers[] = {&arguments..., nullptr};
  return cuLaunchKernel(f, 1, 1, 1, threads, 1, 1, shared, stream, pointers, nullptr);
}

// Device memory with a host's view of it.
template <class T>
struct Buffer {
  CUdeviceptr address = 0;
  size_t count;
  explicit Buffer(size_t elements, T value = T()) : count(elements) {
    OK(cuMemAlloc(&address, count * sizeof(T)));
    set(std::vector<T>(count, value));
  }
  ~Buffer() { cuMemFree(address); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void set(const std::vector<T>& values) {
    OK(cuMemcpyHtoD(address, values.data(), values.size() * sizeof(T)));
  }
  std::vector<T> get() const {
    std::vector<T> values(count);
    OK(cuMemcpyDtoH(values.data(), address, count * sizeof(T)));
    return values;
  }
};

// A word both sides see.
struct Word {
  std::atomic<int>* host = nullptr;
  CUdeviceptr device = 0;
  Word() {
    void* pointer = nullptr;
    OK(cuMemHostAlloc(&pointer, 64, CU_MEMHOSTALLOC_DEVICEMAP));
    std::memset(pointer, 0, 64);
    host = static_cast<std::atomic<int>*>(pointer);
    OK(cuMemHostGetDevicePointer(&device, pointer, 0));
  }
  ~Word() { cuMemFreeHost(host); }
};

inline void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace apitest
