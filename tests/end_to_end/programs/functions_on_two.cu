// What is known of a kernel on one device or in one context says nothing about another. The first device and
// the last, which may be the same: a kernel with more dynamic shared memory than the default must be allowed
// it on each. With --devices 2 a second device must be there.
#include "driver_check.h"

constexpr int kThreads = 64, kLarge = 60000, kLarger = 80000;

__global__ void viaShared(int* output, int last) {
  extern __shared__ int buffer[];
  buffer[threadIdx.x] = threadIdx.x;
  buffer[last] = 7;
  __syncthreads();
  output[threadIdx.x] = buffer[kThreads - 1 - threadIdx.x] + buffer[last];
}

__global__ void plain(int* output) { output[threadIdx.x] = threadIdx.x; }

static const char* const kModule = R"(
.version 7.0
.target sm_70
.address_size 64
.extern .shared .align 4 .b8 room[];
.visible .global .align 4 .u32 value = 3;
.visible .entry add(.param .u64 where)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [where];
  cvta.to.global.u64 %rd2, %rd1;
  ld.global.u32 %r1, [%rd2];
  ld.global.u32 %r2, [value];
  add.u32 %r1, %r1, %r2;
  mov.u32 %r3, room;
  st.shared.u32 [%r3], %r1;
  ld.shared.u32 %r1, [%r3];
  st.global.u32 [%rd2], %r1;
  ret;
}
)";

static cudaError_t tryLaunch(int* output, int sharedBytes) {
  viaShared<<<1, kThreads, sharedBytes>>>(output, sharedBytes / 4 - 1);
  return cudaGetLastError();
}

static void expectResult(int* output) {
  int got[kThreads];
  CUDA(cudaMemcpy(got, output, sizeof got, cudaMemcpyDeviceToHost));
  for (int i = 0; i < kThreads; ++i) REQUIRE(got[i] == kThreads - 1 - i + 7);
}

static void allow(int device, int sharedBytes) {
  CUDA(cudaSetDevice(device));
  CUDA(cudaFuncSetAttribute(viaShared, cudaFuncAttributeMaxDynamicSharedMemorySize, sharedBytes));
}

static int allowed(int device) {
  CUDA(cudaSetDevice(device));
  cudaFuncAttributes attributes;
  CUDA(cudaFuncGetAttributes(&attributes, viaShared));
  return attributes.maxDynamicSharedSizeBytes;
}

// The runtime, a device at a time.
static void byRuntime(int last) {
  int* output[2];
  for (int side = 0; side < 2; ++side) {
    CUDA(cudaSetDevice(side * last));
    CUDA(cudaMalloc(&output[side], kThreads * sizeof(int)));
  }
  auto works = [&](int side, int sharedBytes) {
    CUDA(cudaSetDevice(side * last));
    CUDA(tryLaunch(output[side], sharedBytes));
    expectResult(output[side]);
  };
  auto isRefused = [&](int side, int sharedBytes) {
    CUDA(cudaSetDevice(side * last));
    REQUIRE(tryLaunch(output[side], sharedBytes) == cudaErrorInvalidValue);
  };
  isRefused(0, kLarge);
  allow(0, kLarge);
  works(0, kLarge);
  works(0, kLarge);
  if (last != 0) {
    isRefused(1, kLarge);
    REQUIRE(allowed(1) < kLarge);
  }
  allow(last, kLarger);
  works(1, kLarger);
  if (last != 0) {
    isRefused(0, kLarger);
    REQUIRE(allowed(0) == kLarge);
  }
  REQUIRE(allowed(last) == kLarger);
  for (int round = 0; round < 3; ++round) works(0, kLarge), works(1, kLarger);
  check::say("each device has its own limit");

  // Lowered on one device, the limit holds there at once, and only there.
  allow(last, 1024);
  isRefused(1, kLarger);
  isRefused(1, kLarge);
  works(1, 1024);
  if (last != 0) works(0, kLarge);
  allow(0, kLarge), allow(last, kLarge);
  works(0, kLarge), works(1, kLarge);
  CUDA(cudaSetDevice(last));
  CUDA(cudaFuncSetAttribute(viaShared, cudaFuncAttributePreferredSharedMemoryCarveout, 50));
  CUDA(cudaFuncSetCacheConfig(viaShared, cudaFuncCachePreferL1));
  cudaFuncAttributes attributes;
  CUDA(cudaFuncGetAttributes(&attributes, viaShared));
  REQUIRE(attributes.preferredShmemCarveout == 50);
  if (last != 0) {
    CUDA(cudaSetDevice(0));
    CUDA(cudaFuncGetAttributes(&attributes, viaShared));
    REQUIRE(attributes.preferredShmemCarveout != 50);
  }
  check::say("limits and preferences change on one device alone");

  // Occupancy is asked on both.
  for (int side : {0, 1, 0}) {
    CUDA(cudaSetDevice(side * last));
    int few = 0, many = 0;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&few, viaShared, kThreads, kLarge));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&many, plain, kThreads, 0));
    REQUIRE(few >= 1 && few <= many);
  }
  for (int side = 0; side < 2; ++side) {
    CUDA(cudaSetDevice(side * last));
    CUDA(cudaFree(output[side]));
  }
  check::say("occupancy on both");
}

struct Mine {
  CUcontext context;
  CUfunction function;
  CUmodule module;
  CUdeviceptr cell, value;
};

