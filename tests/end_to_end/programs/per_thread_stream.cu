// Several host threads, each on its own default stream (built with --default-stream per-thread).
#include <atomic>
#include <thread>

#include "check.h"

__global__ void step(unsigned* values, int count, unsigned key) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] = values[i] * 1664525u + key;
}

__global__ void waitForFlag(volatile int* flag, int* seen) {
  while (*flag == 0) {
  }
  *seen = *flag;
}

constexpr int kThreads = 6, kCount = 20000, kRounds = 15;

static void worker(int index, uint64_t* digest) {
  std::vector<unsigned> values(kCount);
  for (int i = 0; i < kCount; ++i) values[i] = i + index;
  check::Device<unsigned> device(kCount);
  CUDA(cudaMemcpyAsync(device, values.data(), kCount * sizeof(unsigned), cudaMemcpyHostToDevice));
  for (int round = 0; round < kRounds; ++round) {
    step<<<8, 128>>>(device, kCount, index * 1000 + round);
    CUDA(cudaGetLastError());
    for (unsigned& value : values) value = value * 1664525u + index * 1000 + round;
  }
  std::vector<unsigned> got(kCount);
  CUDA(cudaMemcpyAsync(got.data(), device, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost));
  CUDA(cudaStreamSynchronize(0));
  if (got != values) check::fail("thread %d has other values", index);
  *digest = check::digest(got.data(), got.size() * sizeof(unsigned));
}

int main() {
  std::vector<std::thread> threads;
  uint64_t digests[kThreads] = {};
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(worker, i, &digests[i]);
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kThreads; ++i)
    check::say("thread %d: %016llx", i, static_cast<unsigned long long>(digests[i]));

  // A kernel on this thread's stream spins until another thread's copy, on that thread's stream, has come:
  // the default streams of two threads do not wait for each other.
  int *flag, *seen, *one;
  CUDA(cudaMalloc(&flag, sizeof(int)));
  CUDA(cudaMalloc(&seen, sizeof(int)));
  CUDA(cudaMallocHost(&one, sizeof(int)));
  CUDA(cudaMemset(flag, 0, sizeof(int)));
  CUDA(cudaDeviceSynchronize());
  waitForFlag<<<1, 1>>>(flag, seen);
  CUDA(cudaGetLastError());
  std::thread other([&] {
    *one = 123;
    CUDA(cudaMemcpyAsync(flag, one, sizeof(int), cudaMemcpyHostToDevice));
    CUDA(cudaStreamSynchronize(cudaStreamPerThread));
  });
  other.join();
  int result = 0;
  CUDA(cudaMemcpy(&result, seen, sizeof(int), cudaMemcpyDeviceToHost));
  check::say("the waiting kernel saw %d", result);
  REQUIRE(result == 123);

  // The legacy stream does wait for blocking streams, this thread's among them.
  step<<<64, 128, 0, cudaStreamPerThread>>>(reinterpret_cast<unsigned*>(flag), 1, 1);
  step<<<1, 1, 0, cudaStreamLegacy>>>(reinterpret_cast<unsigned*>(flag), 1, 2);
  CUDA(cudaStreamSynchronize(cudaStreamLegacy));
  CUDA(cudaStreamQuery(cudaStreamPerThread));
  CUDA(cudaFree(flag));
  CUDA(cudaFree(seen));
  CUDA(cudaFreeHost(one));
  return check::pass();
}
