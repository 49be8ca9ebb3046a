// Threads that mix calls: allocations, copies, kernels, streams, events, host functions, symbols; each checks
// its own results, and a shared counter on the device adds up.
#include <atomic>
#include <thread>

#include "check.h"

__device__ unsigned long long grandTotal;

__global__ void mixIn(unsigned* words, int count, unsigned key) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    words[i] = (words[i] ^ key) * 2246822519u;
}
__global__ void addUp(const unsigned* words, int count) {
  unsigned long long sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) sum += words[i];
  atomicAdd(&grandTotal, sum);
}

static void one(int index, int rounds, unsigned long long* total) {
  CUDA(cudaSetDevice(0));
  check::Random random(1000 + index);
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::atomic<int> called{0};
  int expectedCalls = 0;
  for (int round = 0; round < rounds; ++round) {
    const int count = 1 + random.below(4000);
    std::vector<unsigned> host(count), got(count);
    for (unsigned& word : host) word = random.next();
    unsigned* device;
    const bool async = random.below(2);
    const size_t bytes = count * sizeof(unsigned);
    if (async)
      CUDA(cudaMallocAsync(&device, bytes, stream));
    else
      CUDA(cudaMalloc(&device, bytes));
    CUDA(cudaMemcpyAsync(device, host.data(), bytes, cudaMemcpyHostToDevice, stream));
    const int launches = 1 + random.below(5);
    for (int i = 0; i < launches; ++i) {
      const unsigned key = random.next();
      mixIn<<<4, 64, 0, stream>>>(device, count, key);
      CUDA(cudaGetLastError());
      for (unsigned& word : host) word = (word ^ key) * 2246822519u;
    }
    addUp<<<4, 64, 0, stream>>>(device, count);
    for (unsigned word : host) *total += word;
    if (random.below(4) == 0) {
      CUDA(cudaLaunchHostFunc(
          stream, [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); }, &called));
      ++expectedCalls;
    }
    cudaEvent_t event;
    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA(cudaMemcpyAsync(got.data(), device, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaEventRecord(event, stream));
    CUDA(cudaEventSynchronize(event));
    CUDA(cudaEventDestroy(event));
    if (got != host) check::fail("thread %d round %d has other values", index, round);
    // Errors belong to the thread that made them.
    if (index % 2 == 0 && round % 8 == 0) CUDA_IS(cudaErrorInvalidValue, cudaFree(&called));
    if (index % 2 == 0 && round % 8 == 0) CUDA_IS(cudaErrorInvalidValue, cudaGetLastError());
    if (index % 2 == 1) CUDA_IS(cudaSuccess, cudaGetLastError());
    if (async)
      CUDA(cudaFreeAsync(device, stream));
    else
      CUDA(cudaFree(device));
  }
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaStreamDestroy(stream));
  REQUIRE(called == expectedCalls);
}

int main(int argc, char** argv) {
  const int threads = check::option(argc, argv, "--threads", 6),
            rounds = check::option(argc, argv, "--rounds", 40);
  std::vector<unsigned long long> totals(threads);
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) running.emplace_back(one, i, rounds, &totals[i]);
  for (std::thread& thread : running) thread.join();
  unsigned long long expected = 0, total = 0;
  for (unsigned long long part : totals) expected += part;
  CUDA(cudaMemcpyFromSymbol(&total, grandTotal, sizeof total));
  check::say("%d threads, %d rounds each: %llu", threads, rounds, total);
  REQUIRE(total == expected);
  return check::pass();
}