static Mine make(CUdevice device, CUlibrary library, CUkernel kernel) {
  Mine mine = {};
  DRIVER(cuCtxCreate(&mine.context, nullptr, 0, device));
  CUfunction again;
  CUmodule of;
  size_t bytes = 0;
  DRIVER(cuKernelGetFunction(&mine.function, kernel));
  DRIVER(cuKernelGetFunction(&again, kernel));
  DRIVER(cuLibraryGetModule(&mine.module, library));
  DRIVER(cuFuncGetModule(&of, mine.function));
  DRIVER(cuLibraryGetGlobal(&mine.value, &bytes, library, "value"));
  REQUIRE(again == mine.function && of == mine.module && bytes == 4);
  DRIVER(cuMemAlloc(&mine.cell, 4));
  DRIVER(cuMemsetD32(mine.cell, 100, 1));
  return mine;
}

static CUresult launch(CUfunction function, const Mine& mine, unsigned sharedBytes = 16) {
  CUdeviceptr cell = mine.cell;
  void* arguments[] = {&cell};
  return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, sharedBytes, nullptr, arguments, nullptr);
}

static unsigned cellOf(const Mine& mine) {
  unsigned got = 0;
  DRIVER(cuMemcpyDtoH(&got, mine.cell, sizeof got));
  return got;
}

// The driver's own handles: a kernel has a function, and its library a module, in every context.
static void byDriver(int last) {
  CUdevice first, other;
  DRIVER(cuDeviceGet(&first, 0));
  DRIVER(cuDeviceGet(&other, last));
  CUlibrary library;
  CUkernel kernel;
  DRIVER(cuLibraryLoadData(&library, kModule, nullptr, nullptr, 0, nullptr, nullptr, 0));
  DRIVER(cuLibraryGetKernel(&kernel, library, "add"));
  const CUfunction launchable = reinterpret_cast<CUfunction>(kernel);
  const Mine a = make(first, library, kernel), b = make(other, library, kernel);
  REQUIRE(a.function != b.function && a.module != b.module && a.value != b.value);
  check::say("every context has a function, a module and globals of its own");

  const unsigned thousand = 1000;
  for (int round = 0; round < 3; ++round) {
    DRIVER(cuCtxSetCurrent(a.context));
    DRIVER(launch(launchable, a));
    DRIVER(launch(a.function, a));
    DRIVER(cuCtxSetCurrent(b.context));
    DRIVER(cuMemcpyHtoD(b.value, &thousand, sizeof thousand));
    DRIVER(launch(launchable, b));
    DRIVER(launch(b.function, b));
  }
  check::say("in the second: %u", cellOf(b));
  DRIVER(cuCtxSetCurrent(a.context));
  check::say("in the first: %u", cellOf(a));
  REQUIRE(launch(b.function, a) != CUDA_SUCCESS);
  check::say("a function of another context is refused");

  // An attribute set through the kernel counts for its function, and the other way round.
  constexpr auto kLimit = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
  REQUIRE(launch(a.function, a, kLarge) == CUDA_ERROR_INVALID_VALUE);
  DRIVER(cuKernelSetAttribute(kLimit, kLarge, kernel, first));
  DRIVER(launch(launchable, a, kLarge));
  DRIVER(launch(launchable, a, kLarge));
  REQUIRE(cuFuncSetAttribute(launchable, kLimit, kLarge) == CUDA_ERROR_INVALID_HANDLE);
  DRIVER(cuFuncSetAttribute(a.function, kLimit, kLarge));
  DRIVER(launch(a.function, a, kLarge));
  DRIVER(cuFuncSetAttribute(a.function, kLimit, 16));
  int limit = 0;
  DRIVER(cuFuncGetAttribute(&limit, kLimit, a.function));
  REQUIRE(limit == 16);
  REQUIRE(launch(a.function, a, kLarge) == CUDA_ERROR_INVALID_VALUE);
  DRIVER(launch(a.function, a, 16));
  check::say("what is set through one handle shows in launches through the other");
  DRIVER(cuCtxDestroy(a.context));

  // Contexts come and go: nothing of an old one is taken for a new one's.
  DRIVER(cuCtxSetCurrent(b.context));
  DRIVER(launch(b.function, b));
  for (int round = 0; round < 40; ++round) {
    const Mine mine = make(round % 2 ? first : other, library, kernel);
    DRIVER(launch(launchable, mine));
    DRIVER(launch(mine.function, mine));
    REQUIRE(cellOf(mine) == 106);
    CUmodule module;
    CUfunction function;
    DRIVER(cuModuleLoadData(&module, kModule));
    DRIVER(cuModuleGetFunction(&function, module, "add"));
    DRIVER(launch(function, mine));
    if (round % 3 == 0) DRIVER(cuModuleUnload(module));
    REQUIRE(cellOf(mine) == 109);
    DRIVER(cuCtxDestroy(mine.context));
  }
  DRIVER(cuCtxSetCurrent(b.context));
  DRIVER(launch(launchable, b));
  check::say("after forty contexts, in the second: %u", cellOf(b));
  DRIVER(cuLibraryUnload(library));
  DRIVER(cuCtxDestroy(b.context));
}

int main(int argc, char** argv) {
  DRIVER(cuInit(0));
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  REQUIRE(devices >= check::option(argc, argv, "--devices", 1));
  byRuntime(devices - 1);
  byDriver(devices - 1);

  // A device that is reset starts over, the other goes on.
  for (int device : {0, devices - 1}) {
    CUDA(cudaSetDevice(device));
    int* output = nullptr;
    CUDA(cudaMalloc(&output, kThreads * sizeof(int)));
    allow(device, kLarge);
    CUDA(tryLaunch(output, kLarge));
    expectResult(output);
  }
  CUDA(cudaSetDevice(devices - 1));
  CUDA(cudaDeviceReset());
  for (int device : {0, devices - 1}) {
    allow(device, kLarge);
    int* output = nullptr;
    CUDA(cudaMalloc(&output, kThreads * sizeof(int)));
    CUDA(tryLaunch(output, kLarge));
    expectResult(output);
  }
  check::say("after a reset of the last device");
  return check::pass();
}
