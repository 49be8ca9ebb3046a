// Conditional nodes: if, if/else, while, switch, one inside another, bodies that were captured, copies in
// bodies, default values, executable graphs updated, and what such graphs refuse.
#include <tuple>

#include "check.h"

using Condition = cudaGraphConditionalHandle;

__global__ void set(Condition condition, const unsigned* value) {
  cudaGraphSetConditional(condition, *value);
}
__global__ void setTo(Condition condition, unsigned value) { cudaGraphSetConditional(condition, value); }
__global__ void add(int* total, int amount) { *total += amount; }
__global__ void countDown(Condition condition, int* left) { cudaGraphSetConditional(condition, --*left > 0); }
__global__ void isOdd(Condition condition, const long long* n) { cudaGraphSetConditional(condition, *n & 1); }
__global__ void halve(long long* n) { *n /= 2; }
__global__ void triple(long long* n) { *n = 3 * *n + 1; }
__global__ void count(Condition condition, const long long* n, int* steps) {
  ++*steps;
  cudaGraphSetConditional(condition, *n != 1);
}
__global__ void report(int* left) { printf("the body sees %d\n", *left); }

static cudaStream_t stream;

// A kernel of one thread behind `after`.
template <class... Parameters, class... Arguments>
static cudaGraphNode_t addKernel(cudaGraph_t graph, std::vector<cudaGraphNode_t> after,
                                 void (*kernel)(Parameters...), Arguments... arguments) {
  std::tuple<Parameters...> values(arguments...);
  cudaKernelNodeParams params = {};
  params.func = reinterpret_cast<void*>(kernel);
  params.gridDim = params.blockDim = dim3(1);
  cudaGraphNode_t node;
  std::apply(
      [&](auto&... each) {
        void* pointers[] = {&each...};
        params.kernelParams = pointers;
        CUDA(cudaGraphAddKernelNode(&node, graph, after.data(), after.size(), &params));
      },
      values);
  return node;
}

struct Conditional {
  cudaGraphNode_t node = nullptr;
  std::vector<cudaGraph_t> bodies;
};

static cudaGraphNodeParams describe(Condition condition, cudaGraphConditionalNodeType type, unsigned size) {
  cudaGraphNodeParams params = {};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = condition;
  params.conditional.type = type;
  params.conditional.size = size;
  return params;
}

static Conditional addConditional(cudaGraph_t graph, std::vector<cudaGraphNode_t> after, Condition condition,
                                  cudaGraphConditionalNodeType type, unsigned size) {
  cudaGraphNodeParams params = describe(condition, type, size);
  Conditional made;
  CUDA(cudaGraphAddNode(&made.node, graph, after.data(), nullptr, after.size(), &params));
  made.bodies.assign(params.conditional.phGraph_out, params.conditional.phGraph_out + size);
  cudaGraphNodeType kind;
  CUDA(cudaGraphNodeGetType(made.node, &kind));
  REQUIRE(kind == cudaGraphNodeTypeConditional);
  return made;
}

static void launch(cudaGraphExec_t exec) {
  CUDA(cudaGraphLaunch(exec, stream));
  CUDA(cudaStreamSynchronize(stream));
}

static void ifElse() {
  check::Device<unsigned> flag(1);
  check::Device<int> total(std::vector<int>{0});
  cudaGraph_t graph;
  Condition condition;
  cudaGraphExec_t exec;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphConditionalHandleCreate(&condition, graph));
  auto first = addKernel(graph, {}, set, condition, flag.get());
  auto branch = addConditional(graph, {first}, condition, cudaGraphCondTypeIf, 2);
  addKernel(branch.bodies[0], {}, add, total.get(), 1);
  addKernel(branch.bodies[1], {}, add, total.get(), 100);
  addKernel(graph, {branch.node}, add, total.get(), 10000);
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (unsigned value : {1u, 0u, 7u, 0u, 0u}) {
    flag.put({value});
    launch(exec);
    check::say("if %u: %d", value, total.read()[0]);
  }
  REQUIRE(total.read()[0] == 50302);
  // What such a graph cannot do.
  cudaGraphExec_t second;
  cudaGraph_t clone, parent;
  cudaGraphNode_t node;
  REQUIRE(cudaGraphInstantiate(&second, graph, 0) != cudaSuccess);
  REQUIRE(cudaGraphClone(&clone, graph) != cudaSuccess);
  CUDA(cudaGraphCreate(&parent, 0));
  REQUIRE(cudaGraphAddChildGraphNode(&node, parent, nullptr, 0, graph) != cudaSuccess);
  cudaGetLastError();
  CUDA(cudaGraphDestroy(parent));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));  // again, once the first has gone
  launch(exec);
  REQUIRE(total.read()[0] == 60402);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

