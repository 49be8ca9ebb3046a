// Graphs inside graphs by the driver's calls, as XLA makes them: loops whose kernels come from PTX, child
// graphs that are moved, a node in one changed through the outermost executable graph, and the graph
// printed to a file.
#include <unistd.h>

#include <cctype>
#include <string>

#include "driver_check.h"

static const char* const kPtx = R"(
.version 8.3
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry whileBelow(.param .u64 condition, .param .u64 where, .param .u32 bound) {
  .reg .u64 %c, %p; .reg .u32 %a, %b, %r; .reg .pred %less;
  .param .b64 to; .param .b32 what;
  ld.param.u64 %c, [condition];
  ld.param.u64 %p, [where];
  ld.param.u32 %b, [bound];
  ld.global.u32 %a, [%p];
  setp.lt.u32 %less, %a, %b;
  selp.u32 %r, 1, 0, %less;
  st.param.b64 [to], %c;
  st.param.b32 [what], %r;
  call cudaGraphSetConditional, (to, what);
  ret;
}
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
static CUstream stream;
static CUfunction whileBelow, addTo;
static CUdeviceptr value;

static CUDA_KERNEL_NODE_PARAMS kernel(CUfunction function, void** arguments) {
  CUDA_KERNEL_NODE_PARAMS params = {};
  params.func = function;
  params.gridDimX = params.gridDimY = params.gridDimZ = 1;
  params.blockDimX = params.blockDimY = params.blockDimZ = 1;
  params.kernelParams = arguments;
  return params;
}

static CUgraphNode addKernel(CUgraph graph, std::vector<CUgraphNode> after, CUfunction function,
                             void** arguments) {
  CUDA_KERNEL_NODE_PARAMS params = kernel(function, arguments);
  CUgraphNode node;
  DRIVER(cuGraphAddKernelNode(&node, graph, after.data(), after.size(), &params));
  return node;
}

static unsigned launch(CUgraphExec exec, unsigned start) {
  unsigned now = 0;
  DRIVER(cuMemcpyHtoD(value, &start, sizeof start));
  DRIVER(cuGraphLaunch(exec, stream));
  DRIVER(cuStreamSynchronize(stream));
  DRIVER(cuMemcpyDtoH(&now, value, sizeof now));
  return now;
}

// while (*value < bound) *value += amount;
struct Loop {
  CUgraph graph, body;
  CUgraphConditionalHandle condition;
  CUgraphNode node, step, again;

  Loop(unsigned bound, unsigned amount) {
    DRIVER(cuGraphCreate(&graph, 0));
    DRIVER(cuGraphConditionalHandleCreate(&condition, graph, context, 0, 0));
    void* test[] = {&condition, &value, &bound};
    void* add[] = {&value, &amount};
    CUgraphNode first = addKernel(graph, {}, whileBelow, test);
    CUgraphNodeParams params = {};
    params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
    params.conditional.handle = condition;
    params.conditional.type = CU_GRAPH_COND_TYPE_WHILE;
    params.conditional.size = 1;
    params.conditional.ctx = context;
    DRIVER(cuGraphAddNode(&node, graph, &first, nullptr, 1, &params));
    body = params.conditional.phGraph_out[0];
    step = addKernel(body, {}, addTo, add);
    again = addKernel(body, {step}, whileBelow, test);
  }
};

static void setAmount(CUgraphExec exec, CUgraphNode node, unsigned amount) {
  void* add[] = {&value, &amount};
  CUDA_KERNEL_NODE_PARAMS params = kernel(addTo, add);
  DRIVER(cuGraphExecKernelNodeSetParams(exec, node, &params));
}

static void loops() {
  Loop loop(100, 7);
  CUgraphExec exec;
  DRIVER(cuGraphInstantiate(&exec, loop.graph, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY));
  const unsigned from0 = launch(exec, 0), from200 = launch(exec, 200);
  check::say("a loop: %u, %u", from0, from200);
  REQUIRE(from0 == 105 && from200 == 200);
  DRIVER(cuGraphExecDestroy(exec));
  DRIVER(cuGraphDestroy(loop.graph));
}

static CUresult moveInto(CUgraph parent, std::vector<CUgraphNode> after, CUgraph child, CUgraphNode& node) {
  CUgraphNodeParams params = {};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = child;
  params.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
  return cuGraphAddNode(&node, parent, after.data(), nullptr, after.size(), &params);
}

static CUgraph adding(unsigned amount) {
  void* add[] = {&value, &amount};
  CUgraph graph;
  DRIVER(cuGraphCreate(&graph, 0));
  addKernel(graph, {}, addTo, add);
  return graph;
}

