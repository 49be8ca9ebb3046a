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

static void expectOutput(const char* name, cudaGraphExec_t exec, const std::vector<int>& output, int first,
                         int last) {
  CUDA(cudaGraphLaunch(exec, 0));
  CUDA(cudaStreamSynchronize(0));
  check::say("%s: %d ... %d, host calls %d", name, output[0], output[kCount - 1], hostCalls);
  REQUIRE(output[0] == first && output[kCount - 1] == last);
}

// copyIn -> empty -> first, and clear -> child (second); behind both, patch -> record -> copyOut -> host.
struct Built {
  static constexpr size_t kBytes = kCount * sizeof(int);
  std::vector<int> input = std::vector<int>(kCount), output = std::vector<int>(kCount);
  check::Device<int> values{kCount}, scratch{kCount};
  int one = 1, hundred = 100;
  cudaGraph_t graph;
  cudaGraphNode_t copyIn, clear, host, copyOut, empty, child, record, patch;
  cudaMemsetParams fill = {};
  KernelNode first{values, 2, 1}, second{scratch, 10, 0};
  cudaKernelNodeParams firstParams = first.parameters(), secondParams = second.parameters();
  cudaHostNodeParams hostParams = {countCall, &one};
  cudaEvent_t event;

  Built() {
    for (int i = 0; i < kCount; ++i) input[i] = i;
    CUDA(cudaEventCreate(&event));
    CUDA(cudaGraphCreate(&graph, 0));
    CUDA(cudaGraphAddMemcpyNode1D(&copyIn, graph, nullptr, 0, values, input.data(), kBytes,
                                  cudaMemcpyHostToDevice));
    fill.dst = scratch;
    fill.value = 3;
    fill.elementSize = sizeof(int);
    fill.width = kCount;
    fill.height = 1;
    CUDA(cudaGraphAddMemsetNode(&clear, graph, nullptr, 0, &fill));
    CUDA(cudaGraphAddEmptyNode(&empty, graph, &copyIn, 1));
    CUDA(cudaGraphAddKernelNode(&first.node, graph, &empty, 1, &firstParams));

    cudaGraph_t inner;  // scales scratch by ten
    CUDA(cudaGraphCreate(&inner, 0));
    CUDA(cudaGraphAddKernelNode(&second.node, inner, nullptr, 0, &secondParams));
    CUDA(cudaGraphAddChildGraphNode(&child, graph, &clear, 1, inner));
    CUDA(cudaGraphDestroy(inner));

    // The last element of scratch goes over the last of values.
    const cudaGraphNode_t before[] = {first.node, child};
    CUDA(cudaGraphAddMemcpyNode1D(&patch, graph, before, 2, values + kCount - 1, scratch + kCount - 1,
                                  sizeof(int), cudaMemcpyDeviceToDevice));
    CUDA(cudaGraphAddEventRecordNode(&record, graph, &patch, 1, event));
    CUDA(cudaGraphAddMemcpyNode1D(&copyOut, graph, &record, 1, output.data(), values, kBytes,
                                  cudaMemcpyDeviceToHost));
    CUDA(cudaGraphAddHostNode(&host, graph, &copyOut, 1, &hostParams));
  }
};

static void inspect(Built& b) {
  size_t count = 0, edges = 0;
  CUDA(cudaGraphGetNodes(b.graph, nullptr, &count));
  CUDA(cudaGraphGetEdges(b.graph, nullptr, nullptr, nullptr, &edges));
  check::say("%zu nodes, %zu edges", count, edges);
  REQUIRE(count == 9 && edges == 8);
  cudaGraphNodeType type;
  CUDA(cudaGraphNodeGetType(b.child, &type));
  REQUIRE(type == cudaGraphNodeTypeGraph);
  CUDA(cudaGraphNodeGetType(b.host, &type));
  REQUIRE(type == cudaGraphNodeTypeHost);
  cudaGraphNode_t found[4];
  size_t dependencies = 4;
  CUDA(cudaGraphNodeGetDependencies(b.patch, found, nullptr, &dependencies));
  REQUIRE(dependencies == 2 && (found[0] == b.child || found[1] == b.child));
  cudaKernelNodeParams read = {};
  CUDA(cudaGraphKernelNodeGetParams(b.first.node, &read));
  REQUIRE(read.gridDim.x == 4 && read.blockDim.x == 128 && *static_cast<int*>(read.kernelParams[2]) == 2);
  cudaMemsetParams readFill = {};
  CUDA(cudaGraphMemsetNodeGetParams(b.clear, &readFill));
  REQUIRE(readFill.value == 3 && readFill.width == kCount);
}

