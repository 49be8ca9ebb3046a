// Thousands of kernels behind a stream that waits for another thread's launch. A driver may make the
// launching thread wait when its queue is full; it must still let the other thread launch.
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"

__global__ void increment(unsigned* value) { *value = *value * 3 + 1; }
__global__ void release(unsigned* flag, unsigned value) {
  __threadfence_system();
  *flag = value;
}

typedef CUresult (*WaitValue)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

static unsigned expectedAfter(int count) {
  unsigned value = 0;
  for (int i = 0; i < count; ++i) value = value * 3 + 1;
  return value;
}

// The stream waits for a word that a kernel, launched by another thread on another stream, writes.
static void behindWord(int count) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  CUDA(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &found, 12000, cudaEnableDefault, &result));
  REQUIRE(result == cudaDriverEntryPointSuccess && found != nullptr);
  const auto waitValue = reinterpret_cast<WaitValue>(found);
  cudaStream_t waiting, other;
  CUDA(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  check::Device<unsigned> words(2);  // the counter and the flag
  CUDA(cudaMemset(words, 0, 2 * sizeof(unsigned)));
  CUDA(cudaDeviceSynchronize());
  increment<<<1, 1, 0, other>>>(words);  // so that nothing is loaded while the stream waits
  release<<<1, 1, 0, other>>>(words + 1, 0);
  CUDA(cudaMemsetAsync(words, 0, sizeof(unsigned), other));
  CUDA(cudaStreamSynchronize(other));

  REQUIRE(waitValue(waiting, reinterpret_cast<CUdeviceptr>(words + 1), 7, CU_STREAM_WAIT_VALUE_EQ) ==
          CUDA_SUCCESS);
  std::atomic<int> launched{0};
  std::thread releaser([&] {
    // Let the launches pile up until no more fit, or until all have been taken.
    int before = -1;
    while (launched != before || launched < 100) {
      before = launched;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    release<<<1, 1, 0, other>>>(words + 1, 7);
    CUDA(cudaGetLastError());
  });
  for (int i = 0; i < count; ++i) {
    increment<<<1, 1, 0, waiting>>>(words);
    CUDA(cudaGetLastError());
    if (i == 0) REQUIRE(cudaStreamQuery(waiting) == cudaErrorNotReady);
    ++launched;
  }
  CUDA(cudaStreamSynchronize(waiting));
  releaser.join();
  const unsigned value = words.read()[0];
  check::say("%d kernels behind a word: %u", count, value);
  REQUIRE(value == expectedAfter(count));
  CUDA(cudaStreamDestroy(waiting));
  CUDA(cudaStreamDestroy(other));
}

// The stream waits for an event of a stream that a host function holds up.
static void behindHostFunction(int count) {
  cudaStream_t waiting, other;
  cudaEvent_t event;
  CUDA(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  check::Device<unsigned> counter(1);
  CUDA(cudaMemset(counter, 0, sizeof(unsigned)));
  CUDA(cudaDeviceSynchronize());
  static std::atomic<bool> open{false};
  CUDA(cudaLaunchHostFunc(
      other,
      [](void*) {
        while (!open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      nullptr));
  CUDA(cudaEventRecord(event, other));
  CUDA(cudaStreamWaitEvent(waiting, event, 0));
  std::thread opener([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    open = true;
  });
  for (int i = 0; i < count; ++i) increment<<<1, 1, 0, waiting>>>(counter);
  CUDA(cudaStreamSynchronize(waiting));
  opener.join();
  const unsigned value = counter.read()[0];
  check::say("%d kernels behind a host function: %u", count, value);
  REQUIRE(value == expectedAfter(count));
  CUDA(cudaStreamDestroy(waiting));
  CUDA(cudaStreamDestroy(other));
  CUDA(cudaEventDestroy(event));
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--kernels", 5000);
  behindWord(count);
  behindHostFunction(count);
  return check::pass();
}
