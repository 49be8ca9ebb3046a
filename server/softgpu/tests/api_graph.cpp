// Graphs: capture, explicit construction, execution, update.
#include <atomic>

#include "api_support.h"

using namespace apitest;

namespace {

CUDA_KERNEL_NODE_PARAMS kernelNode(CUfunction f, void** parameters) {
  CUDA_KERNEL_NODE_PARAMS p{};
  p.func = f;
  p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1;
  p.kernelParams = parameters;
  return p;
}

void CUDA_CB count(void* counter) { ++*static_cast<std::atomic<int>*>(counter); }

struct Capturing {
  CUstream a = nullptr, b = nullptr;
  CUevent fork = nullptr, join = nullptr;
  Capturing() {
    OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
    OK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
  }
  ~Capturing() {
    cuEventDestroy(fork);
    cuEventDestroy(join);
    cuStreamDestroy(a);
    cuStreamDestroy(b);
  }
};

}  // namespace

TEST_CASE("a captured sequence runs when launched, as often as it is launched") {
  Session session;
  Capturing s;
  Buffer<int> b(4);
  CUfunction add = session.function("addTo");
  OK(cuStreamBeginCapture(s.a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  CUstreamCaptureStatus status;
  OK(cuStreamIsCapturing(s.a, &status));
  CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  OK(cuMemsetD32Async(b.address, 1, 1, s.a));
  OK(launch(add, 1, 0, s.a, b.address, 10));
  OK(cuEventRecord(s.fork, s.a));
  OK(cuStreamWaitEvent(s.b, s.fork, 0));
  OK(launch(add, 1, 0, s.b, b.address + 4, 5));
  OK(launch(add, 1, 0, s.a, b.address + 8, 7));
  OK(cuEventRecord(s.join, s.b));
  OK(cuStreamWaitEvent(s.a, s.join, 0));
  OK(cuMemcpyDtoDAsync(b.address + 12, b.address + 4, 4, s.a));
  cuuint64_t id = 0;
  CUgraph during = nullptr;
  const CUgraphNode* dependencies = nullptr;
  size_t n = 0;
  OK(cuStreamGetCaptureInfo(s.a, &status, &id, &during, &dependencies, nullptr, &n));
  CHECK(n == 1);
  CHECK(id != 0);
  CUgraph graph = nullptr;
  OK(cuStreamEndCapture(s.a, &graph));
  CHECK(graph == during);
  CHECK(b.get() == std::vector<int>{0, 0, 0, 0});
  size_t nodes = 0, edges = 0, roots = 0;
  OK(cuGraphGetNodes(graph, nullptr, &nodes));
  CHECK(nodes == 5);
  OK(cuGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
  CHECK(edges == 5);
  OK(cuGraphGetRootNodes(graph, nullptr, &roots));
  CHECK(roots == 1);
  CUgraphExec exec = nullptr;
  OK(cuGraphInstantiate(&exec, graph, 0));
  OK(cuGraphDestroy(graph));
  for (int i = 0; i < 3; ++i) OK(cuGraphLaunch(exec, s.a));
  OK(cuStreamSynchronize(s.a));
  CHECK(b.get() == std::vector<int>{11, 15, 21, 15});
  OK(cuGraphExecDestroy(exec));
}

TEST_CASE("what a capture forbids") {
  Session session;
  Capturing s;
  Buffer<int> b(1);
  CUgraph graph = nullptr;
  CUdeviceptr p = 0;
  SECTION("synchronising the stream") {
    OK(cuStreamBeginCapture(s.a, CU_STREAM_CAPTURE_MODE_RELAXED));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(s.a));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, launch(session.function("addTo"), 1, 0, s.a, b.address, 1));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s.a, &graph));
    CHECK(graph == nullptr);
  }
  SECTION("allocating, unless relaxed") {
    OK(cuStreamBeginCapture(s.a, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    OK(cuMemAlloc(&p, 16));
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    CHECK(mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamQuery(s.b));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s.a, &graph));
    OK(cuMemFree(p));
  }
  SECTION("forks that do not come back") {
    OK(cuStreamBeginCapture(s.a, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuEventRecord(s.fork, s.a));
    OK(cuStreamWaitEvent(s.b, s.fork, 0));
    OK(launch(session.function("addTo"), 1, 0, s.b, b.address, 1));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, cuStreamEndCapture(s.a, &graph));
  }
  SECTION("work from outside") {
    Word gate;
    OK(launch(session.function("waitFor"), 1, 0, s.b, gate.device));
    OK(cuEventRecord(s.fork, s.b));
    OK(cuStreamBeginCapture(s.a, CU_STREAM_CAPTURE_MODE_RELAXED));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cuStreamWaitEvent(s.a, s.fork, 0));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(s.a, &graph));
    *gate.host = 1;
    OK(cuStreamSynchronize(s.b));
  }
  SECTION("the legacy stream") {
    GIVES(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          cuStreamBeginCapture(nullptr, CU_STREAM_CAPTURE_MODE_RELAXED));
    CUstream blocking;
    OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    OK(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, launch(session.function("addTo"), 1, 0, nullptr, b.address, 1));
    GIVES(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(blocking, &graph));
    OK(cuStreamDestroy(blocking));
  }
  GIVES(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(s.a, &graph));
}

