// A graph built node by node: kernel, memcpy, memset, host, event, empty and child nodes; parameters read
// back, set in the graph and in its executable, nodes disabled, dependencies listed.
#include "check.h"

__global__ void scale(int* values, int count, int factor, int offset) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = values[i] * factor + offset;
}

static int hostCalls = 0;
static void CUDART_CB countCall(void* by) { hostCalls += *static_cast<int*>(by); }

constexpr int kCount = 512;

struct KernelNode {
  cudaGraphNode_t node = nullptr;
  int* values;
  int count = kCount, factor, offset;
  void* arguments[4] = {&values, &count, &factor, &offset};

  KernelNode(int* values, int factor, int offset) : values(values), factor(factor), offset(offset) {}
  cudaKernelNodeParams parameters() {
    cudaKernelNodeParams params = {};
    params.func = reinterpret_cast<void*>(scale);
    params.gridDim = dim3(4);
    params.blockDim = dim3(128);
    params.kernelParams = arguments;
    return params;
  }
};

static void launchAndCompare(const char* name, cudaGraphExec_t exec, const std::vector<int>& output,
                             int first, int last) {
  CUDA(cudaGraphLaunch(exec, 0));
  CUDA(cudaStreamSynchronize(0));
  check::say("%s: %d ... %d, host calls %d", name, output[0], output[kCount - 1], hostCalls);
  REQUIRE(output[0] == first && output[kCount - 1] == last);
}