// A graph, moved into another; one with a loop is neither moved nor copied. (Two that are moved into one do
// not always run one after the other on driver 580, although the second node depends on the first.)
static void moved() {
  CUgraph child = adding(25), parent, inside;
  CUgraphNode a, step;
  CUgraphExec exec;
  size_t count = 1;
  DRIVER(cuGraphCreate(&parent, 0));
  DRIVER(moveInto(parent, {}, child, a));
  DRIVER(cuGraphChildGraphNodeGetGraph(a, &inside));
  DRIVER(cuGraphGetNodes(inside, &step, &count));
  REQUIRE(count == 1 && cuGraphDestroy(child) != CUDA_SUCCESS);
  DRIVER(cuGraphInstantiate(&exec, parent, 0));
  const unsigned now = launch(exec, 1);
  setAmount(exec, step, 40);
  const unsigned changed = launch(exec, 1);
  check::say("a graph that was moved: %u, %u", now, changed);
  REQUIRE(now == 26 && changed == 41);
  Loop loop(10, 4);
  DRIVER_GIVES(CUDA_ERROR_NOT_SUPPORTED, moveInto(parent, {}, loop.graph, a));
  DRIVER_GIVES(CUDA_ERROR_NOT_SUPPORTED, cuGraphAddChildGraphNode(&a, parent, nullptr, 0, loop.graph));
  DRIVER(cuGraphDestroy(loop.graph));
  DRIVER(cuGraphExecDestroy(exec));
  DRIVER(cuGraphDestroy(parent));
}

// Values that a graph writes and waits for, in one node.
static void memoryOperations() {
  CUgraph graph, clone;
  CUgraphNode node, found;
  CUgraphExec exec;
  CUstreamBatchMemOpParams operations[2] = {};
  operations[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operations[0].writeValue.address = value;
  operations[0].writeValue.value = 42;
  operations[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operations[1].waitValue.address = value;
  operations[1].waitValue.value = 40;
  operations[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  CUDA_BATCH_MEM_OP_NODE_PARAMS params = {context, 2, operations, 0}, got = {};
  DRIVER(cuGraphCreate(&graph, 0));
  DRIVER(cuGraphAddBatchMemOpNode(&node, graph, nullptr, 0, &params));
  DRIVER(cuGraphInstantiate(&exec, graph, 0));
  const unsigned first = launch(exec, 1);
  operations[0].writeValue.value = 43;
  DRIVER(cuGraphExecBatchMemOpNodeSetParams(exec, node, &params));
  const unsigned second = launch(exec, 1);
  DRIVER(cuGraphClone(&clone, graph));
  DRIVER(cuGraphNodeFindInClone(&found, node, clone));
  DRIVER(cuGraphBatchMemOpNodeGetParams(found, &got));
  REQUIRE(got.count == 2 && got.paramArray[0].writeValue.value == 42 &&
          got.paramArray[1].waitValue.value == 40);
  check::say("memory operations: %u, %u", first, second);
  REQUIRE(first == 42 && second == 43);
  CUgraphNodeParams none = {};
  none.type = static_cast<CUgraphNodeType>(99);
  REQUIRE(cuGraphAddNode(&node, graph, nullptr, nullptr, 0, &none) != CUDA_SUCCESS);
  DRIVER(cuGraphExecDestroy(exec));
  DRIVER(cuGraphDestroy(graph));
  DRIVER(cuGraphDestroy(clone));
}

// Of the application's own graph nothing is asked then: NVIDIA's driver answers nothing of it any more.
static void failedCapture() {
  CUgraph graph, ended = nullptr;
  CUgraphNode node;
  DRIVER(cuGraphCreate(&graph, 0));
  DRIVER(cuGraphAddEmptyNode(&node, graph, nullptr, 0));
  DRIVER(cuStreamBeginCaptureToGraph(stream, graph, nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
  REQUIRE(cuStreamSynchronize(stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  DRIVER_GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &ended));
}

static std::string read(const char* path) {
  std::string text;
  std::FILE* file = std::fopen(path, "r");
  REQUIRE(file != nullptr);
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(std::toupper(c));
  std::fclose(file);
  return text;
}

static void printed() {
  Loop loop(100, 7);
  char path[] = "/tmp/gpupool-graph-XXXXXX", name[32];
  const int file = mkstemp(path);
  REQUIRE(file >= 0);
  close(file);
  DRIVER(cuGraphDebugDotPrint(loop.graph, path, CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES));
  const std::string text = read(path);
  REQUIRE(text.find("DIGRAPH") != std::string::npos && text.find("WHILEBELOW") != std::string::npos);
  std::snprintf(name, sizeof name, "%llX",
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(loop.node)));
  REQUIRE(text.find(name) != std::string::npos);  // the handle that this program knows
  // Larger than one piece of it travels at a time.
  CUgraphNode node = loop.node;
  for (int i = 0; i < 3000; ++i) DRIVER(cuGraphAddEmptyNode(&node, loop.graph, &node, 1));
  DRIVER(cuGraphDebugDotPrint(loop.graph, path, CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE));
  const std::string large = read(path);
  std::snprintf(name, sizeof name, "%llX",
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(node)));
  REQUIRE(large.find(name) != std::string::npos && large.rfind('}') >= large.size() - 2);
  unlink(path);
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuGraphDebugDotPrint(loop.graph, nullptr, 0));
  REQUIRE(cuGraphDebugDotPrint(loop.graph, "/nonexistent/graph.dot", 0) != CUDA_SUCCESS);
  DRIVER(cuGraphDestroy(loop.graph));
  check::say("a graph printed");
}

int main() {
  CUdevice device;
  CUmodule module;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));
  DRIVER(cuModuleLoadData(&module, kPtx));
  DRIVER(cuModuleGetFunction(&whileBelow, module, "whileBelow"));
  DRIVER(cuModuleGetFunction(&addTo, module, "addTo"));
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  DRIVER(cuMemAlloc(&value, 4096));
  loops();
  moved();
  memoryOperations();
  failedCapture();
  printed();
  return check::pass();
}