// Changes to the executable alone.
static void changeExecutable(Built& b) {
  cudaGraphExec_t exec;
  CUDA(cudaGraphInstantiate(&exec, b.graph, 0));
  expectOutput("built", exec, b.output, 1, 30);
  b.first.factor = 5;
  b.first.offset = -1;
  CUDA(cudaGraphExecKernelNodeSetParams(exec, b.first.node, &b.firstParams));
  expectOutput("kernel changed", exec, b.output, -1, 30);
  b.fill.value = 9;
  CUDA(cudaGraphExecMemsetNodeSetParams(exec, b.clear, &b.fill));
  b.hostParams.userData = &b.hundred;
  CUDA(cudaGraphExecHostNodeSetParams(exec, b.host, &b.hostParams));
  expectOutput("memset and host changed", exec, b.output, -1, 90);
  std::vector<int> otherInput(kCount, 50);
  CUDA(cudaGraphExecMemcpyNodeSetParams1D(exec, b.copyIn, b.values, otherInput.data(), b.kBytes,
                                          cudaMemcpyHostToDevice));
  expectOutput("source changed", exec, b.output, 249, 90);
  CUDA(cudaGraphNodeSetEnabled(exec, b.first.node, 0));
  unsigned enabled = 1;
  CUDA(cudaGraphNodeGetEnabled(exec, b.first.node, &enabled));
  REQUIRE(enabled == 0);
  expectOutput("kernel disabled", exec, b.output, 50, 90);
  CUDA(cudaGraphNodeSetEnabled(exec, b.first.node, 1));
  expectOutput("kernel enabled", exec, b.output, 249, 90);
  CUDA(cudaGraphExecDestroy(exec));
}

// Changes to the graph reach what is instantiated from it later.
static void changeGraph(Built& b) {
  b.first.factor = 1;
  b.first.offset = 1000;
  CUDA(cudaGraphKernelNodeSetParams(b.first.node, &b.firstParams));
  CUDA(cudaGraphRemoveDependencies(b.graph, &b.record, &b.copyOut, nullptr, 1));
  CUDA(cudaGraphDestroyNode(b.record));
  CUDA(cudaGraphAddDependencies(b.graph, &b.patch, &b.copyOut, nullptr, 1));
  cudaGraphExec_t exec;
  CUDA(cudaGraphInstantiate(&exec, b.graph, 0));
  expectOutput("graph changed", exec, b.output, 1000, 30);
  CUDA(cudaEventQuery(b.event));
  CUDA(cudaGraphExecDestroy(exec));

  // A cycle is refused when it is instantiated.
  CUDA(cudaGraphAddDependencies(b.graph, &b.host, &b.copyIn, nullptr, 1));
  cudaGraphExec_t cycle = nullptr;
  cudaGraph_t graph = b.graph;
  CUDA_GIVES(cudaErrorInvalidValue, cudaGraphInstantiate(&cycle, graph, 0));
  cudaGetLastError();
}

int main() {
  Built built;
  inspect(built);
  changeExecutable(built);
  changeGraph(built);
  REQUIRE(hostCalls == 1 + 1 + 4 * 100 + 1);
  CUDA(cudaGraphDestroy(built.graph));
  CUDA(cudaEventDestroy(built.event));
  return check::pass();
}
