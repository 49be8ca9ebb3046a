#include "separate_device.h"

#include "check.h"

__device__ int sharedTable[16];
__device__ int sharedCalls = 0;

static __device__ int elevenTimes(int value) { return value * 11; }
__device__ int (*chosenFunction)(int) = elevenTimes;

__host__ __device__ int mix(int value, int index) { return (value << 3) ^ (index * 2654435 + 17); }

static __global__ void fillTable() { sharedTable[threadIdx.x] = threadIdx.x * threadIdx.x; }

void fillTableOnDevice() {
  fillTable<<<1, 16>>>();
  CUDA(cudaGetLastError());
}

int readCallsInOtherFile() {
  int calls = 0;
  CUDA(cudaMemcpyFromSymbol(&calls, sharedCalls, sizeof calls));
  return calls;
}
