// Graphs through the driver API: captured nodes read back, host functions between copies, clones and updates,
// allocation nodes, the generic calls, capture into an existing graph, and what a capture answers meanwhile.
#include "driver_check.h"

static const char* const kPtx = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry addTo(.param .u64 where, .param .u32 amount) {
  .reg .u64 %p; .reg .u32 %a, %b;
  ld.param.u64 %p, [where];
  ld.param.u32 %a, [amount];
  ld.global.u32 %b, [%p];
  add.u32 %b, %b, %a;
  st.global.u32 [%p], %b;
  ret;
}
)";

static CUcontext context;
static CUstream stream, other;
static CUfunction addTo;
static CUdeviceptr value;
static int input[16];  // ordinary memory: its nodes copy when the graph runs
static int* output;    // pinned
constexpr int kOutputs = 64;
static int hostCalls, seen;

static void CUDA_CB lookAndDouble(void*) {
  ++hostCalls;
  seen = output[0];
  output[0] *= 2;
}

static void launch(unsigned amount) {
  void* arguments[] = {&value, &amount};
  DRIVER(cuLaunchKernel(addTo, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
}

static std::vector<CUgraphNode> nodesOf(CUgraph graph) {
  size_t count = 0;
  DRIVER(cuGraphGetNodes(graph, nullptr, &count));
  std::vector<CUgraphNode> nodes(count);
  DRIVER(cuGraphGetNodes(graph, nodes.data(), &count));
  return nodes;
}

static void setUp() {
  CUdevice device;
  CUmodule module;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));
  DRIVER(cuModuleLoadData(&module, kPtx));
  DRIVER(cuModuleGetFunction(&addTo, module, "addTo"));
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  DRIVER(cuStreamCreate(&other, CU_STREAM_DEFAULT));
  DRIVER(cuMemAlloc(&value, 4096));
  DRIVER(cuMemHostAlloc(reinterpret_cast<void**>(&output), kOutputs * sizeof(int), 0));
}

// input -> value, + 5, + 7, value -> output, the host doubles it, output -> value
static CUgraph captureAll() {
  CUgraph graph;
  DRIVER(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  DRIVER(cuMemcpyHtoDAsync(value, input, sizeof input, stream));
  launch(5);
  launch(7);
  DRIVER(cuMemcpyDtoHAsync(output, value, sizeof input, stream));
  DRIVER(cuLaunchHostFunc(stream, lookAndDouble, nullptr));
  DRIVER(cuMemcpyHtoDAsync(value, output, sizeof(int), stream));
  DRIVER(cuStreamEndCapture(stream, &graph));
  return graph;
}

static void inspect(CUgraph graph) {
  for (CUgraphNode node : nodesOf(graph)) {
    CUgraphNodeType type;
    DRIVER(cuGraphNodeGetType(node, &type));
    if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
      CUDA_KERNEL_NODE_PARAMS kernel;
      DRIVER(cuGraphKernelNodeGetParams(node, &kernel));
      REQUIRE(kernel.func == addTo && kernel.ctx == context && kernel.extra == nullptr);
      check::say("a kernel adds %d", *static_cast<int*>(kernel.kernelParams[1]));
    } else if (type == CU_GRAPH_NODE_TYPE_MEMCPY) {
      CUDA_MEMCPY3D copy;
      DRIVER(cuGraphMemcpyNodeGetParams(node, &copy));
      const bool up = copy.srcMemoryType == CU_MEMORYTYPE_HOST;
      const void* host = up ? copy.srcHost : copy.dstHost;
      REQUIRE(host == input || host == output);
      check::say("a copy %s of %zu bytes, %s", up ? "up" : "down", copy.WidthInBytes,
                 host == input ? "input" : "output");
    } else {
      CUDA_HOST_NODE_PARAMS host;
      DRIVER(cuGraphHostNodeGetParams(node, &host));
      REQUIRE(host.fn == lookAndDouble);
      check::say("a host function");
    }
  }
}

static int valueNow() {
  int now = 0;
  DRIVER(cuMemcpyDtoH(&now, value, sizeof now));
  return now;
}

static void captured() {
  CUgraph graph = captureAll(), clone;
  inspect(graph);
  CUgraphExec exec;
  DRIVER(cuGraphInstantiate(&exec, graph, 0));
  for (int round = 1; round <= 3; ++round) {
    input[0] = 100 * round;
    DRIVER(cuGraphLaunch(exec, stream));
    DRIVER(cuStreamSynchronize(stream));
    check::say("round %d: the host saw %d, the device has %d", round, seen, valueNow());
    REQUIRE(hostCalls == round && seen == 100 * round + 12 && valueNow() == 2 * seen);
  }
  DRIVER(cuGraphClone(&clone, graph));
  CUgraphNode found;
  DRIVER(cuGraphNodeFindInClone(&found, nodesOf(graph)[1], clone));
  CUDA_KERNEL_NODE_PARAMS kernel;
  DRIVER(cuGraphKernelNodeGetParams(found, &kernel));
  unsigned nine = 9;
  void* arguments[] = {&value, &nine};
  kernel.kernelParams = arguments;
  DRIVER(cuGraphKernelNodeSetParams(found, &kernel));
  DRIVER(cuGraphKernelNodeGetParams(found, &kernel));
  REQUIRE(*static_cast<unsigned*>(kernel.kernelParams[1]) == 9);
  CUgraphExecUpdateResultInfo info;
  DRIVER(cuGraphExecUpdate(exec, clone, &info));
  DRIVER(cuGraphDestroy(clone));
  DRIVER(cuGraphDestroy(graph));
  input[0] = 1;
  DRIVER(cuGraphLaunch(exec, stream));
  DRIVER(cuStreamSynchronize(stream));
  check::say("updated from a changed clone: %d", seen);
  REQUIRE(seen == 1 + 9 + 7);
  DRIVER(cuGraphExecDestroy(exec));
}

