// Errors that do not stick: what each misuse gives, that the last error is remembered until it is read, and
// that the next correct call works.
#include "check.h"

__device__ int known;
static int unknown;

__global__ void touch(int* values) { values[threadIdx.x] = threadIdx.x; }

// Gives the error, leaves it as the last one, and peeking does not take it away.
#define MISUSE(expected, call)                  \
  do {                                          \
    CUDA_GIVES(expected, call);                 \
    REQUIRE(cudaPeekAtLastError() == expected); \
    REQUIRE(cudaGetLastError() == expected);    \
    REQUIRE(cudaGetLastError() == cudaSuccess); \
  } while (0)

static void memory() {
  void* pointer = nullptr;
  MISUSE(cudaErrorMemoryAllocation, cudaMalloc(&pointer, static_cast<size_t>(1) << 46));
  CUDA(cudaMalloc(&pointer, 1000));
  MISUSE(cudaErrorInvalidValue, cudaMalloc(nullptr, 16));
  void* nothing = &pointer;
  CUDA(cudaMalloc(&nothing, 0));
  REQUIRE(nothing == nullptr);
  CUDA(cudaFree(nullptr));
  MISUSE(cudaErrorInvalidValue, cudaFree(&pointer));
  MISUSE(cudaErrorInvalidValue, cudaFree(static_cast<char*>(pointer) + 16));
  MISUSE(cudaErrorInvalidValue, cudaFreeHost(pointer));
  CUDA(cudaFree(pointer));
  MISUSE(cudaErrorInvalidValue, cudaFree(pointer));
}

static void copies() {
  int host[64] = {};
  check::Device<int> device(64);
  int* none = nullptr;
  MISUSE(cudaErrorInvalidMemcpyDirection, cudaMemcpy(device, host, 256, static_cast<cudaMemcpyKind>(9)));
  MISUSE(cudaErrorInvalidValue, cudaMemcpy(device, host, 1 << 30, cudaMemcpyHostToDevice));
  MISUSE(cudaErrorInvalidValue, cudaMemcpy(none, host, 256, cudaMemcpyHostToDevice));
  MISUSE(cudaErrorInvalidValue, cudaMemcpy(host, none, 256, cudaMemcpyDeviceToHost));
  MISUSE(cudaErrorInvalidValue, cudaMemcpy(host, host, 256, cudaMemcpyDeviceToDevice));
  MISUSE(cudaErrorInvalidValue, cudaMemset(host, 0, 256));
  MISUSE(cudaErrorInvalidValue, cudaMemset(device, 0, 1 << 30));
  CUDA(cudaMemcpy(device, host, 0, cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(device, host, 256, cudaMemcpyDefault));
  CUDA(cudaMemcpy(host, host + 32, 128, cudaMemcpyHostToHost));
}

static void symbols() {
  int value = 0;
  void* address = nullptr;
  size_t size = 0;
  MISUSE(cudaErrorInvalidSymbol, cudaMemcpyToSymbol(unknown, &value, sizeof value));
  MISUSE(cudaErrorInvalidSymbol, cudaMemcpyFromSymbol(&value, unknown, sizeof value));
  MISUSE(cudaErrorInvalidSymbol, cudaGetSymbolAddress(&address, unknown));
  MISUSE(cudaErrorInvalidSymbol, cudaGetSymbolSize(&size, unknown));
  MISUSE(cudaErrorInvalidValue, cudaMemcpyToSymbol(known, &value, sizeof value, 4));
  CUDA(cudaMemcpyToSymbol(known, &value, sizeof value));
}

static void launches() {
  check::Device<int> device(1024);
  touch<<<1, 2048>>>(device);
  REQUIRE(cudaPeekAtLastError() == cudaErrorInvalidValue);
  touch<<<1, 32>>>(device);  // works, and does not clear the error
  CUDA(cudaDeviceSynchronize());
  CUDA_GIVES(cudaErrorInvalidValue, cudaGetLastError());
  CUDA_GIVES(cudaSuccess, cudaGetLastError());
  touch<<<1, 32, 1 << 20>>>(device);
  CUDA_GIVES(cudaErrorInvalidValue, cudaGetLastError());
  void* arguments[] = {nullptr};
  MISUSE(cudaErrorInvalidResourceHandle,
         cudaLaunchKernel(reinterpret_cast<void*>(&unknown), dim3(1), dim3(1), arguments, 0, 0));
  touch<<<1, 64>>>(device);
  CUDA(cudaGetLastError());
  REQUIRE(device.read()[63] == 63);
}

static void objects() {
  cudaStream_t stream;
  cudaEvent_t event, unrecorded;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&event));
  CUDA(cudaEventCreate(&unrecorded));
  CUDA_GIVES(cudaSuccess, cudaEventQuery(unrecorded));
  float milliseconds = 0;
  CUDA(cudaEventRecord(event, stream));
  CUDA(cudaEventSynchronize(event));
  MISUSE(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&milliseconds, event, unrecorded));
  MISUSE(cudaErrorInvalidValue, cudaStreamCreateWithFlags(&stream, 0x100));
  MISUSE(cudaErrorInvalidValue, cudaEventCreateWithFlags(&event, 0x1000));
  MISUSE(cudaErrorInvalidResourceHandle, cudaEventRecord(nullptr, stream));
  MISUSE(cudaErrorInvalidResourceHandle, cudaStreamWaitEvent(stream, nullptr, 0));
  MISUSE(cudaErrorInvalidResourceHandle, cudaEventDestroy(nullptr));
  CUDA(cudaEventDestroy(event));
  CUDA(cudaEventDestroy(unrecorded));
  CUDA(cudaStreamDestroy(stream));
}

static void devices() {
  int count = 0, value = 0;
  CUDA(cudaGetDeviceCount(&count));
  MISUSE(cudaErrorInvalidDevice, cudaSetDevice(-1));
  MISUSE(cudaErrorInvalidDevice, cudaSetDevice(count));
  MISUSE(cudaErrorInvalidDevice, cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, count));
  MISUSE(cudaErrorInvalidValue, cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(9999), 0));
  CUDA(cudaSetDevice(0));
  REQUIRE(std::strcmp(cudaGetErrorName(cudaErrorInvalidValue), "cudaErrorInvalidValue") == 0);
  REQUIRE(std::strcmp(cudaGetErrorString(cudaErrorInvalidValue), "invalid argument") == 0);
  REQUIRE(std::strcmp(cudaGetErrorName(static_cast<cudaError_t>(12345)), "unrecognized error code") == 0);
}

int main() {
  memory();
  copies();
  symbols();
  launches();
  objects();
  devices();
  return check::pass();
}
