// A kernel that runs until memory it watches is written, while most of the device's memory is held. --hold:
// nobody writes it; says so and waits to be killed (memory_of_the_dead.sh). --mib N: so much instead of most.
#include <unistd.h>

#include "check.h"

__global__ void untilWritten(volatile int* stop, int* rounds) {
  while (*stop == 0) ++*rounds;
}

int main(int argc, char** argv) {
  const size_t mib = size_t{1} << 20;
  size_t free = 0, total = 0;
  CUDA(cudaMemGetInfo(&free, &total));
  const size_t bytes = check::option(argc, argv, "--mib", static_cast<int>(free / 2 / mib)) * mib;
  check::Device<int> stop(std::vector<int>{0}), rounds(std::vector<int>{1});
  const int one = 1;
  char* block = nullptr;
  cudaStream_t side;
  CUDA(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CUDA(cudaMalloc(&block, bytes));
  CUDA(cudaMemset(block, 7, bytes));
  CUDA(cudaDeviceSynchronize());
  untilWritten<<<1, 1>>>(stop, rounds);
  CUDA(cudaGetLastError());
  CUDA_GIVES(cudaErrorNotReady, cudaStreamQuery(nullptr));
  if (check::flag(argc, argv, "--hold")) {
    check::say("process %d holds %zu MiB", static_cast<int>(getpid()), bytes / mib);
    for (;;) pause();
  }
  CUDA(cudaMemcpyAsync(stop, &one, sizeof one, cudaMemcpyHostToDevice, side));
  CUDA(cudaDeviceSynchronize());
  REQUIRE(rounds.read()[0] >= 1);
  char last = 0;
  CUDA(cudaMemcpy(&last, block + bytes - 1, 1, cudaMemcpyDeviceToHost));
  REQUIRE(last == 7);
  return check::pass();
}