// Memory that belongs to the graph, filled and copied out by rows.
static void allocations() {
  CUgraph graph, clone;
  CUgraphNode allocate, fill, copy, release;
  CUDA_MEM_ALLOC_NODE_PARAMS memory = {};
  memory.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  memory.bytesize = 1 << 20;
  DRIVER(cuGraphCreate(&graph, 0));
  DRIVER(cuGraphAddMemAllocNode(&allocate, graph, nullptr, 0, &memory));
  CUDA_MEMSET_NODE_PARAMS set = {memory.dptr, 0, 3, 4, 16, 1};
  DRIVER(cuGraphAddMemsetNode(&fill, graph, &allocate, 1, &set, context));
  CUDA_MEMCPY3D rows = {};
  rows.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  rows.srcDevice = memory.dptr;
  rows.srcPitch = rows.WidthInBytes = 8;
  rows.dstMemoryType = CU_MEMORYTYPE_HOST;
  rows.dstHost = output;
  rows.dstPitch = 16;
  rows.Height = 4;
  rows.Depth = 1;
  DRIVER(cuGraphAddMemcpyNode(&copy, graph, &fill, 1, &rows, context));
  DRIVER(cuGraphAddMemFreeNode(&release, graph, &copy, 1, memory.dptr));
  CUgraphNodeType first, last;
  DRIVER(cuGraphNodeGetType(allocate, &first));
  DRIVER(cuGraphNodeGetType(release, &last));
  REQUIRE(first == CU_GRAPH_NODE_TYPE_MEM_ALLOC && last == CU_GRAPH_NODE_TYPE_MEM_FREE);
  DRIVER_GIVES(CUDA_ERROR_NOT_SUPPORTED, cuGraphClone(&clone, graph));
  CUgraphExec exec;
  DRIVER(cuGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < kOutputs; ++i) output[i] = -1;
  for (int i = 0; i < 2; ++i) DRIVER(cuGraphLaunch(exec, stream));
  DRIVER(cuStreamSynchronize(stream));
  for (int i = 0; i < kOutputs; ++i) REQUIRE(output[i] == (i < 16 && i % 4 < 2 ? 3 : -1));
  check::say("the graph's own memory came out by rows");
  DRIVER(cuGraphExecDestroy(exec));
  DRIVER(cuGraphDestroy(graph));
}

// Work captured behind a node of an existing graph; another node before it by the generic call.
static void intoGraph() {
  CUgraph graph, same;
  CUgraphNode first, set;
  DRIVER(cuGraphCreate(&graph, 0));
  DRIVER(cuGraphAddEmptyNode(&first, graph, nullptr, 0));
  DRIVER(cuStreamBeginCaptureToGraph(stream, graph, &first, nullptr, 1, CU_STREAM_CAPTURE_MODE_RELAXED));
  launch(1);
  CUstreamCaptureStatus status;
  const CUgraphNode* dependencies;
  size_t count = 0;
  DRIVER(cuStreamGetCaptureInfo(stream, &status, nullptr, &same, &dependencies, nullptr, &count));
  REQUIRE(status == CU_STREAM_CAPTURE_STATUS_ACTIVE && same == graph && count == 1 &&
          dependencies[0] != first);
  DRIVER(cuStreamEndCapture(stream, &same));
  REQUIRE(same == graph && nodesOf(graph).size() == 2);
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_MEMSET;
  params.memset = {value, 0, 41, 4, 1, 1, context};
  DRIVER(cuGraphAddNode(&set, graph, nullptr, nullptr, 0, &params));
  DRIVER(cuGraphAddDependencies(graph, &set, &first, nullptr, 1));
  CUDA_GRAPH_INSTANTIATE_PARAMS how = {};
  how.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
  how.hUploadStream = stream;
  CUgraphExec exec;
  DRIVER(cuGraphInstantiateWithParams(&exec, graph, &how));
  DRIVER(cuGraphLaunch(exec, stream));
  DRIVER(cuStreamSynchronize(stream));
  check::say("captured into a graph: %d", valueNow());
  REQUIRE(valueNow() == 42);
  DRIVER(cuGraphExecDestroy(exec));
  DRIVER(cuGraphDestroy(graph));
}

static void meanwhile() {
  CUgraph graph = nullptr;
  CUdeviceptr none;
  CUevent event;
  CUstreamCaptureStatus status;
  DRIVER(cuEventCreate(&event, CU_EVENT_DEFAULT));
  DRIVER(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuMemAllocAsync(&none, 64, other));
  DRIVER(cuStreamIsCapturing(stream, &status));
  REQUIRE(status == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuEventRecord(event, stream));
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
  DRIVER(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  DRIVER(cuEventRecord(event, stream));
  DRIVER_GIVES(CUDA_ERROR_ILLEGAL_STATE, cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  DRIVER(cuStreamEndCapture(stream, &graph));
  DRIVER(cuGraphDestroy(graph));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuEventQuery(event));  // it was never recorded for real
  DRIVER(cuEventRecord(event, other));
  DRIVER(cuEventSynchronize(event));
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
               cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_RELAXED));
  DRIVER(cuStreamBeginCapture(other, CU_STREAM_CAPTURE_MODE_RELAXED));
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cuStreamSynchronize(nullptr));
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(other, &graph));
  DRIVER(cuEventDestroy(event));
}

int main() {
  setUp();
  captured();
  allocations();
  intoGraph();
  meanwhile();
  DRIVER(cuStreamDestroy(stream));
  DRIVER(cuStreamDestroy(other));
  DRIVER(cuMemFree(value));
  DRIVER(cuMemFreeHost(output));
  return check::pass();
}
