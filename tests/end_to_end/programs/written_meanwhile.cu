// Threads that write memory which kernels, graphs and copies read: in halves, with a pause between them, so that
// the program writes, and begins calls, at any moment of what becomes of its session meanwhile.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"

static constexpr int kThreads = 7, kRounds = 12;
static constexpr int kCount = 20'000;       // of each range's ints
static constexpr int kLarge = 700'000;     // more than one slot of staging memory
static constexpr size_t kBytes = kCount * sizeof(int);

__global__ void countOthers(const int* values, int count, int wanted, int* others) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    if (values[i] != wanted) atomicAdd(others, 1);
}
__global__ void countUnlikeFirst(const int* values, int count, int* others) {
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    if (values[i] != values[0]) atomicAdd(others, 1);
}
__global__ void addOne(int* values, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) ++values[i];
}

// The first thread is slow, and the others go on until it is done. The last one copies all the time; those between
// write when its calls have hung for a while, each for longer than the one before.
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
static std::atomic<bool> done{false};
static std::atomic<Clock::time_point> lastCall{Clock::now()};
static void nap(int thread, int round) {
  if (thread == kThreads - 1) return;
  if (thread == 0) return std::this_thread::sleep_for(milliseconds(25 + round % 9));
  const milliseconds hangs(20 * thread);
  const auto end = Clock::now() + hangs + milliseconds(10);
  while (Clock::now() < end && Clock::now() - lastCall.load() < hangs && !done)
    std::this_thread::sleep_for(milliseconds(1));
}

// A graph that copies `pinned` to the device, compares it there, and brings its first value back.
static cudaGraphExec_t makeGraph(cudaStream_t stream, const int* pinned, int* device, int* others, int* first) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CUDA(cudaMemcpyAsync(device, pinned, kBytes, cudaMemcpyHostToDevice, stream));
  countUnlikeFirst<<<1, 256, 0, stream>>>(device, kCount, others);
  CUDA(cudaMemcpyAsync(first, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CUDA(cudaGraphDestroy(graph));
  return exec;
}

static void work(int thread) {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int *mapped, *pinned, *copied, *counted, *first, *back;
  CUDA(cudaHostAlloc(&mapped, kBytes, cudaHostAllocMapped));
  CUDA(cudaHostAlloc(&counted, kBytes, cudaHostAllocMapped));
  CUDA(cudaMallocHost(&pinned, kBytes));
  CUDA(cudaMallocHost(&copied, kBytes));
  CUDA(cudaMallocHost(&first, sizeof(int)));
  CUDA(cudaMallocHost(&back, kBytes));
  std::vector<int> own(kLarge), ownBack(kLarge);
  check::Device<int> device(kCount), large(kLarge), others(1);
  CUDA(cudaMemset(others, 0, sizeof(int)));
  for (int i = 0; i < kCount; ++i) counted[i] = 0;
  const cudaGraphExec_t graph = makeGraph(stream, copied, device, others, first);
  for (int round = 1; thread == 0 ? round <= kRounds : !done; ++round) {
    for (int half = 0; half < 2; ++half) {
      for (int i = half * kCount / 2; i < (half + 1) * kCount / 2; ++i) mapped[i] = pinned[i] = copied[i] = round;
      for (int i = half * kLarge / 2; i < (half + 1) * kLarge / 2; ++i) own[i] = round;
      nap(thread, 2 * round + half);
    }
    countOthers<<<4, 128, 0, stream>>>(mapped, kCount, round, others);
    countOthers<<<4, 128, 0, stream>>>(pinned, kCount, round, others);
    addOne<<<1, 256, 0, stream>>>(counted, kCount);
    CUDA(cudaGraphLaunch(graph, stream));
    CUDA(cudaMemcpyAsync(large, own.data(), kLarge * sizeof(int), cudaMemcpyHostToDevice, stream));
    countOthers<<<4, 128, 0, stream>>>(large, kLarge, round, others);
    if (thread == kThreads - 1) lastCall = Clock::now();
    CUDA(cudaMemcpyAsync(large, copied, kBytes, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemcpyAsync(back, large, kBytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaMemcpyAsync(ownBack.data(), large, kLarge * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    if (thread == kThreads - 1) lastCall = Clock::now();
    int wrong = 0;
    CUDA(cudaMemcpy(&wrong, others, sizeof wrong, cudaMemcpyDeviceToHost));
    if (wrong != 0 || *first != round) check::fail("round %d: %d wrong, %d first", round, wrong, *first);
    for (int i = 0; i < kCount; ++i)
      if (counted[i] != round || back[i] != round)
        check::fail("round %d: counted %d, copied %d at %d", round, counted[i], back[i], i);
    for (int i = 0; i < kLarge; ++i)
      if (ownBack[i] != round) check::fail("round %d: %d came back at %d", round, ownBack[i], i);
  }
  if (thread == 0) done = true;
  CUDA(cudaGraphExecDestroy(graph));
  for (int* memory : {mapped, pinned, copied, counted, first, back}) CUDA(cudaFreeHost(memory));
  CUDA(cudaStreamDestroy(stream));
}

int main() {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
  check::say("%d threads read what they wrote", kThreads);
  return check::pass();
}
