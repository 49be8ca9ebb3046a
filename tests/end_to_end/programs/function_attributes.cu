// What the runtime tells of functions and of occupancy. Numbers differ between devices; their relations do
// not.
#include "check.h"

__global__ void small(int* output) { output[threadIdx.x] = threadIdx.x; }

__global__ void __launch_bounds__(128) withShared(int* output) {
  __shared__ int buffer[2048];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) buffer[i] = i;
  __syncthreads();
  output[threadIdx.x] = buffer[2047 - threadIdx.x];
}

__constant__ int lookup[300];
__global__ void withLocal(int* output, int at) {
  int scratch[100];
  for (int i = 0; i < 100; ++i) scratch[i] = lookup[i] + i;
  for (int i = 0; i < 100; ++i) scratch[(i * at) % 100] += i;
  output[threadIdx.x] = scratch[at % 100];
}

int main() {
  cudaFuncAttributes attributes;
  CUDA(cudaFuncGetAttributes(&attributes, small));
  REQUIRE(attributes.sharedSizeBytes == 0 && attributes.localSizeBytes == 0);
  REQUIRE(attributes.maxThreadsPerBlock == 1024 && attributes.numRegs > 0 && attributes.numRegs <= 255);
  REQUIRE(attributes.ptxVersion == 75 && attributes.binaryVersion >= 75);
  CUDA(cudaFuncGetAttributes(&attributes, withShared));
  REQUIRE(attributes.sharedSizeBytes == 8192 && attributes.maxThreadsPerBlock == 128);
  CUDA(cudaFuncGetAttributes(&attributes, withLocal));
  REQUIRE(attributes.localSizeBytes >= 400);
  check::say("attributes are as written");

  int few = 0, many = 0, limited = 0, multiprocessors = 0, threadsPerMultiprocessor = 0;
  CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  CUDA(cudaDeviceGetAttribute(&threadsPerMultiprocessor, cudaDevAttrMaxThreadsPerMultiProcessor, 0));
  REQUIRE(multiprocessors >= 1 && threadsPerMultiprocessor >= 1024);
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&few, small, 1024, 0));
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&many, small, 64, 0));
  REQUIRE(few >= 1 && many >= few && many * 64 <= threadsPerMultiprocessor);
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&limited, small, 64, 40000));
  REQUIRE(limited >= 1 && limited <= many);
  // More dynamic shared memory, never more blocks.
  int before = many;
  for (size_t bytes = 0; bytes <= 48 << 10; bytes += 4096) {
    int blocks = 0;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, small, 64, bytes));
    REQUIRE(blocks <= before);
    before = blocks;
  }

  int grid = 0, block = 0;
  CUDA(cudaOccupancyMaxPotentialBlockSize(&grid, &block, withShared, 0, 0));
  REQUIRE(block > 0 && block <= 128 && block % 32 == 0 && grid >= multiprocessors);
  check::say("occupancy is consistent");
  check::Device<int> output(1024);
  withShared<<<1, block>>>(output);
  CUDA(cudaGetLastError());
  REQUIRE(output.read()[5] == 2042);

  size_t available = 0;
  CUDA(cudaOccupancyAvailableDynamicSMemPerBlock(&available, small, 1, 64));
  REQUIRE(available >= 48 << 10);
  CUDA(cudaFuncSetAttribute(small, cudaFuncAttributePreferredSharedMemoryCarveout, 50));
  CUDA(cudaFuncSetAttribute(small, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
  CUDA(cudaFuncGetAttributes(&attributes, small));
  REQUIRE(attributes.maxDynamicSharedSizeBytes == 60000 && attributes.preferredShmemCarveout == 50);
  CUDA(cudaFuncSetCacheConfig(small, cudaFuncCachePreferL1));
  const char* name = nullptr;
  CUDA(cudaFuncGetName(&name, reinterpret_cast<const void*>(withLocal)));
  REQUIRE(std::strstr(name, "withLocal") != nullptr);
  CUDA_GIVES(cudaErrorInvalidResourceHandle,
             cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&available)));
  cudaGetLastError();
  size_t size = 0;
  CUDA(cudaFuncGetParamInfo(reinterpret_cast<const void*>(withLocal), 1, &available, &size));
  REQUIRE(available == 8 && size == 4);
  check::say("setting attributes works");
  return check::pass();
}