// The default is assigned by every launch, whatever the condition was before.
static void defaults() {
  check::Device<int> total(std::vector<int>{0});
  cudaGraph_t graph;
  Condition condition;
  cudaGraphExec_t exec;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphConditionalHandleCreate(&condition, graph, 1, cudaGraphCondAssignDefault));
  auto once = addConditional(graph, {}, condition, cudaGraphCondTypeWhile, 1);
  auto step = addKernel(once.bodies[0], {}, add, total.get(), 1);
  addKernel(once.bodies[0], {step}, setTo, condition, 0u);
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) launch(exec);
  check::say("three launches by default: %d", total.read()[0]);
  REQUIRE(total.read()[0] == 3);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

static void loop() {
  check::Device<int> left(1), total(std::vector<int>{0});
  cudaGraph_t graph;
  Condition condition;
  cudaGraphExec_t exec;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphConditionalHandleCreate(&condition, graph, 1, cudaGraphCondAssignDefault));
  auto body = addConditional(graph, {}, condition, cudaGraphCondTypeWhile, 1).bodies[0];
  auto step = addKernel(body, {}, add, total.get(), 3);
  auto next = addKernel(body, {step}, countDown, condition, left.get());
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int rounds : {1, 10, 500}) {
    left.put({rounds});
    launch(exec);
    check::say("%d rounds: %d", rounds, total.read()[0]);
  }
  REQUIRE(total.read()[0] == 511 * 3);
  // Another amount from here on: the same graph, changed.
  int five = 5;
  int* where = total.get();
  void* arguments[] = {&where, &five};
  cudaKernelNodeParams params = {};
  CUDA(cudaGraphKernelNodeGetParams(step, &params));
  REQUIRE(params.func == reinterpret_cast<void*>(add) && *static_cast<int*>(params.kernelParams[1]) == 3);
  params.kernelParams = arguments;
  CUDA(cudaGraphKernelNodeSetParams(step, &params));
  cudaGraphExecUpdateResultInfo info;
  CUDA(cudaGraphExecUpdate(exec, graph, &info));
  total.put({0});
  left.put({4});
  launch(exec);
  check::say("updated, 4 rounds: %d", total.read()[0]);
  REQUIRE(total.read()[0] == 20);
  CUDA(cudaGraphExecDestroy(exec));
  // A body that prints.
  addKernel(body, {next}, report, left.get());
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  left.put({3});
  launch(exec);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

static void oneOfMany() {
  check::Device<unsigned> which(1);
  check::Device<int> total(1);
  cudaGraph_t graph;
  Condition condition;
  cudaGraphExec_t exec;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphConditionalHandleCreate(&condition, graph));
  auto first = addKernel(graph, {}, set, condition, which.get());
  auto chosen = addConditional(graph, {first}, condition, cudaGraphCondTypeSwitch, 4);
  for (int i = 0; i < 4; ++i)
    if (i != 2) addKernel(chosen.bodies[i], {}, add, total.get(), i + 1);
  // A copy and a memset, in the body that is left.
  int* source;
  CUDA(cudaHostAlloc(&source, sizeof(int), cudaHostAllocMapped));
  *source = 1234;
  cudaGraphNode_t copy, clear;
  cudaMemsetParams fill = {};
  fill.dst = total;
  fill.elementSize = sizeof(int);
  fill.width = fill.height = 1;
  CUDA(cudaGraphAddMemsetNode(&clear, chosen.bodies[2], nullptr, 0, &fill));
  CUDA(cudaGraphAddMemcpyNode1D(&copy, chosen.bodies[2], &clear, 1, total, source, sizeof(int),
                                cudaMemcpyDefault));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (unsigned i : {0u, 1u, 2u, 3u, 4u, 1000u}) {
    which.put({i});
    total.put({0});
    launch(exec);
    check::say("switch %u: %d", i, total.read()[0]);
    REQUIRE(total.read()[0] == (i == 2 ? 1234 : i < 4 ? static_cast<int>(i) + 1 : 0));
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaFreeHost(source));
}