TEST_CASE("a graph built by hand, its nodes read and changed") {
  Session session;
  Buffer<int> b(8);
  std::atomic<int> calls{0};
  CUgraph graph = nullptr;
  OK(cuGraphCreate(&graph, 0));
  int v = 3;
  CUdeviceptr target = b.address;
  void* parameters[] = {&target, &v};
  auto kernel = kernelNode(session.function("addTo"), parameters);
  CUgraphNode set, add, host, empty;
  CUDA_MEMSET_NODE_PARAMS memset{b.address, 0, 2, 4, 8, 1};
  OK(cuGraphAddMemsetNode(&set, graph, nullptr, 0, &memset, session.context));
  OK(cuGraphAddKernelNode(&add, graph, &set, 1, &kernel));
  v = 100;  // taken when the node was made
  CUDA_HOST_NODE_PARAMS function{count, &calls};
  OK(cuGraphAddHostNode(&host, graph, &add, 1, &function));
  OK(cuGraphAddEmptyNode(&empty, graph, &set, 1));
  // A circle is found out when it is instantiated.
  CUgraphExec exec = nullptr;
  OK(cuGraphAddDependencies(graph, &host, &set, nullptr, 1));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuGraphInstantiate(&exec, graph, 0));
  OK(cuGraphRemoveDependencies(graph, &host, &set, nullptr, 1));
  CUgraphNodeType type;
  OK(cuGraphNodeGetType(add, &type));
  CHECK(type == CU_GRAPH_NODE_TYPE_KERNEL);
  CUDA_KERNEL_NODE_PARAMS read{};
  OK(cuGraphKernelNodeGetParams(add, &read));
  CHECK(*static_cast<int*>(read.kernelParams[1]) == 3);
  CHECK(read.func == kernel.func);
  CUgraphNode before = nullptr;
  size_t n = 1;
  OK(cuGraphNodeGetDependencies(add, &before, nullptr, &n));
  CHECK(n == 1);
  CHECK(before == set);
  CUgraph clone = nullptr;
  OK(cuGraphClone(&clone, graph));
  CUgraphNode copy = nullptr;
  OK(cuGraphNodeFindInClone(&copy, add, clone));
  CHECK(copy != add);
  OK(cuGraphInstantiate(&exec, graph, 0));
  OK(cuGraphLaunch(exec, nullptr));
  CHECK(b.get()[0] == 5);
  CHECK(calls == 1);
  OK(cuGraphExecKernelNodeSetParams(exec, add, &kernel));
  OK(cuGraphLaunch(exec, nullptr));
  CHECK(b.get()[0] == 102);
  OK(cuGraphNodeSetEnabled(exec, add, 0));
  OK(cuGraphLaunch(exec, nullptr));
  CHECK(b.get()[0] == 2);
  OK(cuGraphNodeSetEnabled(exec, add, 1));
  CUgraphExecUpdateResultInfo info{};
  OK(cuGraphExecUpdate(exec, clone, &info));
  CHECK(info.result == CU_GRAPH_EXEC_UPDATE_SUCCESS);
  OK(cuGraphLaunch(exec, nullptr));
  CHECK(b.get()[0] == 5);
  OK(cuGraphDestroyNode(copy));
  GIVES(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, cuGraphExecUpdate(exec, clone, &info));
  CHECK(info.result == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
  OK(cuGraphExecDestroy(exec));
  OK(cuGraphDestroy(clone));
  OK(cuGraphDestroy(graph));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuGraphDestroy(graph));
}

