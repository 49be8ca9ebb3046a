// Whether a kernel sees what the program writes to mapped memory while it runs, as it does natively.
//   mapped_live           writes before the kernel runs, which it sees everywhere
//   mapped_live --asks    tries it for each line of standard input, and says "live" if the kernel has ended by that, or "late".
//                         It waits for the end for 20 s, or where the line is "late" for 0.3 s. For a line "time" it says what
//                         a launch takes with the wait for its end, in microseconds: the median of many.
// Behind each line it leaves a kernel that writes to mapped and registered memory, and asks for nothing of that before the next
// one. What kernels and the program wrote before must be there each time.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>

#include "check.h"

constexpr int kWords = 4096;

// Ends when the program's word has come, or the copy of another stream.
__global__ void await(volatile int* mapped, volatile int* copied, int round) {
  while (mapped[0] != round && *copied != round) {
  }
}

__global__ void answer(int* mapped, int round) {
  for (int i = kWords / 2 + threadIdx.x; i < kWords; i += blockDim.x) mapped[i] = round + i;
}

__global__ void leave(int* mapped, int* registered, int round) {
  for (int i = threadIdx.x; i < kWords; i += blockDim.x) {
    mapped[i] = round ^ i;
    registered[i] += i;
  }
}

static int *mapped, *copied, *word, *left, *registered, *registeredThere;
static cudaStream_t runs, copies;

static bool ends(int milliseconds) {
  for (; milliseconds > 0; milliseconds -= 10) {
    const cudaError_t status = cudaStreamQuery(runs);
    if (status == cudaSuccess) return true;
    if (status != cudaErrorNotReady) CUDA(status);
    usleep(10'000);
  }
  return false;
}

// 0: what it waits for is written ahead of it.
static bool tryIt(int round, int milliseconds) {
  if (milliseconds == 0) mapped[0] = round;
  await<<<1, 1, 0, runs>>>(mapped, copied, round);
  CUDA(cudaGetLastError());
  usleep(20'000);
  mapped[0] = round;
  const bool live = ends(milliseconds == 0 ? 20'000 : milliseconds);
  *word = round;
  CUDA(cudaMemcpyAsync(copied, word, sizeof *word, cudaMemcpyHostToDevice, copies));
  CUDA(cudaStreamSynchronize(copies));
  answer<<<1, 64, 0, runs>>>(mapped, round);
  CUDA(cudaGetLastError());
  for (int i = 1; i < kWords / 2; ++i) mapped[i] = round - i;
  CUDA(cudaStreamSynchronize(runs));
  for (int i = 1; i < kWords; ++i)
    if (mapped[i] != (i < kWords / 2 ? round - i : round + i)) check::fail("round %d: word %d is %d", round, i, mapped[i]);
  return live;
}

static double medianWait() {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < 3000; ++i) {
    const auto began = Clock::now();
    await<<<1, 1, 0, runs>>>(mapped, copied, mapped[0]);  // which is there
    CUDA(cudaStreamSynchronize(runs));
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

static void leaveSomething(int round) {
  leave<<<1, 64, 0, runs>>>(left, registeredThere, round);
  CUDA(cudaGetLastError());
}

static void lookAtLeft(int round) {
  CUDA(cudaStreamSynchronize(runs));
  for (int i = 0; i < kWords; ++i) {
    if (left[i] != (round ^ i)) check::fail("round %d: word %d of what was left is %d", round, i, left[i]);
    if (registered[i] != round * i) check::fail("round %d: registered word %d is %d", round, i, registered[i]);
  }
}

int main(int argc, char** argv) {
  CUDA(cudaHostAlloc(&mapped, kWords * sizeof(int), cudaHostAllocMapped));
  CUDA(cudaHostAlloc(&left, kWords * sizeof(int), cudaHostAllocMapped));
  REQUIRE(posix_memalign(reinterpret_cast<void**>(&registered), 4096, kWords * sizeof(int)) == 0);
  std::memset(registered, 0, kWords * sizeof(int));
  CUDA(cudaHostRegister(registered, kWords * sizeof(int), cudaHostRegisterMapped));
  CUDA(cudaHostGetDevicePointer(&registeredThere, registered, 0));
  CUDA(cudaMallocHost(&word, sizeof *word));
  CUDA(cudaMalloc(&copied, sizeof *copied));
  CUDA(cudaMemset(copied, 0, sizeof *copied));
  CUDA(cudaStreamCreateWithFlags(&runs, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
  CUDA(cudaDeviceSynchronize());
  if (!tryIt(1, 0)) check::fail("what was written before the kernel ran was not there");
  int round = 1;
  leaveSomething(round);
  std::string line;
  while (check::flag(argc, argv, "--asks") && std::getline(std::cin, line)) {
    if (line == "time") {
      check::say("%.2f", medianWait());
      continue;
    }
    lookAtLeft(round++);
    const bool live = tryIt(round, line == "late" ? 300 : 20'000);
    leaveSomething(round);
    check::say("%s", live ? "live" : "late");
  }
  lookAtLeft(round);
  return check::pass();
}
