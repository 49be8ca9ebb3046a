// Many launches of few shapes: with packed parameters, as NCCL launches, and with attributes whose unused
// bytes are whatever the stack had. Every one counts, and a packed buffer of another size is judged like the
// first time.
#include <cstddef>
#include <cstring>

#include "driver_check.h"

static const char kCode[] = R"(
.version 7.0
.target sm_60
.address_size 64
.visible .entry count(.param .u64 at, .param .u32 by)
{
  .reg .b64 %at;
  .reg .b32 %by, %old;
  ld.param.u64 %at, [at];
  ld.param.u32 %by, [by];
  atom.global.add.u32 %old, [%at], %by;
  ret;
}
)";

struct Packed {
  CUdeviceptr at;
  unsigned by;
};
constexpr size_t kPackedBytes = offsetof(Packed, by) + sizeof(unsigned);
constexpr int kLaunches = 500;

static CUresult launch(CUfunction function, CUstream stream, Packed packed, size_t bytes, int garbage,
                       bool separate) {
  CUlaunchAttribute attribute;
  std::memset(&attribute, garbage, sizeof attribute);
  attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  attribute.value.priority = 0;
  CUlaunchConfig config{};
  config.gridDimX = 2;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = 32;
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  void* arguments[] = {&packed.at, &packed.by};
  return cuLaunchKernelEx(&config, function, separate ? arguments : nullptr, separate ? nullptr : extra);
}

int main() {
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction function;
  CUstream stream;
  CUdeviceptr counter;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));
  DRIVER(cuModuleLoadData(&module, kCode));
  DRIVER(cuModuleGetFunction(&function, module, "count"));
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  DRIVER(cuMemAlloc(&counter, sizeof(unsigned)));
  for (const bool separate : {false, true}) {
    const CUresult before = launch(function, stream, {counter, 0}, kPackedBytes - 4, 1, false);
    DRIVER(cuMemsetD32Async(counter, 0, 1, stream));
    unsigned expected = 0, got = 0;
    for (int i = 0; i < kLaunches; ++i) {
      DRIVER(launch(function, stream, {counter, static_cast<unsigned>(i)}, kPackedBytes, i, separate));
      expected += 64 * i;
    }
    DRIVER(cuMemcpyDtoHAsync(&got, counter, sizeof got, stream));
    DRIVER(cuStreamSynchronize(stream));
    REQUIRE(got == expected);
    REQUIRE(launch(function, stream, {counter, 0}, kPackedBytes - 4, 1, false) == before);
    DRIVER(cuStreamSynchronize(stream));
    check::say("%d launches with %s parameters: %u", kLaunches, separate ? "separate" : "packed", got);
  }
  DRIVER(cuDevicePrimaryCtxRelease(device));
  return check::pass();
}
