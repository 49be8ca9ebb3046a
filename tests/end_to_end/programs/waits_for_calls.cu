// The device waits nearly all the time, each time for the program's own next calls: a stream for a value that
// the program writes later, and a host function until another stream has done something for it. In between
// the device is idle for a moment. --gap MS: how long it waits, at least; --until FILE: until there is one.
#include <cuda.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "check.h"

static std::atomic<bool> done{false};

static __global__ void add(unsigned* sum, unsigned what) { *sum += what; }

static void CUDART_CB waitForDone(void*) {
  while (!done) usleep(200);
}

struct Waits {
  unsigned *sums, *flag;
  cudaStream_t held, other;
  int gap;

  // Everything behind the wait is done once the value is written.
  void forValue(unsigned round) {
    const auto address = reinterpret_cast<CUdeviceptr>(flag);
    REQUIRE(cuStreamWaitValue32(held, address, round, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
    add<<<1, 1, 0, held>>>(sums, round);
    usleep(1000 * gap);
    add<<<1, 1, 0, other>>>(sums + 1, 1);
    REQUIRE(cuStreamWriteValue32(other, address, round, 0) == CUDA_SUCCESS);
    CUDA(cudaStreamSynchronize(held));
  }
  // A thread waits in the driver meanwhile.
  void forThread(unsigned round) {
    const auto address = reinterpret_cast<CUdeviceptr>(flag);
    REQUIRE(cuStreamWaitValue32(held, address, round, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
    add<<<1, 1, 0, held>>>(sums, round);
    std::thread waits([this] { CUDA(cudaStreamSynchronize(held)); });
    usleep(1000 * gap);
    CUDA(cudaMemcpyAsync(flag, &round, sizeof round, cudaMemcpyHostToDevice, other));
    waits.join();
  }
  // A thread frees memory meanwhile, for which the driver waits for the device; the others' calls go on.
  void forFree(unsigned round) {
    const auto address = reinterpret_cast<CUdeviceptr>(flag);
    void* pinned = nullptr;
    CUDA(cudaMallocHost(&pinned, 4 << 20));
    std::thread frees([pinned, this] {
      usleep(500 * gap);
      CUDA(cudaFreeHost(pinned));
    });
    REQUIRE(cuStreamWaitValue32(held, address, round, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
    add<<<1, 1, 0, held>>>(sums, round);
    usleep(1000 * gap);
    REQUIRE(cuStreamWriteValue32(other, address, round, 0) == CUDA_SUCCESS);
    frees.join();
    CUDA(cudaStreamSynchronize(held));
  }
  void forCall() {
    done = false;
    CUDA(cudaLaunchHostFunc(held, waitForDone, nullptr));
    add<<<1, 1, 0, held>>>(sums, 1);
    usleep(1000 * gap);
    add<<<1, 1, 0, other>>>(sums + 1, 1);
    CUDA(cudaStreamSynchronize(other));
    done = true;
    CUDA(cudaStreamSynchronize(held));
  }
};

int main(int argc, char** argv) {
  const char* until = nullptr;
  for (int i = 1; i + 1 < argc; ++i)
    if (std::string(argv[i]) == "--until") until = argv[i + 1];
  Waits waits{};
  waits.gap = check::option(argc, argv, "--gap", 5);
  CUDA(cudaMalloc(&waits.sums, 2 * sizeof(unsigned)));
  CUDA(cudaMalloc(&waits.flag, sizeof(unsigned)));
  CUDA(cudaMemset(waits.sums, 0, 2 * sizeof(unsigned)));
  CUDA(cudaMemset(waits.flag, 0, sizeof(unsigned)));
  CUDA(cudaStreamCreateWithFlags(&waits.held, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&waits.other, cudaStreamNonBlocking));
  // The driver loads a kernel when it is first launched, and waits for the device then.
  add<<<1, 1>>>(waits.sums, 0);
  CUDA(cudaDeviceSynchronize());
  if (until != nullptr) check::say("waits");
  unsigned round = 0, sums[2], expected[2] = {0, 0};
  do {
    waits.forValue(++round);
    waits.forThread(++round);
    waits.forFree(++round);
    waits.forCall();
    expected[0] += 3 * round - 3 + 1;
    expected[1] += 2;
  } while (until != nullptr ? access(until, F_OK) != 0 : round < 24);
  CUDA(cudaMemcpy(sums, waits.sums, sizeof sums, cudaMemcpyDeviceToHost));
  REQUIRE(sums[0] == expected[0] && sums[1] == expected[1]);
  if (until == nullptr) check::say("%u rounds, sums %u and %u", round / 3, sums[0], sums[1]);
  return check::pass();
}
