// Graphs captured from streams: fork and join by events, launched again and again, updated, cloned, and
// refused where capture forbids it.
#include "check.h"

__global__ void add(int* values, int count, int amount) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] += amount;
}

__global__ void combine(const int* a, const int* b, int* c, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) c[i] = a[i] * 1000 + b[i];
}

static int hostCalls = 0;
static void CUDART_CB count(void* by) { hostCalls += *static_cast<int*>(by); }

struct Work {
  static constexpr int kCount = 1000;
  int *input, *a, *b, *c, *output;
  cudaStream_t main, side;
  cudaEvent_t fork, join;
  int step = 1;
};

// input -> a (+amount) and b (+2 amount) side by side -> c -> output, and a host function at the end.
static cudaGraph_t capture(Work& work, int amount, bool hostFunction) {
  const size_t bytes = Work::kCount * sizeof(int);
  CUDA(cudaStreamBeginCapture(work.main, cudaStreamCaptureModeGlobal));
  CUDA(cudaMemcpyAsync(work.a, work.input, bytes, cudaMemcpyHostToDevice, work.main));
  CUDA(cudaEventRecord(work.fork, work.main));
  CUDA(cudaStreamWaitEvent(work.side, work.fork, 0));
  add<<<8, 128, 0, work.main>>>(work.a, Work::kCount, amount);
  CUDA(cudaMemsetAsync(work.b, 0, bytes, work.side));
  add<<<8, 128, 0, work.side>>>(work.b, Work::kCount, 2 * amount);
  CUDA(cudaEventRecord(work.join, work.side));
  CUDA(cudaStreamWaitEvent(work.main, work.join, 0));
  combine<<<8, 128, 0, work.main>>>(work.a, work.b, work.c, Work::kCount);
  CUDA(cudaMemcpyAsync(work.output, work.c, bytes, cudaMemcpyDeviceToHost, work.main));
  if (hostFunction) CUDA(cudaLaunchHostFunc(work.main, count, &work.step));
  cudaStreamCaptureStatus status;
  CUDA(cudaStreamIsCapturing(work.side, &status));
  REQUIRE(status == cudaStreamCaptureStatusActive);
  cudaGraph_t graph = nullptr;
  CUDA(cudaStreamEndCapture(work.main, &graph));
  REQUIRE(graph != nullptr);
  return graph;
}

static void verify(const char* name, const Work& work, int amount) {
  for (int i = 0; i < Work::kCount; ++i)
    if (work.output[i] != (work.input[i] + amount) * 1000 + 2 * amount)
      check::fail("%s: [%d] is %d", name, i, work.output[i]);
  check::say("%s: %d values are exact", name, Work::kCount);
}

static void refusals(Work& work) {
  cudaGraph_t graph = nullptr;
  CUDA(cudaStreamBeginCapture(work.main, cudaStreamCaptureModeThreadLocal));
  add<<<8, 128, 0, work.main>>>(work.a, Work::kCount, 1);
  CUDA_GIVES(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(work.main));
  CUDA_GIVES(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(work.main, &graph));
  cudaGetLastError();
  CUDA_GIVES(cudaErrorIllegalState, cudaStreamEndCapture(work.main, &graph));
  cudaGetLastError();
  CUDA(cudaStreamBeginCapture(work.main, cudaStreamCaptureModeRelaxed));
  CUDA(cudaEventRecord(work.fork, work.main));
  CUDA(cudaStreamWaitEvent(work.side, work.fork, 0));
  add<<<8, 128, 0, work.side>>>(work.b, Work::kCount, 1);
  CUDA_GIVES(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(work.main, &graph));
  cudaGetLastError();
  add<<<8, 128, 0, work.main>>>(work.a, Work::kCount, 1);  // both streams work again
  CUDA(cudaStreamSynchronize(work.main));
  CUDA(cudaStreamSynchronize(work.side));
}

int main() {
  Work work;
  const size_t bytes = Work::kCount * sizeof(int);
  CUDA(cudaMallocHost(&work.input, bytes));
  CUDA(cudaMallocHost(&work.output, bytes));
  for (int** pointer : {&work.a, &work.b, &work.c}) CUDA(cudaMalloc(pointer, bytes));
  CUDA(cudaStreamCreateWithFlags(&work.main, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&work.side, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&work.fork, cudaEventDisableTiming));
  CUDA(cudaEventCreateWithFlags(&work.join, cudaEventDisableTiming));

  cudaGraph_t graph = capture(work, 7, true);
  size_t nodes = 0, roots = 0, edges = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  CUDA(cudaGraphGetRootNodes(graph, nullptr, &roots));
  CUDA(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
  check::say("captured: %zu nodes, %zu roots, %zu edges", nodes, roots, edges);
  REQUIRE(nodes == 7 && roots == 1 && edges == 7);
  cudaGraphExec_t exec = nullptr;
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  REQUIRE(hostCalls == 0);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < Work::kCount; ++i) work.input[i] = i + round;
    CUDA(cudaGraphLaunch(exec, work.main));
    CUDA(cudaStreamSynchronize(work.main));
  }
  REQUIRE(hostCalls == 20);
  verify("20 launches", work, 7);

  // The whole executable graph updated from another capture of the same shape.
  cudaGraph_t changed = capture(work, 11, true);
  cudaGraphExecUpdateResultInfo info;
  CUDA(cudaGraphExecUpdate(exec, changed, &info));
  REQUIRE(info.result == cudaGraphExecUpdateSuccess);
  CUDA(cudaGraphLaunch(exec, work.main));
  CUDA(cudaStreamSynchronize(work.main));
  verify("updated", work, 11);
  cudaGraph_t different = capture(work, 11, false);
  CUDA_IS(cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdate(exec, different, &info));
  REQUIRE(info.result != cudaGraphExecUpdateSuccess);
  cudaGetLastError();

  cudaGraph_t clone = nullptr;
  CUDA(cudaGraphClone(&clone, graph));
  cudaGraphExec_t cloneExec = nullptr;
  CUDA(cudaGraphInstantiate(&cloneExec, clone, 0));
  CUDA(cudaGraphUpload(cloneExec, work.main));
  CUDA(cudaGraphDestroy(clone));
  CUDA(cudaGraphLaunch(cloneExec, work.side));
  CUDA(cudaStreamSynchronize(work.side));
  verify("cloned", work, 7);

  refusals(work);
  for (cudaGraph_t done : {graph, changed, different}) CUDA(cudaGraphDestroy(done));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphExecDestroy(cloneExec));
  for (cudaStream_t stream : {work.main, work.side}) CUDA(cudaStreamDestroy(stream));
  for (cudaEvent_t event : {work.fork, work.join}) CUDA(cudaEventDestroy(event));
  return check::pass();
}
