// Host functions in stream order: they see what came before and come before what follows. CUDA calls inside a
// launched host function are not permitted.
#include <atomic>
#include <thread>

#include "check.h"

__global__ void increment(int* value) { *value += 1; }
__global__ void incrementAll(int* values, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] += 1;
}

struct Log {
  std::atomic<int> calls{0};
  int seen[64] = {};
  int* pinned = nullptr;
};

static void CUDART_CB recordValue(void* data) {
  Log* log = static_cast<Log*>(data);
  log->seen[log->calls++] = *log->pinned;
}

static void CUDART_CB doublePinned(void* data) { *static_cast<Log*>(data)->pinned *= 2; }

static cudaError_t insideResult = cudaSuccess;
static std::thread::id callbackThread;
static void CUDART_CB callsCuda(void*) {
  void* pointer = nullptr;
  insideResult = cudaMalloc(&pointer, 256);
  callbackThread = std::this_thread::get_id();
}

static void CUDART_CB streamCallback(cudaStream_t, cudaError_t status, void* data) {
  Log* log = static_cast<Log*>(data);
  log->seen[log->calls++] = status == cudaSuccess ? *log->pinned : -1;
}

// Kernels and host functions by turns, on the same memory.
constexpr int kShared = 3000;
static void CUDART_CB doubleAll(void* data) {
  for (int i = 0; i < kShared; ++i) static_cast<int*>(data)[i] *= 2;
}
static void takeTurns(const char* kind, cudaStream_t stream, int* host, int* device) {
  for (int i = 0; i < kShared; ++i) host[i] = i;
  for (int turn = 0; turn < 5; ++turn) {
    incrementAll<<<1, 128, 0, stream>>>(device, kShared);
    CUDA(cudaLaunchHostFunc(stream, doubleAll, host));
  }
  CUDA(cudaStreamSynchronize(stream));
  int wrong = 0;
  for (int i = 0; i < kShared; ++i) wrong += host[i] != 32 * i + 62;
  check::say("five turns each, %s: %d wrong", kind, wrong);
  REQUIRE(wrong == 0);
}

int main() {
  Log log;
  int* device;
  CUDA(cudaMallocHost(&log.pinned, sizeof(int)));
  CUDA(cudaMalloc(&device, sizeof(int)));
  CUDA(cudaMemset(device, 0, sizeof(int)));
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));

  // The function reads what the copy before it brought, and what it writes is what the copy after it takes.
  for (int i = 0; i < 10; ++i) {
    increment<<<1, 1, 0, stream>>>(device);
    CUDA(cudaMemcpyAsync(log.pinned, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaLaunchHostFunc(stream, recordValue, &log));
    CUDA(cudaLaunchHostFunc(stream, doublePinned, &log));
    CUDA(cudaMemcpyAsync(device, log.pinned, sizeof(int), cudaMemcpyHostToDevice, stream));
  }
  CUDA(cudaStreamSynchronize(stream));
  REQUIRE(log.calls == 10);
  int expected = 0;
  for (int i = 0; i < 10; ++i) {
    expected = expected + 1;
    if (log.seen[i] != expected) check::fail("call %d saw %d, expected %d", i, log.seen[i], expected);
    expected *= 2;
  }
  check::say("10 host functions saw 1 to %d", log.seen[9]);

  log.calls = 0;
  CUDA(cudaStreamAddCallback(stream, streamCallback, &log, 0));
  increment<<<1, 1, 0, stream>>>(device);
  CUDA(cudaMemcpyAsync(log.pinned, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamAddCallback(stream, streamCallback, &log, 0));
  CUDA(cudaStreamSynchronize(stream));
  REQUIRE(log.calls == 2 && log.seen[1] == log.seen[0] + 1);
  check::say("stream callbacks saw %d and %d", log.seen[0], log.seen[1]);

  CUDA(cudaLaunchHostFunc(stream, callsCuda, nullptr));
  CUDA(cudaStreamSynchronize(stream));
  check::say("cudaMalloc inside: %s", cudaGetErrorName(insideResult));
  REQUIRE(insideResult == cudaErrorNotPermitted);
  REQUIRE(callbackThread != std::this_thread::get_id());

  // Functions on one stream hold back another that waits for it.
  cudaStream_t other;
  cudaEvent_t event;
  CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  *log.pinned = 5;
  CUDA(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        *static_cast<Log*>(data)->pinned = 77;
      },
      &log));
  CUDA(cudaEventRecord(event, stream));
  CUDA(cudaStreamWaitEvent(other, event, 0));
  CUDA(cudaMemcpyAsync(device, log.pinned, sizeof(int), cudaMemcpyHostToDevice, other));
  int result = 0;
  CUDA(cudaMemcpyAsync(&result, device, sizeof(int), cudaMemcpyDeviceToHost, other));
  CUDA(cudaStreamSynchronize(other));
  check::say("after a slow function: %d", result);
  REQUIRE(result == 77);
  CUDA(cudaEventDestroy(event));
  CUDA(cudaStreamDestroy(other));

  int *shared = nullptr, *onDevice = nullptr;
  CUDA(cudaMallocManaged(&shared, kShared * sizeof(int)));
  takeTurns("managed memory", stream, shared, shared);
  CUDA(cudaFree(shared));
  CUDA(cudaHostAlloc(&shared, kShared * sizeof(int), cudaHostAllocMapped));
  CUDA(cudaHostGetDevicePointer(&onDevice, shared, 0));
  takeTurns("mapped memory", stream, shared, onDevice);
  CUDA(cudaFreeHost(shared));
  static int registered[kShared];
  CUDA(cudaHostRegister(registered, sizeof registered, cudaHostRegisterMapped));
  CUDA(cudaHostGetDevicePointer(&onDevice, registered, 0));
  takeTurns("registered memory", stream, registered, onDevice);
  CUDA(cudaHostUnregister(registered));
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaFreeHost(log.pinned));
  CUDA(cudaFree(device));
  return check::pass();
}
