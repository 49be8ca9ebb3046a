// Memory that other processes have freed can be allocated, though they live on and may allocate again: four
// of them hold and free, and a fifth takes nearly all of a small lease. Natively at once; in a pool a moment
// later, or more where the machine is busy or their sessions are just being moved.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "check.h"

constexpr int kOthers = 4;
constexpr size_t kMiB = size_t{1} << 20;

static void holdAndFree(int tell, int hear) {
  for (const size_t mib : {60, 20}) {
    void* memory = nullptr;
    CUDA(cudaMalloc(&memory, mib * kMiB));
    CUDA(cudaMemset(memory, 1, mib * kMiB));
    CUDA(cudaFree(memory));
  }
  char word = 'f';
  REQUIRE(write(tell, &word, 1) == 1);
  while (read(hear, &word, 1) > 0) continue;  // until the fifth is done
  std::_Exit(0);
}

int main() {
  int said[2], done[2];
  REQUIRE(pipe(said) == 0 && pipe(done) == 0);
  for (int i = 0; i < kOthers; ++i) {
    if (fork() != 0) continue;
    close(done[1]);
    holdAndFree(said[1], done[0]);
  }
  char word = 0;
  for (int i = 0; i < kOthers; ++i) REQUIRE(read(said[0], &word, 1) == 1);
  size_t free = 0, total = 0;
  CUDA(cudaMemGetInfo(&free, &total));
  const size_t bytes = std::min(total - total / 16, size_t{900} * kMiB);
  void* memory = nullptr;
  for (int tries = 0; tries < 1000 && cudaMalloc(&memory, bytes) != cudaSuccess; ++tries) usleep(100'000);
  cudaGetLastError();
  REQUIRE(memory != nullptr);
  CUDA(cudaMemset(memory, 2, bytes));
  CUDA(cudaDeviceSynchronize());
  void* more = nullptr;
  REQUIRE(cudaMalloc(&more, total) == cudaErrorMemoryAllocation);  // and what nobody has freed cannot be had
  cudaGetLastError();
  CUDA(cudaFree(memory));
  close(done[1]);
  for (int i = 0; i < kOthers; ++i) {
    int status = -1;
    REQUIRE(wait(&status) > 0);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  return check::pass();
}
