// Several contexts in one process: two made by the driver API beside the primary one, on the first and the
// last device; each has its own modules, memory and streams. With --devices 2 a second device must be there.
#include "driver_check.h"

static const char* const kModule = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 base = 5;
.visible .entry addBase(.param .u64 values, .param .u32 count)
{
  .reg .pred %p<2>;
  .reg .b32 %r<8>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [values];
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra done;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.u32 %rd3, %r5, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.u32 %r6, [%rd4];
  ld.global.u32 %r7, [base];
  add.u32 %r6, %r6, %r7;
  st.global.u32 [%rd4], %r6;
done:
  ret;
}
)";

__global__ void twice(int* values, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] *= 2;
}

constexpr int kCount = 1000;

struct Mine {
  CUcontext context;
  CUmodule module;
  CUfunction addBase;
  CUdeviceptr values, base;
};

static Mine make(CUdevice device, int base) {
  Mine mine = {};
  DRIVER(cuCtxCreate(&mine.context, nullptr, 0, device));
  DRIVER(cuModuleLoadData(&mine.module, kModule));
  DRIVER(cuModuleGetFunction(&mine.addBase, mine.module, "addBase"));
  size_t size = 0;
  DRIVER(cuModuleGetGlobal(&mine.base, &size, mine.module, "base"));
  REQUIRE(size == 4);
  DRIVER(cuMemcpyHtoD(mine.base, &base, sizeof base));
  DRIVER(cuMemAlloc(&mine.values, kCount * sizeof(int)));
  DRIVER(cuMemsetD32(mine.values, 100, kCount));
  CUcontext popped = nullptr;
  DRIVER(cuCtxPopCurrent(&popped));
  REQUIRE(popped == mine.context);
  return mine;
}

static int runIn(const Mine& mine) {
  DRIVER(cuCtxPushCurrent(mine.context));
  int count = kCount, result[kCount];
  CUdeviceptr values = mine.values;
  void* arguments[] = {&values, &count};
  DRIVER(cuLaunchKernel(mine.addBase, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
  DRIVER(cuMemcpyDtoH(result, mine.values, sizeof result));
  CUcontext popped;
  DRIVER(cuCtxPopCurrent(&popped));
  for (int value : result) REQUIRE(value == result[0]);
  return result[0];
}

int main(int argc, char** argv) {
  DRIVER(cuInit(0));
  int devices = 0;
  DRIVER(cuDeviceGetCount(&devices));
  REQUIRE(devices >= check::option(argc, argv, "--devices", 1));
  CUdevice first, last;
  DRIVER(cuDeviceGet(&first, 0));
  DRIVER(cuDeviceGet(&last, devices - 1));
  CUcontext current = reinterpret_cast<CUcontext>(1);
  DRIVER(cuCtxGetCurrent(&current));
  REQUIRE(current == nullptr);

  const Mine a = make(first, 7), b = make(last, 1000);
  REQUIRE(a.context != b.context);
  check::say("first context: %d", runIn(a));
  check::say("second context: %d", runIn(b));
  check::say("first again: %d", runIn(a));

  // The runtime takes the primary context, which is another one again, and knows nothing of those two.
  CUDA(cudaSetDevice(0));
  std::vector<int> ones(kCount, 21);
  {
    check::Device<int> values(ones);
    twice<<<8, 128>>>(values, kCount);
    check::same("primary context", values.read(), std::vector<int>(kCount, 42));
    DRIVER(cuCtxGetCurrent(&current));
    CUcontext primary;
    DRIVER(cuDevicePrimaryCtxRetain(&primary, first));
    REQUIRE(current == primary && primary != a.context && primary != b.context);
    CUdevice device = -1;
    DRIVER(cuCtxGetDevice(&device));
    REQUIRE(device == first);
    unsigned flags, active = 0;
    DRIVER(cuDevicePrimaryCtxGetState(first, &flags, reinterpret_cast<int*>(&active)));
    REQUIRE(active == 1);

    // The runtime follows whatever context is current.
    DRIVER(cuCtxSetCurrent(b.context));
    DRIVER(cuMemsetD32(b.values, 3, kCount));
    twice<<<8, 128>>>(reinterpret_cast<int*>(b.values), kCount);
    CUDA(cudaDeviceSynchronize());
    check::say("runtime in the second context, then its module: %d", runIn(b));
    DRIVER(cuCtxSetCurrent(primary));
    DRIVER(cuDevicePrimaryCtxRelease(first));
  }
  // Copies between contexts.
  DRIVER(cuMemcpyPeer(a.values, a.context, b.values, b.context, kCount * sizeof(int)));
  check::say("copied from the second, first context adds: %d", runIn(a));

  // Device by device through the runtime, the last one may be the first.
  for (int device : {0, devices - 1}) {
    CUDA(cudaSetDevice(device));
    check::Device<int> values(std::vector<int>(kCount, 5));
    twice<<<8, 128>>>(values, kCount);
    check::same("a device by the runtime", values.read(), std::vector<int>(kCount, 10));
    int got = -1;
    CUDA(cudaGetDevice(&got));
    REQUIRE(got == device);
  }
  CUDA_GIVES(cudaErrorInvalidDevice, cudaSetDevice(devices));
  cudaGetLastError();
  DRIVER(cuCtxDestroy(a.context));
  DRIVER_GIVES(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&first, devices));
  DRIVER(cuCtxDestroy(b.context));
  return check::pass();
}
