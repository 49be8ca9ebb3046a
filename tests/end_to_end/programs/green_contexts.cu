// Green contexts: two parts of a device with kernels in each, their streams and events, a green context that
// is current, what is refused, and what is left when one is destroyed.
#include <thread>

#include "driver_check.h"

namespace {

constexpr int kCount = 5000, kThreads = 128, kBlocks = (kCount + kThreads - 1) / kThreads;

__global__ void scale(int* values, int by) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) values[i] *= by;
}
__global__ void add(int* to, const int* from) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) to[i] += from[i];
}
// Keeps its stream busy for a while.
__global__ void spin(int* values, int rounds) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= kCount) return;
  unsigned x = static_cast<unsigned>(values[i]);
  for (int round = 0; round < rounds; ++round) x = x * 1664525u + 1013904223u;
  values[i] = x == 0 ? 5 : 4;
}

template <typename... A>
void launch(CUstream stream, void (*kernel)(A...), A... arguments) {
  kernel<<<kBlocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(arguments...);
  CUDA(cudaGetLastError());
}

void every(const char* what, const int* device, int expected) {
  std::vector<int> values(kCount);
  CUDA(cudaMemcpy(values.data(), device, kCount * sizeof(int), cudaMemcpyDeviceToHost));
  check::same(what, values, std::vector<int>(kCount, expected));
}

// A small copy of pageable memory is on its way still when it returns, and no stream here waits for it.
int* filled(int value) {
  int* memory = nullptr;
  const std::vector<int> values(kCount, value);
  CUDA(cudaMalloc(&memory, kCount * sizeof(int)));
  CUDA(cudaMemcpy(memory, values.data(), kCount * sizeof(int), cudaMemcpyHostToDevice));
  CUDA(cudaStreamSynchronize(nullptr));
  return memory;
}

struct Part {
  CUdevResource resource = {};
  CUgreenCtx green = nullptr;
  CUcontext context = nullptr;
  CUstream stream = nullptr, second = nullptr;
};