TEST_CASE("child graphs, events and copies in graphs") {
  Session session;
  Buffer<int> b(4);
  int v = 2;
  void* parameters[] = {&b.address, &v};
  auto kernel = kernelNode(session.function("addTo"), parameters);
  CUgraph child = nullptr, graph = nullptr;
  OK(cuGraphCreate(&child, 0));
  CUgraphNode first, second, nested, copied, recorded;
  OK(cuGraphAddKernelNode(&first, child, nullptr, 0, &kernel));
  OK(cuGraphAddKernelNode(&second, child, &first, 1, &kernel));
  OK(cuGraphCreate(&graph, 0));
  OK(cuGraphAddChildGraphNode(&nested, graph, nullptr, 0, child));
  int result = 0;
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = b.address;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = &result;
  copy.WidthInBytes = 4;
  copy.Height = copy.Depth = 1;
  OK(cuGraphAddMemcpyNode(&copied, graph, &nested, 1, &copy, session.context));
  CUevent event;
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuGraphAddEventRecordNode(&recorded, graph, &copied, 1, event));
  CUgraph inside = nullptr;
  OK(cuGraphChildGraphNodeGetGraph(nested, &inside));
  CHECK(inside != child);
  CUgraphExec exec = nullptr;
  OK(cuGraphInstantiate(&exec, graph, 0));
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(cuGraphLaunch(exec, stream));
  OK(cuStreamSynchronize(stream));
  OK(cuEventQuery(event));
  CHECK(result == 4);
  OK(cuStreamDestroy(stream));
  OK(cuEventDestroy(event));
  OK(cuGraphExecDestroy(exec));
  OK(cuGraphDestroy(graph));
  OK(cuGraphDestroy(child));
}

TEST_CASE("memory nodes: one address for every launch") {
  Session session;
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  Buffer<int> out(1);
  OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CUdeviceptr p = 0;
  OK(cuMemAllocAsync(&p, 64, stream));
  OK(cuMemsetD32Async(p, 6, 16, stream));
  OK(launch(session.function("addTo"), 1, 0, stream, p, 1));
  OK(cuMemcpyDtoDAsync(out.address, p, 4, stream));
  OK(cuMemFreeAsync(p, stream));
  CUgraph graph = nullptr;
  OK(cuStreamEndCapture(stream, &graph));
  CUgraphExec exec = nullptr;
  OK(cuGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) OK(cuGraphLaunch(exec, stream));
  OK(cuStreamSynchronize(stream));
  CHECK(out.get()[0] == 7);
  CUgraphExec second = nullptr;
  CUgraph clone = nullptr;
  GIVES(CUDA_ERROR_NOT_SUPPORTED, cuGraphInstantiate(&second, graph, 0));
  GIVES(CUDA_ERROR_NOT_SUPPORTED, cuGraphClone(&clone, graph));
  OK(cuGraphExecDestroy(exec));
  OK(cuGraphDestroy(graph));
  OK(cuStreamDestroy(stream));
}
