// One device is reset, again and again, while another thread works on another device with every kind of
// host memory. Nothing of that is the reset's business: no value is lost, no call fails. With one device the
// other thread has a context of its own, and this one makes and destroys contexts. With --devices 2 a second
// device must be there.
#include <atomic>
#include <thread>

#include "driver_check.h"

constexpr int kCount = 1 << 18;
constexpr size_t kBytes = kCount * sizeof(int);
constexpr int kLives = 12;

__global__ void addTo(int* values, int amount) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) values[i] += amount;
}

// Up by one kind of memory, a kernel, and down by another.
static void pass(cudaStream_t stream, int* values, int* from, int* to, int turn) {
  for (int i = 0; i < kCount; i += 512) from[i] = turn + i;
  CUDA(cudaMemcpyAsync(values, from, kBytes, cudaMemcpyHostToDevice, stream));
  for (int i = 0; i < 8; ++i) addTo<<<kCount / 128, 128, 0, stream>>>(values, 1);
  CUDA(cudaGetLastError());
  CUDA(cudaMemcpyAsync(to, values, kBytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  for (int i = 0; i < kCount; i += 512)
    if (to[i] != turn + i + 8) check::fail("turn %d: [%d] is %d, expected %d", turn, i, to[i], turn + i + 8);
}

static void work(const std::atomic<bool>& enough) {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int *values = nullptr, *pinned = nullptr;
  CUDA(cudaMalloc(&values, kBytes));
  CUDA(cudaHostAlloc(&pinned, kBytes, cudaHostAllocDefault));
  std::vector<int> ordinary(kCount), registered(kCount);
  CUDA(cudaHostRegister(registered.data(), kBytes, cudaHostRegisterDefault));
  int* const memory[] = {ordinary.data(), pinned, registered.data()};
  for (int turn = 0; turn < 9 || !enough; ++turn)
    pass(stream, values, memory[turn % 3], memory[turn / 3 % 3], turn);
  CUDA(cudaHostUnregister(registered.data()));
  CUDA(cudaFreeHost(pinned));
  CUDA(cudaFree(values));
  CUDA(cudaStreamDestroy(stream));
}

// One life of a device or context: its memory is left to its end.
static void live() {
  int *values = nullptr, *pinned = nullptr;
  CUDA(cudaMalloc(&values, kBytes));
  CUDA(cudaMallocHost(&pinned, kBytes));
  std::vector<int> ordinary(kCount);
  pass(nullptr, values, ordinary.data(), pinned, 1);
  pass(nullptr, values, pinned, ordinary.data(), 2);
}

static void resets(int reset, int beside) {
  std::atomic<bool> enough{false}, begun{false};
  std::thread worker([&] {
    CUcontext own = nullptr;
    if (reset == beside)
      DRIVER(cuCtxCreate(&own, nullptr, 0, beside));
    else
      CUDA(cudaSetDevice(beside));
    begun = true;
    work(enough);
    if (own != nullptr) DRIVER(cuCtxDestroy(own));
  });
  while (!begun) std::this_thread::yield();
  CUDA(cudaSetDevice(reset));
  for (int life = 0; life < kLives; ++life) {
    CUcontext own = nullptr;
    if (reset == beside) DRIVER(cuCtxCreate(&own, nullptr, 0, reset));
    live();
    if (own != nullptr)
      DRIVER(cuCtxDestroy(own));
    else
      CUDA(cudaDeviceReset());
  }
  enough = true;
  worker.join();
}

// What a reset has ended, while another device is current.
static void askEnded(int reset, int beside) {
  cudaStream_t stream;
  cudaEvent_t event;
  CUDA(cudaSetDevice(reset));
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&event));
  CUDA(cudaEventRecord(event, stream));
  CUDA(cudaDeviceReset());
  CUDA(cudaSetDevice(beside));
  REQUIRE(cudaStreamQuery(stream) == cudaErrorContextIsDestroyed);
  REQUIRE(cudaEventQuery(event) == cudaErrorContextIsDestroyed);
  REQUIRE(cudaStreamDestroy(stream) == cudaErrorContextIsDestroyed);
  REQUIRE(cudaEventDestroy(event) == cudaErrorContextIsDestroyed);
  cudaGetLastError();
}

// What one device's pool gives back while another device is current, whose context then ends.
static void trimBeside(int reset, int pooled) {
  cudaMemPool_t pool;
  uint64_t all = UINT64_MAX;
  void* memory = nullptr;
  CUDA(cudaSetDevice(pooled));
  CUDA(cudaDeviceGetDefaultMemPool(&pool, pooled));
  CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
  CUDA(cudaMallocAsync(&memory, kBytes, nullptr));
  CUDA(cudaFreeAsync(memory, nullptr));
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaSetDevice(reset));
  CUDA(cudaFree(nullptr));
  CUDA(cudaMemPoolTrimTo(pool, 0));
  CUDA(cudaDeviceReset());
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // what is kept for a while has gone by then
  CUDA(cudaSetDevice(pooled));
  live();
  CUDA(cudaDeviceSynchronize());
}

int main(int argc, char** argv) {
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  REQUIRE(devices >= check::option(argc, argv, "--devices", 1));
  resets(0, devices - 1);
  check::say("the first one ended %d times", kLives);
  resets(devices - 1, 0);
  check::say("the last one ended %d times", kLives);
  if (devices > 1) {
    askEnded(0, devices - 1);
    trimBeside(0, devices - 1);
  }
  return check::pass();
}
