// A synchronous copy to the device is there for kernels of any stream once it has returned, also of streams
// that do not wait for the default one; and for other threads' streams.
#include <thread>

#include "check.h"

static __global__ void add(const int* value, int* sum) { *sum += *value; }
static __global__ void wait(long long cycles) {
  for (const long long end = clock64() + cycles; clock64() < end;) {
  }
}

int main() {
  int *value, *sum, total = 0;
  CUDA(cudaMalloc(&value, 4));
  CUDA(cudaMalloc(&sum, 4));
  CUDA(cudaMemset(sum, 0, 4));
  CUDA(cudaDeviceSynchronize());
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int i = 1; i <= 300; ++i) {
    if (i % 50 == 0) wait<<<1, 1>>>(200000);  // the copy stands behind it, and so does the kernel
    CUDA(cudaMemcpy(value, &i, 4, cudaMemcpyHostToDevice));
    add<<<1, 1, 0, stream>>>(value, sum);
    CUDA(cudaStreamSynchronize(stream));
    total += i;
  }
  std::thread([&] {
    for (int i = 301; i <= 400; ++i) {
      CUDA(cudaMemcpy2D(value, 4, &i, 4, 4, 1, cudaMemcpyHostToDevice));
      add<<<1, 1, 0, stream>>>(value, sum);
      CUDA(cudaStreamSynchronize(stream));
      total += i;
    }
  }).join();
  int got = 0;
  CUDA(cudaMemcpy(&got, sum, 4, cudaMemcpyDeviceToHost));
  if (got != total) check::fail("the sum is %d, not %d", got, total);
  check::say("400 values were there in time: %d", got);
  return check::pass();
}
