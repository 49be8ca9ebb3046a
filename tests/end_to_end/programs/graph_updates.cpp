// An executable graph whose nodes are given new parameters before each launch, as XLA does with its command
// buffers: kernels, and a graph inside. What the driver refuses is refused at that call, also after many
// settings that it has accepted.
#include "driver_check.h"

static const char kCode[] = R"(
.version 7.0
.target sm_60
.address_size 64
.visible .entry addTo(.param .u64 at, .param .u32 by)
{
  .reg .b64 %at;
  .reg .b32 %by, %old;
  ld.param.u64 %at, [at];
  ld.param.u32 %by, [by];
  atom.global.add.u32 %old, [%at], %by;
  ret;
}
.visible .entry multiply(.param .u64 at, .param .u32 by)
{
  .reg .b64 %at;
  .reg .b32 %by, %old;
  ld.param.u64 %at, [at];
  ld.param.u32 %by, [by];
  ld.global.u32 %old, [%at];
  mul.lo.u32 %old, %old, %by;
  st.global.u32 [%at], %old;
  ret;
}
)";
constexpr int kTurns = 300;
constexpr int kNodes = 3;

static CUfunction addTo, multiply;
static CUstream stream;

struct Kernel {
  CUdeviceptr at;
  unsigned by;
  void* arguments[2] = {&at, &by};
  CUDA_KERNEL_NODE_PARAMS params{};

  Kernel(CUfunction function, CUdeviceptr to, unsigned with, unsigned threads = 1, unsigned shared = 0)
      : at(to), by(with) {
    params.func = function;
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1;
    params.blockDimX = threads;
    params.sharedMemBytes = shared;
    params.kernelParams = arguments;
  }
};

static unsigned valueAt(CUdeviceptr at) {
  unsigned now = 0;
  DRIVER(cuMemcpyDtoH(&now, at, sizeof now));
  return now;
}

int main() {
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUdeviceptr values;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));
  DRIVER(cuModuleLoadData(&module, kCode));
  DRIVER(cuModuleGetFunction(&addTo, module, "addTo"));
  DRIVER(cuModuleGetFunction(&multiply, module, "multiply"));
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  DRIVER(cuMemAlloc(&values, 4096));
  DRIVER(cuMemsetD8(values, 0, 4096));

  // Three additions to one value, one after the other, and a graph inside that multiplies another one.
  CUgraph graph, child;
  CUgraphNode nodes[kNodes], inner, step;
  DRIVER(cuGraphCreate(&graph, 0));
  for (int i = 0; i < kNodes; ++i) {
    Kernel kernel(addTo, values, 0);
    DRIVER(cuGraphAddKernelNode(&nodes[i], graph, i == 0 ? nullptr : &nodes[i - 1], i == 0 ? 0 : 1,
                                &kernel.params));
  }
  DRIVER(cuGraphCreate(&child, 0));
  Kernel doubled(multiply, values + 64, 2);
  DRIVER(cuGraphAddKernelNode(&step, child, nullptr, 0, &doubled.params));
  DRIVER(cuGraphAddChildGraphNode(&inner, graph, &nodes[kNodes - 1], 1, child));
  CUgraphExec exec;
  DRIVER(cuGraphInstantiate(&exec, graph, 0));

  DRIVER(cuMemsetD32(values + 64, 1, 1));
  unsigned expected[8] = {};
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int i = 0; i < kNodes; ++i) {
      const unsigned by = static_cast<unsigned>(turn * kNodes + i);
      Kernel kernel(addTo, values + 4 * (by % 8), by);
      expected[by % 8] += by;
      DRIVER(cuGraphExecKernelNodeSetParams(exec, nodes[i], &kernel.params));
    }
    DRIVER(cuGraphExecChildGraphNodeSetParams(exec, inner, child));
    DRIVER(cuGraphLaunch(exec, stream));
    if (turn == 9) {
      DRIVER(cuStreamSynchronize(stream));
      check::say("inside: %u", valueAt(values + 64));
      Kernel tripled(multiply, values + 64, 3);
      DRIVER(cuGraphKernelNodeSetParams(step, &tripled.params));  // from now on, once the node has it again
    }
    if (turn == 10) {
      DRIVER(cuStreamSynchronize(stream));
      check::say("inside: %u", valueAt(values + 64));
    }
  }
  DRIVER(cuStreamSynchronize(stream));
  for (int i = 0; i < 8; ++i) REQUIRE(valueAt(values + 4 * static_cast<unsigned>(i)) == expected[i]);
  check::say("%d turns: each addition counts, where its turn has it", kTurns);

  Kernel wide(addTo, values, 1, 2048), shared(addTo, values, 1, 1, 60 << 10), good(addTo, values, 1);
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuGraphExecKernelNodeSetParams(exec, nodes[0], &wide.params));
  DRIVER(cuGraphExecKernelNodeSetParams(exec, nodes[0], &good.params));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuGraphExecKernelNodeSetParams(exec, nodes[0], &shared.params));
  DRIVER(cuFuncSetAttribute(addTo, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 64 << 10));
  for (int i = 0; i < 3; ++i) DRIVER(cuGraphExecKernelNodeSetParams(exec, nodes[0], &shared.params));
  DRIVER(cuFuncSetAttribute(addTo, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 48 << 10));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuGraphExecKernelNodeSetParams(exec, nodes[0], &shared.params));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuGraphExecKernelNodeSetParams(exec, inner, &good.params));
  DRIVER(cuGraphExecKernelNodeSetParams(exec, nodes[0], &good.params));
  DRIVER(cuGraphLaunch(exec, stream));
  DRIVER(cuStreamSynchronize(stream));
  DRIVER(cuGraphExecDestroy(exec));
  DRIVER(cuGraphDestroy(graph));
  DRIVER(cuGraphDestroy(child));
  return check::pass();
}
