// An event recorded again, on another stream, before its first record was reached: it stands for the last
// record alone, also when the first one is reached after it.
#include <atomic>
#include <thread>

#include "check.h"

static void holdUp(void* gate) {
  while (!static_cast<std::atomic<bool>*>(gate)->load()) std::this_thread::yield();
}

int main() {
  cudaStream_t held, idle;
  cudaEvent_t event, other;
  CUDA(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&idle, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CUDA(cudaEventCreateWithFlags(&other, cudaEventDisableTiming));
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> gate{false};
    CUDA(cudaLaunchHostFunc(held, holdUp, &gate));
    CUDA(cudaEventRecord(event, held));
    CUDA(cudaEventRecord(other, held));
    REQUIRE(cudaEventQuery(event) == cudaErrorNotReady);
    CUDA(cudaEventRecord(event, idle));
    CUDA(cudaEventSynchronize(event));
    CUDA(cudaEventQuery(event));
    REQUIRE(cudaEventQuery(other) == cudaErrorNotReady);
    gate = true;
    CUDA(cudaEventSynchronize(other));
    CUDA(cudaStreamSynchronize(held));
    CUDA(cudaEventQuery(event));  // the first record has been reached since
    CUDA(cudaEventSynchronize(event));
    if (round % 4 != 0) continue;
    CUDA(cudaEventDestroy(event));
    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  check::say("20 times recorded on two streams: the last record counts");
  return check::pass();
}
