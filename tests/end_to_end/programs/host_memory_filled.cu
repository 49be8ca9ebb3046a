// Memsets and stream memory operations on host memory that the device addresses, copies by the device's
// address of it, and peer copies of managed memory: each works on what the program has written last, and the
// program finds the result.
#include "driver_check.h"

constexpr int kCount = 50000;
constexpr size_t kBytes = kCount * sizeof(int);
constexpr int kPitch = 100, kWidth = 50, kRows = 100;  // in ints

__managed__ int symbol[kCount];

__global__ void add(int* values, int count, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] += step;
}

static void fill(int* values, int value) {
  for (int i = 0; i < kCount; ++i) values[i] = value;
}

template <class Expected>
static void expect(const char* name, const char* what, const int* values, Expected&& expected) {
  int wrong = 0;
  for (int i = 0; i < kCount; ++i) wrong += values[i] != expected(i);
  check::say("%s, %s: %d wrong", name, what, wrong);
  REQUIRE(wrong == 0);
}

// `device`: the device's address of `host`.
static void memsets(const char* name, int* host, int* device, cudaStream_t stream) {
  fill(host, 5);
  CUDA(cudaMemsetAsync(device, 0, kBytes, stream));
  CUDA(cudaStreamSynchronize(stream));
  expect(name, "memset", host, [](int) { return 0; });
  fill(host, 5);
  CUDA(cudaMemset2DAsync(device, kPitch * sizeof(int), 0, kWidth * sizeof(int), kRows, stream));
  add<<<8, 128, 0, stream>>>(device, kCount, 1);
  CUDA(cudaStreamSynchronize(stream));
  expect(name, "2D memset and a kernel", host,
         [](int i) { return i < kPitch * kRows && i % kPitch < kWidth ? 1 : 6; });
}

static void copies(const char* name, int* host, int* device, cudaStream_t stream) {
  int* other = nullptr;
  std::vector<int> got(kCount);
  CUDA(cudaMalloc(&other, kBytes));
  fill(host, 8);
  CUDA(cudaMemcpyAsync(other, device, kBytes, cudaMemcpyDefault, stream));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaMemcpy(got.data(), other, kBytes, cudaMemcpyDeviceToHost));
  expect(name, "copied from", got.data(), [](int) { return 8; });
  add<<<8, 128, 0, stream>>>(other, kCount, 1);
  fill(host, 3);
  CUDA(cudaMemcpyAsync(device, other, kBytes, cudaMemcpyDefault, stream));
  add<<<8, 128, 0, stream>>>(device, kCount, 2);
  CUDA(cudaStreamSynchronize(stream));
  expect(name, "copied to, and a kernel", host, [](int) { return 11; });
  CUDA(cudaFree(other));
}

static void peerCopies(const char* name, int* managed, cudaStream_t stream) {
  int* other = nullptr;
  std::vector<int> got(kCount);
  CUDA(cudaMalloc(&other, kBytes));
  fill(managed, 8);
  CUDA(cudaMemcpyPeerAsync(other, 0, managed, 0, kBytes, stream));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaMemcpy(got.data(), other, kBytes, cudaMemcpyDeviceToHost));
  expect(name, "peer copy from", got.data(), [](int) { return 8; });
  add<<<8, 128, 0, stream>>>(other, kCount, 1);
  CUDA(cudaStreamSynchronize(stream));
  fill(managed, 3);
  CUDA(cudaMemcpyPeerAsync(managed, 0, other, 0, kBytes, stream));
  CUDA(cudaStreamSynchronize(stream));
  expect(name, "peer copy to", managed, [](int) { return 9; });
  CUDA(cudaFree(other));
}

// By a graph's node, also when the program has written the memory between two launches.
static void memsetNode(const char* name, int* host, int* device, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaGraphNode_t node;
  cudaMemsetParams set = {};
  set.dst = device;
  set.elementSize = sizeof(int);
  set.width = kCount;
  set.height = 1;
  set.value = 4;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphAddMemsetNode(&node, graph, nullptr, 0, &set));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int launch = 0; launch < 2; ++launch) {
    fill(host, 6);
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    expect(name, "memset node", host, [](int) { return 4; });
  }
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

// The node is made for the device's own memory, and is pointed at the host's later.
static void memsetNodePointed(const char* name, int* host, int* device, cudaStream_t stream) {
  int* own;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaGraphNode_t node;
  cudaMemsetParams set = {};
  CUDA(cudaMalloc(&own, kBytes));
  set.dst = own;
  set.elementSize = sizeof(int);
  set.width = kCount;
  set.height = 1;
  set.value = 8;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaGraphAddMemsetNode(&node, graph, nullptr, 0, &set));
  set.dst = device;
  CUDA(cudaGraphMemsetNodeSetParams(node, &set));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  fill(host, 6);
  CUDA(cudaGraphLaunch(exec, stream));
  CUDA(cudaStreamSynchronize(stream));
  expect(name, "memset node pointed there", host, [](int) { return 8; });
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaFree(own));
}

int main() {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int *host = nullptr, *device = nullptr;
  CUDA(cudaMallocHost(&host, kBytes));
  fill(host, 5);
  DRIVER(cuStreamWriteValue32(stream, reinterpret_cast<CUdeviceptr>(host + 9), 77, 0));
  CUDA(cudaStreamSynchronize(stream));
  expect("pinned", "written by a stream", host, [](int i) { return i == 9 ? 77 : 5; });
  CUDA(cudaFreeHost(host));
  CUDA(cudaMallocHost(&host, kBytes));
  memsetNodePointed("pinned", host, host, stream);
  CUDA(cudaFreeHost(host));
  CUDA(cudaMallocHost(&host, kBytes));
  memsetNode("pinned", host, host, stream);
  CUDA(cudaFreeHost(host));
  CUDA(cudaMallocHost(&host, kBytes));
  memsets("pinned", host, host, stream);
  copies("pinned", host, host, stream);
  CUDA(cudaFreeHost(host));

  CUDA(cudaMallocManaged(&host, kBytes));
  memsetNode("managed", host, host, stream);
  memsets("managed", host, host, stream);
  copies("managed", host, host, stream);
  peerCopies("managed", host, stream);
  CUDA(cudaFree(host));

  memsets("symbol", symbol, symbol, stream);
  copies("symbol", symbol, symbol, stream);
  peerCopies("symbol", symbol, stream);

  host = static_cast<int*>(std::malloc(kBytes));
  CUDA(cudaHostRegister(host, kBytes, cudaHostRegisterMapped));
  CUDA(cudaHostGetDevicePointer(&device, host, 0));
  memsetNode("registered", host, device, stream);
  memsets("registered", host, device, stream);
  copies("registered", host, device, stream);
  CUDA(cudaHostUnregister(host));
  std::free(host);
  CUDA(cudaStreamDestroy(stream));
  return check::pass();
}
