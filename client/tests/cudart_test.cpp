// A real CUDA runtime on the local part of the client (test_driver.cpp): start, contexts, threads, reset,
// exit.
#include <dlfcn.h>

#include <thread>

#include "catch.h"

namespace {

// The runtime finds the driver by its name, which the copy loaded first already carries.
void* runtime() {
  static void* library = [] {
    if (dlopen(GPUPOOL_TEST_DRIVER, RTLD_NOW | RTLD_GLOBAL) == nullptr) FAIL(dlerror());
    void* opened = dlopen(GPUPOOL_CUDART, RTLD_NOW);
    if (opened == nullptr) FAIL(dlerror());
    return opened;
  }();
  return library;
}

template <typename Function>
Function* call(const char* name) {
  void* found = dlsym(runtime(), name);
  REQUIRE(found != nullptr);
  return reinterpret_cast<Function*>(found);
}

std::pair<int, int> counts() {
  auto* ask = reinterpret_cast<void (*)(int*, int*)>(dlsym(RTLD_DEFAULT, "testDriverCounts"));
  int activated = -1, destroyed = -1;
  REQUIRE(ask != nullptr);
  ask(&activated, &destroyed);
  return {activated, destroyed};
}

}  // namespace

// cudaError_t: 0 success, 36 cudaErrorCallRequiresNewerDriver, 101 cudaErrorInvalidDevice.
TEST_CASE("cudart starts on the local part, survives a reset, and follows threads") {
  int count = 0, device = -1;
  CHECK(call<int(int*)>("cudaGetDeviceCount")(&count) == 0);
  CHECK(count == 2);
  int warp = 0;
  CHECK(call<int(int*, int, int)>("cudaDeviceGetAttribute")(&warp, 10, 0) == 0);
  CHECK(warp == 32);
  CHECK(counts().first == 0);  // no query made a context

  auto* free = call<int(void*)>("cudaFree");
  auto* setDevice = call<int(int)>("cudaSetDevice");
  CHECK(free(nullptr) == 0);
  CHECK(counts().first == 1);
  CHECK(free(nullptr) == 0);
  CHECK(counts().first == 1);

  std::thread([&] {
    CHECK(free(nullptr) == 0);
    CHECK(counts().first == 1);
    CHECK(setDevice(1) == 0);
    CHECK(free(nullptr) == 0);
    CHECK(counts().first == 2);
    CHECK(call<int(int*)>("cudaGetDevice")(&device) == 0);
    CHECK(device == 1);
  }).join();
  CHECK(call<int(int*)>("cudaGetDevice")(&device) == 0);
  CHECK(device == 0);
  CHECK(setDevice(2) == 101);

  CHECK(call<int()>("cudaDeviceReset")() == 0);
  CHECK(counts() == std::pair{2, 1});
  CHECK(free(nullptr) == 0);  // only works where the reset ran the runtime's destructors
  CHECK(counts() == std::pair{3, 1});

  // What the driver does not export degrades to one error, not to a failed start.
  void* memory = nullptr;
  CHECK(call<int(void**, size_t)>("cudaMalloc")(&memory, 16) == 36);
}
