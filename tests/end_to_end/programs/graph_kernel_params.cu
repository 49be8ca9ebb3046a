// Parameters of kernel nodes, whichever way the node was made: captured from <<<>>>, cudaLaunchKernelEx or
// cuLaunchKernel, added by the runtime or the driver, cloned, or inside a child graph. Each can be read,
// changed and given back.
#include "driver_check.h"

__global__ void scale(int* value, int factor) { *value *= factor; }
__global__ void shift(int* value, int amount) { *value += amount; }

static int* value;
static cudaStream_t stream;

static cudaGraphNode_t onlyNode(cudaGraph_t graph) {
  cudaGraphNode_t node = nullptr;
  size_t count = 1;
  CUDA(cudaGraphGetNodes(graph, &node, &count));
  REQUIRE(count == 1 && node != nullptr);
  return node;
}

// The graph's kernel is `scale` by 3; then it is made to shift by 4, and to scale by 5.
static void check3(const char* name, cudaGraph_t graph, cudaGraphNode_t node) {
  auto run = [&] {
    const int two = 2;
    int now = 0;
    cudaGraphExec_t exec;
    CUDA(cudaMemcpy(value, &two, sizeof two, cudaMemcpyHostToDevice));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaMemcpy(&now, value, sizeof now, cudaMemcpyDeviceToHost));
    return now;
  };
  cudaKernelNodeParams params = {};
  CUDA(cudaGraphKernelNodeGetParams(node, &params));
  REQUIRE(params.func == reinterpret_cast<void*>(scale));
  REQUIRE(params.gridDim.x == 1 && params.blockDim.x == 1 && params.sharedMemBytes == 0 &&
          params.extra == nullptr);
  REQUIRE(*static_cast<int**>(params.kernelParams[0]) == value &&
          *static_cast<int*>(params.kernelParams[1]) == 3);
  const int first = run();

  int amount = 4;
  void* arguments[] = {&value, &amount};
  params.func = reinterpret_cast<void*>(shift);
  params.kernelParams = arguments;
  CUDA(cudaGraphKernelNodeSetParams(node, &params));
  const int second = run();
  CUDA(cudaGraphKernelNodeGetParams(node, &params));
  REQUIRE(params.func == reinterpret_cast<void*>(shift) && *static_cast<int*>(params.kernelParams[1]) == 4);

  // By the driver's names, as they are read.
  CUDA_KERNEL_NODE_PARAMS names = {};
  DRIVER(cuGraphKernelNodeGetParams(node, &names));
  CUfunction shifts = names.func;
  REQUIRE(names.func != nullptr || names.kern != nullptr);
  int five = 5;
  void* scaled[] = {&value, &five};
  cudaFunction_t scales;
  CUDA(cudaGetFuncBySymbol(&scales, reinterpret_cast<void*>(scale)));
  REQUIRE(shifts == nullptr || shifts != scales);
  names.func = scales;
  names.kern = nullptr;
  names.kernelParams = scaled;
  DRIVER(cuGraphKernelNodeSetParams(node, &names));
  const int third = run();
  CUDA(cudaGraphKernelNodeGetParams(node, &params));
  REQUIRE(params.func == reinterpret_cast<void*>(scale) && *static_cast<int*>(params.kernelParams[1]) == 5);
  check::say("%s: %d, %d, %d", name, first, second, third);
  REQUIRE(first == 6 && second == 6 && third == 10);
  CUDA(cudaGraphDestroy(graph));
}

template <class Launch>
static cudaGraph_t capture(Launch launch) {
  cudaGraph_t graph;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch();
  CUDA(cudaStreamEndCapture(stream, &graph));
  return graph;
}

static cudaGraph_t capturedLaunch() {
  return capture([] { scale<<<1, 1, 0, stream>>>(value, 3); });
}

static cudaGraph_t added(CUfunction function, CUkernel kernel) {
  cudaGraph_t graph;
  CUgraphNode node;
  int factor = 3;
  void* arguments[] = {&value, &factor};
  CUDA_KERNEL_NODE_PARAMS params = {};
  params.func = function;
  params.kern = kernel;
  params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimX = params.blockDimY =
      params.blockDimZ = 1;
  params.kernelParams = arguments;
  CUDA(cudaGraphCreate(&graph, 0));
  DRIVER(cuGraphAddKernelNode(&node, graph, nullptr, 0, &params));
  return graph;
}

static void simple(const char* name, cudaGraph_t graph) { check3(name, graph, onlyNode(graph)); }

int main() {
  CUDA(cudaMalloc(&value, sizeof(int)));
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int factor = 3;
  void* arguments[] = {&value, &factor};

  simple("captured from <<<>>>", capturedLaunch());  // before anybody asked for a function
  simple("captured from cudaLaunchKernelEx", capture([] {
           cudaLaunchConfig_t config = {};
           config.gridDim = config.blockDim = dim3(1);
           config.stream = stream;
           CUDA(cudaLaunchKernelEx(&config, scale, value, 3));
         }));
  cudaFunction_t function;
  cudaKernel_t kernel;
  CUDA(cudaGetFuncBySymbol(&function, reinterpret_cast<void*>(scale)));
  CUDA(cudaGetKernel(&kernel, reinterpret_cast<void*>(scale)));
  simple("captured from cuLaunchKernel of a function",
         capture([&] { DRIVER(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr)); }));
  simple("captured from cuLaunchKernel of a kernel", capture([&] {
           DRIVER(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, stream, arguments,
                                 nullptr));
         }));
  simple("added by the driver with a function", added(function, nullptr));
  simple("added by the driver with a kernel", added(nullptr, kernel));

  cudaGraph_t graph = capturedLaunch(), clone, parent;
  CUDA(cudaGraphClone(&clone, graph));
  simple("cloned", clone);
  cudaGraphNode_t child;
  CUDA(cudaGraphCreate(&parent, 0));
  CUDA(cudaGraphAddChildGraphNode(&child, parent, nullptr, 0, graph));
  cudaGraph_t inside;
  CUDA(cudaGraphChildGraphNodeGetGraph(child, &inside));
  check3("in a child graph", parent, onlyNode(inside));
  CUDA(cudaGraphDestroy(graph));

  cudaGraphNode_t node;
  cudaKernelNodeParams params = {};
  params.func = reinterpret_cast<void*>(scale);
  params.gridDim = params.blockDim = dim3(1);
  params.kernelParams = arguments;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &params));
  simple("added by the runtime", graph);
  return check::pass();
}