int main() {
  std::vector<int> input(kCount), output(kCount);
  for (int i = 0; i < kCount; ++i) input[i] = i;
  check::Device<int> values(kCount), scratch(kCount);
  const size_t bytes = kCount * sizeof(int);

  cudaGraph_t graph;
  CUDA(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t copyIn, clear, host, copyOut, empty, child, record;
  CUDA(cudaGraphAddMemcpyNode1D(&copyIn, graph, nullptr, 0, values, input.data(), bytes,
                                cudaMemcpyHostToDevice));
  cudaMemsetParams fill = {};
  fill.dst = scratch;
  fill.value = 3;
  fill.elementSize = sizeof(int);
  fill.width = kCount;
  fill.height = 1;
  CUDA(cudaGraphAddMemsetNode(&clear, graph, nullptr, 0, &fill));
  CUDA(cudaGraphAddEmptyNode(&empty, graph, &copyIn, 1));

  KernelNode first(values, 2, 1);
  cudaKernelNodeParams firstParams = first.parameters();
  CUDA(cudaGraphAddKernelNode(&first.node, graph, &empty, 1, &firstParams));

  // The child scales scratch by ten.
  cudaGraph_t inner;
  CUDA(cudaGraphCreate(&inner, 0));
  KernelNode second(scratch, 10, 0);
  cudaKernelNodeParams secondParams = second.parameters();
  CUDA(cudaGraphAddKernelNode(&second.node, inner, nullptr, 0, &secondParams));
  CUDA(cudaGraphAddChildGraphNode(&child, graph, &clear, 1, inner));
  CUDA(cudaGraphDestroy(inner));

  // values += scratch cannot be had from `scale`; copy the last element of scratch over the last of values
  // instead.
  cudaGraphNode_t patch;
  const cudaGraphNode_t before[] = {first.node, child};
  CUDA(cudaGraphAddMemcpyNode1D(&patch, graph, before, 2, values + kCount - 1, scratch + kCount - 1,
                                sizeof(int), cudaMemcpyDeviceToDevice));
  cudaEvent_t event;
  CUDA(cudaEventCreate(&event));
  CUDA(cudaGraphAddEventRecordNode(&record, graph, &patch, 1, event));
  CUDA(cudaGraphAddMemcpyNode1D(&copyOut, graph, &record, 1, output.data(), values, bytes,
                                cudaMemcpyDeviceToHost));
  int one = 1, hundred = 100;
  cudaHostNodeParams hostParams = {countCall, &one};
  CUDA(cudaGraphAddHostNode(&host, graph, &copyOut, 1, &hostParams));

  size_t count = 0, edges = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  CUDA(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
  check::say("%zu nodes, %zu edges", count, edges);
  REQUIRE(count == 9 && edges == 8);
  cudaGraphNodeType type;
  CUDA(cudaGraphNodeGetType(child, &type));
  REQUIRE(type == cudaGraphNodeTypeGraph);
  CUDA(cudaGraphNodeGetType(host, &type));
  REQUIRE(type == cudaGraphNodeTypeHost);
  cudaGraphNode_t found[4];
  size_t dependencies = 4;
  CUDA(cudaGraphNodeGetDependencies(patch, found, nullptr, &dependencies));
  REQUIRE(dependencies == 2 && (found[0] == child || found[1] == child));
  cudaKernelNodeParams read = {};
  CUDA(cudaGraphKernelNodeGetParams(first.node, &read));
  REQUIRE(read.gridDim.x == 4 && read.blockDim.x == 128 && *static_cast<int*>(read.kernelParams[2]) == 2);
  cudaMemsetParams readFill = {};
  CUDA(cudaGraphMemsetNodeGetParams(clear, &readFill));
  REQUIRE(readFill.value == 3 && readFill.width == kCount);

  cudaGraphExec_t exec;
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  launchAndCompare("built", exec, output, 1, 30);

  // Changes to the executable alone.
  first.factor = 5;
  first.offset = -1;
  CUDA(cudaGraphExecKernelNodeSetParams(exec, first.node, &firstParams));
  launchAndCompare("kernel changed", exec, output, -1, 30);
  fill.value = 9;
  CUDA(cudaGraphExecMemsetNodeSetParams(exec, clear, &fill));
  hostParams.userData = &hundred;
  CUDA(cudaGraphExecHostNodeSetParams(exec, host, &hostParams));
  launchAndCompare("memset and host changed", exec, output, -1, 90);
  std::vector<int> otherInput(kCount, 50);
  CUDA(cudaGraphExecMemcpyNodeSetParams1D(exec, copyIn, values, otherInput.data(), bytes,
                                          cudaMemcpyHostToDevice));
  launchAndCompare("source changed", exec, output, 249, 90);
  CUDA(cudaGraphNodeSetEnabled(exec, first.node, 0));
  unsigned enabled = 1;
  CUDA(cudaGraphNodeGetEnabled(exec, first.node, &enabled));
  REQUIRE(enabled == 0);
  launchAndCompare("kernel disabled", exec, output, 50, 90);
  CUDA(cudaGraphNodeSetEnabled(exec, first.node, 1));
  launchAndCompare("kernel enabled", exec, output, 249, 90);

  // Changes to the graph reach what is instantiated from it later.
  first.factor = 1;
  first.offset = 1000;
  CUDA(cudaGraphKernelNodeSetParams(first.node, &firstParams));
  CUDA(cudaGraphRemoveDependencies(graph, &record, &copyOut, nullptr, 1));
  CUDA(cudaGraphDestroyNode(record));
  CUDA(cudaGraphAddDependencies(graph, &patch, &copyOut, nullptr, 1));
  cudaGraphExec_t again;
  CUDA(cudaGraphInstantiate(&again, graph, 0));
  launchAndCompare("graph changed", again, output, 1000, 30);
  REQUIRE(cudaEventQuery(event) == cudaSuccess);
  REQUIRE(hostCalls == 1 + 1 + 4 * 100 + 1);

  // A cycle is refused when it is instantiated.
  CUDA(cudaGraphAddDependencies(graph, &host, &copyIn, nullptr, 1));
  cudaGraphExec_t cycle = nullptr;
  CUDA_GIVES(cudaErrorInvalidValue, cudaGraphInstantiate(&cycle, graph, 0));
  cudaGetLastError();
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphExecDestroy(again));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaEventDestroy(event));
  return check::pass();
}
