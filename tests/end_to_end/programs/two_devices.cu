// Two devices in one process, through the runtime: the first and the last one, which may be the same. Memory,
// streams, symbols and events of each; copies between them; one thread for each. With --devices 2 both must
// be there.
#include <thread>

#include "check.h"

__device__ int bias;

__global__ void work(const int* input, int* output, int count, int factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) output[i] = input[i] * factor + bias;
}

constexpr int kCount = 20000;

struct Side {
  int device;
  cudaStream_t stream;
  cudaEvent_t done;
  int *input, *output;
};

static Side make(int device, int salt) {
  Side side = {device};
  CUDA(cudaSetDevice(device));
  CUDA(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&side.done, cudaEventDisableTiming));
  CUDA(cudaMalloc(&side.input, kCount * sizeof(int)));
  CUDA(cudaMalloc(&side.output, kCount * sizeof(int)));
  std::vector<int> values(kCount);
  for (int i = 0; i < kCount; ++i) values[i] = i + salt;
  CUDA(cudaMemcpy(side.input, values.data(), kCount * sizeof(int), cudaMemcpyHostToDevice));
  cudaPointerAttributes attributes;
  CUDA(cudaPointerGetAttributes(&attributes, side.input));
  REQUIRE(attributes.device == device);
  return side;
}

static void expect(const char* name, const int* device, int salt, int factor, int bias) {
  std::vector<int> got(kCount), expected(kCount);
  CUDA(cudaMemcpy(got.data(), device, kCount * sizeof(int), cudaMemcpyDefault));
  for (int i = 0; i < kCount; ++i) expected[i] = (i + salt) * factor + bias;
  check::same(name, got, expected);
}

static void run(const Side& side, int factor, int value) {
  CUDA(cudaSetDevice(side.device));
  CUDA(cudaMemcpyToSymbol(bias, &value, sizeof value));
  work<<<(kCount + 127) / 128, 128, 0, side.stream>>>(side.input, side.output, kCount, factor);
  CUDA(cudaGetLastError());
  CUDA(cudaEventRecord(side.done, side.stream));
}

// Direct access, where there are two devices and they can: a kernel on one reads the other's memory.
static void readOther(const Side& a, const Side& b) {
  int possible = 0;
  if (a.device != b.device) CUDA(cudaDeviceCanAccessPeer(&possible, a.device, b.device));
  if (possible) {
    CUDA(cudaSetDevice(a.device));
    CUDA(cudaDeviceEnablePeerAccess(b.device, 0));
    REQUIRE(cudaDeviceEnablePeerAccess(b.device, 0) == cudaErrorPeerAccessAlreadyEnabled);
    cudaGetLastError();
    const Side mixed = {a.device, a.stream, a.done, b.input, a.output};
    run(mixed, 1, 4);
    CUDA(cudaStreamSynchronize(a.stream));
    CUDA(cudaDeviceDisablePeerAccess(b.device));
  } else {
    CUDA(cudaMemcpy(a.input, b.input, kCount * sizeof(int), cudaMemcpyDefault));
    run(a, 1, 4);
    CUDA(cudaStreamSynchronize(a.stream));
  }
}

int main(int argc, char** argv) {
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  REQUIRE(devices >= check::option(argc, argv, "--devices", 1));
  const bool distinct = devices > 1;
  const Side a = make(0, 100), b = make(devices - 1, 7000);
  run(a, 3, 11);
  CUDA(cudaStreamSynchronize(a.stream));
  run(b, 5, -4);
  CUDA(cudaStreamSynchronize(b.stream));
  expect("first device", a.output, 100, 3, 11);
  expect("last device", b.output, 7000, 5, -4);

  // A symbol has an instance on every device.
  int value = 0;
  CUDA(cudaSetDevice(0));
  CUDA(cudaMemcpyFromSymbol(&value, bias, sizeof value));
  REQUIRE(value == (distinct ? 11 : -4));

  // The last device's results, copied to the first one and worked on there; an event orders the two streams.
  CUDA(cudaMemcpyPeerAsync(a.input, a.device, b.output, b.device, kCount * sizeof(int), b.stream));
  CUDA(cudaSetDevice(b.device));
  CUDA(cudaEventRecord(b.done, b.stream));
  CUDA(cudaSetDevice(a.device));
  CUDA(cudaStreamWaitEvent(a.stream, b.done, 0));
  run(a, 1, 1000);
  CUDA(cudaStreamSynchronize(a.stream));
  expect("from device to device", a.output, 7000, 5, 996);
  CUDA(cudaMemcpy(b.input, a.output, kCount * sizeof(int), cudaMemcpyDefault));
  expect("by address alone", b.input, 7000, 5, 996);

  readOther(a, b);
  expect("the other's memory", a.output, 7000, 5, 1000);

  // A thread for each device; the current device belongs to the thread.
  int current = -1;
  CUDA(cudaSetDevice(0));
  std::thread thread([&] {
    int before = -1;
    CUDA(cudaGetDevice(&before));
    REQUIRE(before == 0);
    CUDA(cudaSetDevice(b.device));
    work<<<(kCount + 127) / 128, 128, 0, b.stream>>>(b.input, b.output, kCount, 2);
    CUDA(cudaStreamSynchronize(b.stream));
  });
  thread.join();
  CUDA(cudaGetDevice(&current));
  REQUIRE(current == 0);
  expect("by another thread", b.output, 7000, 10, 1992 + (distinct ? -4 : 4));
  for (const Side& side : {a, b}) {
    CUDA(cudaSetDevice(side.device));
    CUDA(cudaStreamDestroy(side.stream));
    CUDA(cudaEventDestroy(side.done));
    CUDA(cudaFree(side.input));
    CUDA(cudaFree(side.output));
  }
  return check::pass();
}
