// Whether a kernel sees what the program writes to mapped memory while it runs, as it does natively.
//   mapped_live           writes before the kernel runs, which it sees everywhere
//   mapped_live --asks    tries it, while the kernel runs, for each line of standard input, and says "live" or "late"
// What the kernel and the program wrote to the memory before must be there each time.
#include <unistd.h>

#include <iostream>
#include <string>

#include "check.h"

constexpr int kWords = 4096;

// Ends when the program's word has come, or the copy of another stream.
__global__ void await(volatile int* mapped, volatile int* copied, int round, int* seen) {
  while (mapped[0] != round && *copied != round) {
  }
  *seen = mapped[0] == round ? 1 : 0;
}

__global__ void answer(int* mapped, int round) {
  for (int i = kWords / 2 + threadIdx.x; i < kWords; i += blockDim.x) mapped[i] = round + i;
}

static int *mapped, *copied, *seen, *word;
static cudaStream_t runs, copies;

static bool tryIt(int round, bool before) {
  if (before) mapped[0] = round;
  await<<<1, 1, 0, runs>>>(mapped, copied, round, seen);
  CUDA(cudaGetLastError());
  if (!before) {
    usleep(20'000);
    mapped[0] = round;
    usleep(200'000);
  }
  *word = round;
  CUDA(cudaMemcpyAsync(copied, word, sizeof *word, cudaMemcpyHostToDevice, copies));
  CUDA(cudaStreamSynchronize(copies));
  answer<<<1, 64, 0, runs>>>(mapped, round);
  CUDA(cudaGetLastError());
  for (int i = 1; i < kWords / 2; ++i) mapped[i] = round - i;
  int live = 0;
  CUDA(cudaMemcpyAsync(&live, seen, sizeof live, cudaMemcpyDeviceToHost, runs));
  CUDA(cudaStreamSynchronize(runs));
  for (int i = 1; i < kWords; ++i)
    if (mapped[i] != (i < kWords / 2 ? round - i : round + i)) check::fail("round %d: word %d is %d", round, i, mapped[i]);
  return live != 0;
}

int main(int argc, char** argv) {
  CUDA(cudaHostAlloc(&mapped, kWords * sizeof(int), cudaHostAllocMapped));
  CUDA(cudaMallocHost(&word, sizeof *word));
  CUDA(cudaMalloc(&copied, sizeof *copied));
  CUDA(cudaMalloc(&seen, sizeof *seen));
  CUDA(cudaMemset(copied, 0, sizeof *copied));
  CUDA(cudaStreamCreateWithFlags(&runs, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
  CUDA(cudaDeviceSynchronize());
  if (!tryIt(1, true)) check::fail("what was written before the kernel ran was not there");
  int round = 1;
  std::string line;
  while (check::flag(argc, argv, "--asks") && std::getline(std::cin, line))
    check::say("%s", tryIt(++round, false) ? "live" : "late");
  return check::pass();
}
