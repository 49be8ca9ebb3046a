// Every context has a kernel's variables of its own, and they are what the kernels there made of them: nobody
// asks for their address, and no copy names them. The first device and the last, which may be the same. With
// --devices 2 a second device must be there.
#include "check.h"

constexpr int kRounds = 40, kBins = 64;

__device__ int total = 5;
__device__ int bins[kBins];
__device__ int* latest;  // an address in a variable: it has to hold wherever the session is

__global__ void add(int value) {
  total += value;
  bins[value % kBins] += value;
  latest = &bins[value % kBins];
}

__global__ void twice() { total *= 2; }

__global__ void report(int* out) {
  out[0] = total;
  out[1] = *latest;
  for (int i = 0; i < kBins; ++i) out[2 + i] = bins[i];
}

struct Expected {
  int total = 5, latest = 0, bins[kBins] = {};
  void add(int value) {
    total += value;
    bins[value % kBins] += value;
    latest = value % kBins;
  }
};

static void compare(const char* name, int device, const Expected& expected) {
  CUDA(cudaSetDevice(device));
  int* memory = nullptr;
  CUDA(cudaMalloc(&memory, (2 + kBins) * sizeof(int)));
  report<<<1, 1>>>(memory);
  int got[2 + kBins];
  CUDA(cudaMemcpy(got, memory, sizeof got, cudaMemcpyDeviceToHost));
  CUDA(cudaFree(memory));
  if (got[0] != expected.total) check::fail("%s: %d and not %d", name, got[0], expected.total);
  if (got[1] != expected.bins[expected.latest]) check::fail("%s: the pointer shows %d", name, got[1]);
  for (int i = 0; i < kBins; ++i)
    if (got[2 + i] != expected.bins[i]) check::fail("%s: bin %d has %d", name, i, got[2 + i]);
  check::say("%s is right", name);
}

int main(int argc, char** argv) {
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  if (devices < check::option(argc, argv, "--devices", 1)) check::fail("only %d devices", devices);
  const int last = devices - 1;
  Expected expected[2];
  // The kernels come to the devices in another order.
  CUDA(cudaSetDevice(0));
  twice<<<1, 1>>>();
  expected[0].total *= 2;
  for (int round = 0; round < kRounds; ++round)
    for (const int device : {0, last}) {
      Expected& its = expected[device == 0 ? 0 : 1];
      CUDA(cudaSetDevice(device));
      add<<<1, 1>>>(round * 3 + device);
      its.add(round * 3 + device);
      if (round == kRounds / 2) {
        twice<<<1, 1>>>();
        its.total *= 2;
      }
      CUDA(cudaDeviceSynchronize());
    }
  compare("the first device", 0, expected[0]);
  compare("the last device", last, expected[last == 0 ? 0 : 1]);

  // A graph's kernel is loaded where the graph is launched.
  cudaStream_t stream;
  CUDA(cudaSetDevice(last));
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  add<<<1, 1, 0, stream>>>(7);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 8; ++i) {
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    expected[last == 0 ? 0 : 1].add(7);
  }
  compare("after a graph", last, expected[last == 0 ? 0 : 1]);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
  return check::pass();
}
