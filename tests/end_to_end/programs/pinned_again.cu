// Pinned memory comes and goes, and the next one may lie where the last one was: each holds its own bytes, in
// both directions.
#include "check.h"

constexpr int kCount = 1 << 18;
constexpr size_t kBytes = kCount * sizeof(int);
constexpr int kTurns = 20;

static void expectAll(int turn, const int* values, int expected) {
  for (int i = 0; i < kCount; ++i)
    if (values[i] != expected) check::fail("turn %d: [%d] is %x, expected %x", turn, i, values[i], expected);
}

int main() {
  int *there = nullptr, *back = nullptr;
  CUDA(cudaMalloc(&there, kBytes));
  CUDA(cudaMalloc(&back, kBytes));
  for (int turn = 0; turn < kTurns; ++turn) {
    int* pinned = nullptr;
    CUDA(cudaMallocHost(&pinned, kBytes));
    CUDA(cudaMemset(there, turn, kBytes));
    CUDA(cudaMemcpyAsync(pinned, there, kBytes, cudaMemcpyDeviceToHost));
    CUDA(cudaStreamSynchronize(nullptr));
    expectAll(turn, pinned, turn * 0x01010101);
    for (int i = 0; i < kCount; ++i) pinned[i] = ~turn;
    CUDA(cudaMemcpyAsync(back, pinned, kBytes, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpyAsync(pinned, back, kBytes, cudaMemcpyDeviceToHost));
    CUDA(cudaStreamSynchronize(nullptr));
    expectAll(turn, pinned, ~turn);
    CUDA(cudaFreeHost(pinned));
  }
  check::say("%d times", kTurns);
  return check::pass();
}
