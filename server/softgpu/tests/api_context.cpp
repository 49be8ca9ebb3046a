// Devices, contexts, errors, lookup.
#include <set>

#include "api_support.h"

using namespace apitest;

TEST_CASE("a device describes itself consistently") {
  OK(cuInit(0));
  int count = 0, version = 0;
  OK(cuDeviceGetCount(&count));
  REQUIRE(count >= 1);
  OK(cuDriverGetVersion(&version));
  CHECK(version >= 13000);
  CUdevice device;
  OK(cuDeviceGet(&device, 0));
  GIVES(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, count));
  GIVES(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, -1));
  char text[100] = {};
  OK(cuDeviceGetName(text, sizeof text, 0));
  CHECK(std::strlen(text) > 3);
  char shortName[4];
  OK(cuDeviceGetName(shortName, sizeof shortName, 0));
  CHECK(std::strlen(shortName) == 3);
  auto attribute = [](CUdevice_attribute id) {
    int value = -12345;
    OK(cuDeviceGetAttribute(&value, id, 0));
    return value;
  };
  CHECK(attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE) == 32);
  CHECK(attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK) == 1024);
  CHECK(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK) == 49152);
  CHECK(attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) == 1);
  int value;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuDeviceGetAttribute(&value, CUdevice_attribute(5000), 0));
  GIVES(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 99));
  CUuuid first, second;
  OK(cuDeviceGetUuid(&first, 0));
  OK(cuDeviceGetUuid(&second, 0));
  CHECK(!std::memcmp(&first, &second, 16));
  char bus[20] = {};
  OK(cuDeviceGetPCIBusId(bus, sizeof bus, 0));
  CUdevice same = -1;
  OK(cuDeviceGetByPCIBusId(&same, bus));
  CHECK(same == 0);
}

TEST_CASE("the current context is a stack of each thread") {
  OK(cuInit(0));
  CUcontext current = nullptr, a = nullptr, b = nullptr, popped = nullptr;
  OK(cuCtxGetCurrent(&current));
  CHECK(current == nullptr);
  CUdeviceptr pointer;
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&pointer, 16));
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent(&popped));
  OK(cuCtxCreate(&a, nullptr, 0, 0));
  OK(cuCtxCreate(&b, nullptr, 0, 0));
  OK(cuCtxGetCurrent(&current));
  CHECK(current == b);
  std::thread([] {
    CUcontext none = reinterpret_cast<CUcontext>(1);
    cuCtxGetCurrent(&none);
    CHECK(none == nullptr);
  }).join();
  OK(cuCtxPopCurrent(&popped));
  CHECK(popped == b);
  OK(cuCtxGetCurrent(&current));
  CHECK(current == a);
  unsigned long long idA = 0, idB = 0;
  OK(cuCtxGetId(a, &idA));
  OK(cuCtxGetId(b, &idB));
  CHECK(idA != idB);
  unsigned version = 0;
  OK(cuCtxGetApiVersion(b, &version));
  CHECK(version >= 3020);
  OK(cuCtxDestroy(b));
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuCtxGetApiVersion(b, &version));
  OK(cuCtxDestroy(a));
  OK(cuCtxGetCurrent(&current));
  CHECK(current == nullptr);
}

TEST_CASE("a primary context keeps its handle and is active while retained") {
  OK(cuInit(0));
  unsigned flags = 0;
  int active = -1;
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 0);
  CUcontext first = nullptr, again = nullptr;
  OK(cuDevicePrimaryCtxRetain(&first, 0));
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 1);
  OK(cuDevicePrimaryCtxRetain(&again, 0));
  CHECK(first == again);
  OK(cuCtxSetCurrent(first));
  CUdeviceptr pointer;
  OK(cuMemAlloc(&pointer, 1 << 20));
  size_t before, after, total;
  OK(cuMemGetInfo(&before, &total));
  OK(cuDevicePrimaryCtxRelease(0));
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 1);
  OK(cuDevicePrimaryCtxRelease(0));
  OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 0);
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
  // Its memory went with it.
  OK(cuDevicePrimaryCtxRetain(&again, 0));
  CHECK(again == first);
  OK(cuMemGetInfo(&after, &total));
  CHECK(after >= before + (1 << 20));
  OK(cuCtxSetCurrent(nullptr));
  OK(cuDevicePrimaryCtxRelease(0));
}

TEST_CASE("limits have defaults and keep what is set") {
  Session session;
  size_t value = 0;
  OK(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
  CHECK(value >= 1024);
  OK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
  OK(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
  CHECK(value == 4096);
  GIVES(CUDA_ERROR_INVALID_VALUE, cuCtxSetLimit(CUlimit(99), 1));
  GIVES(CUDA_ERROR_UNSUPPORTED_LIMIT, cuCtxGetLimit(&value, CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH));
  int least = 1, greatest = 1;
  OK(cuCtxGetStreamPriorityRange(&least, &greatest));
  CHECK(least == 0);
  CHECK(greatest == -5);
}

TEST_CASE("errors have names and texts") {
  const char* text = nullptr;
  OK(cuGetErrorName(CUDA_ERROR_ILLEGAL_ADDRESS, &text));
  CHECK(std::string(text) == "CUDA_ERROR_ILLEGAL_ADDRESS");
  OK(cuGetErrorString(CUDA_ERROR_INVALID_VALUE, &text));
  CHECK(std::string(text) == "invalid argument");
  GIVES(CUDA_ERROR_INVALID_VALUE, cuGetErrorName(CUresult(4711), &text));
}

TEST_CASE("entry points are found by name") {
  void* function = nullptr;
  CUdriverProcAddressQueryResult status;
  OK(cuGetProcAddress("cuMemAlloc", &function, 13000, 0, &status));
  CHECK(function == reinterpret_cast<void*>(&cuMemAlloc));
  CHECK(status == CU_GET_PROC_ADDRESS_SUCCESS);
  OK(cuGetProcAddress("cuNoSuchThing", &function, 13000, 0, &status));
  CHECK(function == nullptr);
  CHECK(status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
}
