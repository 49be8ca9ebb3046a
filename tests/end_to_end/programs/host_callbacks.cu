// Host functions in stream order: they see what came before and come before what follows. CUDA calls inside a
// launched host function are not permitted.
#include <atomic>
#include <thread>

#include "check.h"

__global__ void increment(int* value) { *value += 1; }

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
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaFreeHost(log.pinned));
  CUDA(cudaFree(device));
  return check::pass();
}