// The Collatz sequence: a loop that holds a branch.
static void nested() {
  check::Device<long long> n(1);
  check::Device<int> steps(1);
  cudaGraph_t graph;
  Condition more, odd;
  cudaGraphExec_t exec;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphConditionalHandleCreate(&more, graph, 1, cudaGraphCondAssignDefault));
  auto body = addConditional(graph, {}, more, cudaGraphCondTypeWhile, 1).bodies[0];
  CUDA(cudaGraphConditionalHandleCreate(&odd, body));
  auto look = addKernel(body, {}, isOdd, odd, n.get());
  auto branch = addConditional(body, {look}, odd, cudaGraphCondTypeIf, 2);
  addKernel(branch.bodies[0], {}, triple, n.get());
  addKernel(branch.bodies[1], {}, halve, n.get());
  addKernel(body, {branch.node}, count, more, n.get(), steps.get());
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (long long start : {2ll, 6ll, 27ll, 97ll}) {
    n.put({start});
    steps.put({0});
    launch(exec);
    check::say("from %lld to 1 in %d steps", start, steps.read()[0]);
    REQUIRE(n.read()[0] == 1);
  }
  REQUIRE(steps.read()[0] == 118);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

// A capture that a loop is put into, whose body is captured from a second stream.
static void captured() {
  check::Device<int> left(1), total(1);
  cudaStream_t inner;
  CUDA(cudaStreamCreateWithFlags(&inner, cudaStreamNonBlocking));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  add<<<1, 1, 0, stream>>>(total, 1);
  cudaStreamCaptureStatus status;
  cudaGraph_t graph, same;
  const cudaGraphNode_t* after;
  size_t many;
  unsigned long long id;
  CUDA(cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &after, nullptr, &many));
  REQUIRE(status == cudaStreamCaptureStatusActive && many == 1);
  Condition condition;
  CUDA(cudaGraphConditionalHandleCreate(&condition, graph, 1, cudaGraphCondAssignDefault));
  auto repeat = addConditional(graph, {after, after + many}, condition, cudaGraphCondTypeWhile, 1);
  CUDA(cudaStreamUpdateCaptureDependencies(stream, &repeat.node, nullptr, 1,
                                           cudaStreamSetCaptureDependencies));
  CUDA(cudaStreamBeginCaptureToGraph(inner, repeat.bodies[0], nullptr, nullptr, 0,
                                     cudaStreamCaptureModeThreadLocal));
  add<<<1, 1, 0, inner>>>(total, 10);
  countDown<<<1, 1, 0, inner>>>(condition, left);
  CUDA(cudaStreamEndCapture(inner, &same));
  REQUIRE(same == repeat.bodies[0]);
  add<<<1, 1, 0, stream>>>(total, 1000);
  CUDA(cudaStreamEndCapture(stream, &same));
  REQUIRE(same == graph);
  cudaGraphExec_t exec;
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int rounds : {1, 6}) {
    total.put({0});
    left.put({rounds});
    launch(exec);
    check::say("captured, %d rounds: %d", rounds, total.read()[0]);
    REQUIRE(total.read()[0] == 1001 + 10 * rounds);
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(inner));
}

// Nothing of a graph that is gone is mistaken for what came after it.
static void again() {
  check::Device<int> total(std::vector<int>{0});
  for (int i = 0; i < 200; ++i) {
    cudaGraph_t graph;
    Condition condition;
    cudaGraphExec_t exec;
    CUDA(cudaGraphCreate(&graph, 0));
    CUDA(cudaGraphConditionalHandleCreate(&condition, graph, 1, cudaGraphCondAssignDefault));
    auto only = addConditional(graph, {}, condition, cudaGraphCondTypeIf, 1);
    auto node = addKernel(only.bodies[0], {}, add, total.get(), 1);
    size_t many = 0;
    CUDA(cudaGraphGetNodes(only.bodies[0], nullptr, &many));
    REQUIRE(many == 1);
    cudaKernelNodeParams params = {};
    CUDA(cudaGraphKernelNodeGetParams(node, &params));
    REQUIRE(params.func == reinterpret_cast<void*>(add));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));  // the executable graph stands on its own
    launch(exec);
    CUDA(cudaGraphExecDestroy(exec));
  }
  check::say("200 graphs one after another: %d", total.read()[0]);
  REQUIRE(total.read()[0] == 200);
}

int main() {
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ifElse();
  defaults();
  loop();
  oneOfMany();
  nested();
  captured();
  again();
  return check::pass();
}