CUdevResource ofDevice(CUdevice device) {
  CUdevResource all = {};
  DRIVER(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
  return all;
}

// Into two parts of the least size, and what remains.
void split(CUdevice device, Part (&parts)[2]) {
  const CUdevResource all = ofDevice(device);
  int count = 0;
  DRIVER(cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
  REQUIRE(all.type == CU_DEV_RESOURCE_TYPE_SM && all.sm.smCount == static_cast<unsigned>(count));
  REQUIRE(all.sm.minSmPartitionSize > 0 && all.sm.smCoscheduledAlignment > 0);
  const unsigned least = all.sm.minSmPartitionSize;
  unsigned groups = 0;
  DRIVER(cuDevSmResourceSplitByCount(nullptr, &groups, &all, nullptr, 0, least));
  REQUIRE(groups >= 2);
  CUdevResource made[2] = {}, rest = {};
  groups = 2;
  DRIVER(cuDevSmResourceSplitByCount(made, &groups, &all, &rest, 0, least));
  REQUIRE(groups == 2);
  unsigned sum = rest.type == CU_DEV_RESOURCE_TYPE_SM ? rest.sm.smCount : 0;
  for (const CUdevResource& part : made) {
    REQUIRE(part.type == CU_DEV_RESOURCE_TYPE_SM && part.sm.smCount >= least);
    REQUIRE(part.sm.smCount == made[0].sm.smCount);
    sum += part.sm.smCount;
  }
  REQUIRE(sum == all.sm.smCount);
  parts[0].resource = made[0];
  parts[1].resource = made[1];
  check::say("two equal parts of the device, and what remains");
}

void create(CUdevice device, CUcontext primary, Part (&parts)[2]) {
  for (Part& part : parts) {
    CUdevResourceDesc description = nullptr;
    DRIVER(cuDevResourceGenerateDesc(&description, &part.resource, 1));
    DRIVER(cuGreenCtxCreate(&part.green, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
    DRIVER(cuCtxFromGreenCtx(&part.context, part.green));
    DRIVER(cuGreenCtxStreamCreate(&part.stream, part.green, CU_STREAM_NON_BLOCKING, 0));
    DRIVER(cuGreenCtxStreamCreate(&part.second, part.green, CU_STREAM_NON_BLOCKING, 0));
    CUdevResource has = {}, same = {};
    DRIVER(cuGreenCtxGetDevResource(part.green, &has, CU_DEV_RESOURCE_TYPE_SM));
    DRIVER(cuCtxGetDevResource(part.context, &same, CU_DEV_RESOURCE_TYPE_SM));
    REQUIRE(has.sm.smCount == part.resource.sm.smCount && same.sm.smCount == has.sm.smCount);
    CUgreenCtx green = nullptr;
    CUcontext context = nullptr, both = nullptr;
    DRIVER(cuStreamGetGreenCtx(part.stream, &green));
    REQUIRE(green == part.green);
    DRIVER(cuStreamGetCtx(part.stream, &context));
    REQUIRE(context == part.context);
    DRIVER(cuStreamGetCtx_v2(part.stream, &both, &green));
    REQUIRE(both == primary && green == part.green);
    unsigned flags = 0;
    DRIVER(cuStreamGetFlags(part.stream, &flags));
    REQUIRE(flags == CU_STREAM_NON_BLOCKING);
  }
  int least = 0, greatest = 0, priority = 0;
  CUstream urgent = nullptr;
  DRIVER(cuCtxGetStreamPriorityRange(&least, &greatest));
  DRIVER(cuGreenCtxStreamCreate(&urgent, parts[0].green, CU_STREAM_NON_BLOCKING, greatest - 7));
  DRIVER(cuStreamGetPriority(urgent, &priority));
  REQUIRE(priority == greatest);
  DRIVER(cuStreamDestroy(urgent));
  unsigned long long first = 0, second = 0;
  DRIVER(cuGreenCtxGetId(parts[0].green, &first));
  DRIVER(cuGreenCtxGetId(parts[1].green, &second));
  REQUIRE(first != second && parts[0].context != parts[1].context && parts[0].context != primary);
  CUdevResource all = {};
  DRIVER(cuCtxGetDevResource(primary, &all, CU_DEV_RESOURCE_TYPE_SM));
  REQUIRE(all.sm.smCount == ofDevice(device).sm.smCount);
  CUgreenCtx none = parts[0].green;
  DRIVER(cuStreamGetGreenCtx(nullptr, &none));
  REQUIRE(none == nullptr);
  check::say("two green contexts, which have these parts");
}

// A green context keeps the primary context.
void alone(CUdevice device) {
  const auto active = [&] {
    unsigned flags = 0;
    int is = -1;
    DRIVER(cuDevicePrimaryCtxGetState(device, &flags, &is));
    return is;
  };
  REQUIRE(active() == 0);
  CUdevResource all = ofDevice(device);
  CUdevResourceDesc description = nullptr;
  CUgreenCtx green = nullptr;
  DRIVER(cuDevResourceGenerateDesc(&description, &all, 1));
  DRIVER(cuGreenCtxCreate(&green, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
  REQUIRE(active() == 1);
  DRIVER(cuGreenCtxDestroy(green));
  REQUIRE(active() == 0);
  check::say("a green context retains the primary context, and releases it");
}

// Kernels in both parts, and events between their streams.
void work(CUcontext primary, Part (&parts)[2]) {
  int *a = filled(3), *b = filled(10);
  CUevent done = nullptr;
  DRIVER(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
  launch(parts[0].stream, spin, a, 2000);
  launch(parts[0].stream, scale, a, 5);
  launch(parts[1].stream, scale, b, 2);
  DRIVER(cuEventRecord(done, parts[0].stream));
  DRIVER(cuStreamWaitEvent(parts[1].stream, done, 0));
  launch(parts[1].stream, add, b, const_cast<const int*>(a));
  DRIVER(cuStreamSynchronize(parts[1].stream));
  every("one part's kernel behind the other's", b, 40);
  // An event of all that one part does, and all of the other waits for it, in a stream that comes later, too.
  launch(parts[0].stream, spin, a, 2000);
  launch(parts[0].second, spin, b, 2000);
  DRIVER(cuGreenCtxRecordEvent(parts[0].green, done));
  DRIVER(cuGreenCtxWaitEvent(parts[1].green, done));
  CUstream later = nullptr;
  DRIVER(cuGreenCtxStreamCreate(&later, parts[1].green, CU_STREAM_NON_BLOCKING, 0));
  launch(parts[1].stream, scale, a, 7);
  launch(later, scale, b, 9);
  DRIVER(cuStreamSynchronize(parts[1].stream));
  DRIVER(cuStreamSynchronize(later));
  DRIVER(cuEventSynchronize(done));
  every("behind all of a green context", a, 28);
  every("in a stream that came later", b, 36);
  // The primary context's events are of both parts, and of a stream that has ended.
  launch(parts[0].stream, spin, a, 2000);
  launch(later, spin, b, 2000);
  DRIVER(cuStreamDestroy(later));
  DRIVER(cuCtxRecordEvent(primary, done));
  DRIVER(cuCtxWaitEvent(parts[1].context, done));
  launch(parts[1].second, scale, b, 3);
  launch(parts[1].second, add, b, const_cast<const int*>(a));
  DRIVER(cuCtxRecordEvent(parts[1].context, done));
  DRIVER(cuCtxWaitEvent(primary, done));
  launch(nullptr, scale, b, 2);
  every("behind all of the primary context", b, 32);
  DRIVER(cuEventDestroy(done));
  CUDA(cudaFree(a));
  CUDA(cudaFree(b));
}

// As PyTorch does it: the green context's default stream, with events from and to the stream of before.
void current(CUcontext primary, Part& part) {
  int* values = filled(6);
  cudaStream_t outer;
  CUDA(cudaStreamCreateWithFlags(&outer, cudaStreamNonBlocking));
  cudaEvent_t event;
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  launch(outer, scale, values, 2);
  CUDA(cudaEventRecord(event, outer));
  DRIVER(cuCtxPushCurrent(part.context));
  CUcontext context = nullptr;
  CUgreenCtx green = nullptr;
  DRIVER(cuCtxGetCurrent(&context));
  REQUIRE(context == part.context);
  CUdevice device = -1;
  DRIVER(cuCtxGetDevice(&device));
  REQUIRE(device == 0);
  DRIVER(cuStreamGetCtx_v2(nullptr, &context, &green));
  REQUIRE(context == primary && green == part.green);
  REQUIRE(cuStreamGetCtx_v2(CU_STREAM_PER_THREAD, &context, &green) == CUDA_ERROR_INVALID_HANDLE);
  CUDA(cudaStreamWaitEvent(nullptr, event, 0));
  launch(nullptr, scale, values, 3);
  int* more = filled(1);
  launch(nullptr, add, values, const_cast<const int*>(more));
  CUstream made = nullptr;
  DRIVER(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
  DRIVER(cuStreamGetGreenCtx(made, &green));
  REQUIRE(green == part.green);
  DRIVER(cuStreamDestroy(made));
  CUDA(cudaEventRecord(event, nullptr));
  DRIVER(cuCtxSynchronize());
  DRIVER(cuCtxPopCurrent(&context));
  REQUIRE(context == part.context);
  CUDA(cudaStreamWaitEvent(outer, event, 0));
  launch(outer, scale, values, 2);
  CUDA(cudaStreamSynchronize(outer));
  every("with a green context current, and back", values, 74);
  CUDA(cudaEventDestroy(event));
  CUDA(cudaStreamDestroy(outer));
  CUDA(cudaFree(values));
  CUDA(cudaFree(more));
}

// Each part current in a thread of its own.
void threads(Part (&parts)[2]) {
  int result[2] = {};
  const auto body = [&](int which) {
    DRIVER(cuCtxPushCurrent(parts[which].context));
    int* values = filled(which);
    int* one = filled(1);
    for (int i = 0; i < 100; ++i) launch(nullptr, add, values, const_cast<const int*>(one));
    CUDA(cudaStreamSynchronize(nullptr));
    CUDA(cudaMemcpy(&result[which], values, sizeof(int), cudaMemcpyDeviceToHost));
    CUDA(cudaFree(values));
    CUDA(cudaFree(one));
    CUcontext context = nullptr;
    DRIVER(cuCtxPopCurrent(&context));
  };
  std::thread first(body, 0), second(body, 1);
  first.join();
  second.join();
  REQUIRE(result[0] == 100 && result[1] == 101);
  check::say("two threads, each with its own part current");
}

// Nodes that are added while a green context is current, and for it.
void nodes(Part& part) {
  int *values = filled(5), *copy = filled(0);
  DRIVER(cuCtxPushCurrent(part.context));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaGraphNode_t kernel, second;
  int by = 4;
  void* arguments[] = {&values, &by};
  cudaKernelNodeParams parameters = {};
  parameters.func = reinterpret_cast<void*>(scale);
  parameters.gridDim = dim3(kBlocks);
  parameters.blockDim = dim3(kThreads);
  parameters.kernelParams = arguments;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphAddKernelNode(&kernel, graph, nullptr, 0, &parameters));
  CUDA(cudaGraphAddMemcpyNode1D(&second, graph, &kernel, 1, copy, values, kCount * sizeof(int),
                                cudaMemcpyDeviceToDevice));
  CUDA_MEMSET_NODE_PARAMS fill = {};
  fill.dst = reinterpret_cast<CUdeviceptr>(values);
  fill.elementSize = 4;
  fill.width = kCount;
  fill.height = 1;
  fill.value = 2;
  CUgraphNode third = nullptr;
  DRIVER(cuGraphAddMemsetNode(&third, reinterpret_cast<CUgraph>(graph),
                              reinterpret_cast<CUgraphNode*>(&second), 1, &fill, part.context));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaGraphLaunch(exec, reinterpret_cast<cudaStream_t>(part.stream)));
  CUDA(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(part.stream)));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUcontext context = nullptr;
  DRIVER(cuCtxPopCurrent(&context));
  every("nodes of a green context, a copy behind a kernel", copy, 20);
  every("and a fill behind the copy", values, 2);
  CUDA(cudaFree(values));
  CUDA(cudaFree(copy));
}

void captured(Part& part) {
  int* values = filled(2);
  CUevent event = nullptr;
  DRIVER(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  DRIVER(cuStreamBeginCapture(part.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  launch(part.stream, scale, values, 3);
  launch(part.stream, scale, values, 5);
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  DRIVER(cuStreamEndCapture(part.stream, &graph));
  DRIVER(cuGraphInstantiate(&exec, graph, 0));
  DRIVER(cuGraphLaunch(exec, part.stream));
  DRIVER(cuGraphLaunch(exec, part.stream));
  DRIVER(cuStreamSynchronize(part.stream));
  every("a graph that was captured there", values, 450);
  DRIVER(cuGraphExecDestroy(exec));
  DRIVER(cuGraphDestroy(graph));
  // What needs all of the green context's work invalidates a capture in it.
  DRIVER(cuStreamBeginCapture(part.stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  const CUresult refused = cuGreenCtxRecordEvent(part.green, event);
  check::say("an event of a green context that captures: %s", check::resultName(refused));
  REQUIRE(cuStreamEndCapture(part.stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  DRIVER(cuEventDestroy(event));
  CUDA(cudaFree(values));
}

void refused(const char* what, CUresult status) { check::say("%s: %s", what, check::resultName(status)); }

void errors(CUdevice device, Part (&parts)[2]) {
  const CUdevResource all = ofDevice(device);
  CUdevResource resource = {}, made[2] = {};
  refused("no such device", cuDeviceGetDevResource(99, &resource, CU_DEV_RESOURCE_TYPE_SM));
  refused("no such type", cuDeviceGetDevResource(device, &resource, CU_DEV_RESOURCE_TYPE_INVALID));
  unsigned count = 1;
  refused("nothing to split", cuDevSmResourceSplitByCount(made, &count, &resource, nullptr, 0, 1));
  REQUIRE(cuDevSmResourceSplitByCount(made, &count, &all, nullptr, 0, all.sm.smCount + 1) != CUDA_SUCCESS);
  count = 1;
  DRIVER(cuDevSmResourceSplitByCount(made, &count, &all, nullptr, 0, all.sm.minSmPartitionSize));
  made[1] = parts[1].resource;
  CUdevResourceDesc description = nullptr;
  // A part that another call has made will do.
  DRIVER(cuDevResourceGenerateDesc(&description, made, 2));
  DRIVER(cuDevResourceGenerateDesc(&description, made, 1));
  CUgreenCtx green = nullptr;
  refused("no default stream", cuGreenCtxCreate(&green, description, device, 0));
  refused("a context of no device", cuGreenCtxCreate(&green, description, 99, CU_GREEN_CTX_DEFAULT_STREAM));
  CUstream stream = nullptr;
  refused("a blocking stream", cuGreenCtxStreamCreate(&stream, parts[0].green, CU_STREAM_DEFAULT, 0));
  // Parts of one split together, which can then be split again.
  count = 2;
  DRIVER(cuDevSmResourceSplitByCount(made, &count, &all, nullptr, 0, all.sm.minSmPartitionSize));
  DRIVER(cuDevResourceGenerateDesc(&description, made, 2));
  DRIVER(cuGreenCtxCreate(&green, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
  DRIVER(cuGreenCtxGetDevResource(green, &resource, CU_DEV_RESOURCE_TYPE_SM));
  REQUIRE(resource.sm.smCount == made[0].sm.smCount + made[1].sm.smCount);
  count = 1;
  DRIVER(cuDevSmResourceSplitByCount(made, &count, &resource, nullptr, 0, resource.sm.minSmPartitionSize));
  CUgreenCtx inner = nullptr;
  DRIVER(cuDevResourceGenerateDesc(&description, made, 1));
  DRIVER(cuGreenCtxCreate(&inner, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
  DRIVER(cuGreenCtxStreamCreate(&stream, inner, CU_STREAM_NON_BLOCKING, 0));
  int* values = filled(4);
  launch(stream, scale, values, 4);
  DRIVER(cuStreamSynchronize(stream));
  every("a part of a green context's part", values, 16);
  CUDA(cudaFree(values));
  DRIVER(cuStreamDestroy(stream));
  DRIVER(cuGreenCtxDestroy(inner));
  DRIVER(cuGreenCtxDestroy(green));
}

// A stream that was not destroyed before.
void destroy(Part (&parts)[2]) {
  int* values = filled(9);
  DRIVER(cuStreamDestroy(parts[0].second));
  DRIVER(cuGreenCtxDestroy(parts[0].green));
  refused("a query in a green context that is no more", cuStreamQuery(parts[0].stream));
  refused("the end of its stream", cuStreamDestroy(parts[0].stream));
  launch(parts[1].stream, scale, values, 3);
  DRIVER(cuStreamSynchronize(parts[1].stream));
  every("the other green context", values, 27);
  DRIVER(cuStreamDestroy(parts[1].stream));
  DRIVER(cuStreamDestroy(parts[1].second));
  DRIVER(cuGreenCtxDestroy(parts[1].green));
  launch(nullptr, scale, values, 2);
  every("the device without them", values, 54);
  CUDA(cudaFree(values));
}

}  // namespace

int main() {
  CUdevice device = 0;
  CUcontext primary = nullptr;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  alone(device);
  CUDA(cudaSetDevice(0));
  CUDA(cudaFree(nullptr));
  DRIVER(cuCtxGetCurrent(&primary));
  Part parts[2];
  split(device, parts);
  create(device, primary, parts);
  work(primary, parts);
  current(primary, parts[1]);
  threads(parts);
  nodes(parts[1]);
  captured(parts[0]);
  errors(device, parts);
  destroy(parts);
  return check::pass();
}
