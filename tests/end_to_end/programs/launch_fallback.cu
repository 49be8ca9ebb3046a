// Launches that fail on their shape and the fallback that works, as libraries do it: the error is
// synchronous, does not stick, and the next launch of the same kernel is fine.
#include "check.h"

__global__ void sumShared(const int* input, int* output, int count) {
  extern __shared__ int buffer[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) buffer[i] = input[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < count; ++i) sum += buffer[i];
    *output = sum;
  }
}

__global__ void __launch_bounds__(256) bounded(int* output) {
  if (threadIdx.x == 0) output[blockIdx.x] = blockDim.x;
}

__global__ void plain(int* output) {
  if (threadIdx.x == 0) output[blockIdx.x] = blockIdx.x + gridDim.x * 100;
}

static const char* launched(cudaError_t status) { return status == cudaSuccess ? "launched" : "refused"; }

static void dynamicShared() {
  const int count = 14000;  // 56,000 bytes: more than 48 KiB needs opting in
  std::vector<int> values(count);
  int expected = 0;
  for (int i = 0; i < count; ++i) expected += values[i] = i % 101;
  check::Device<int> input(values), output(1);
  int limit = 0;
  CUDA(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  REQUIRE(limit >= count * 4);
  sumShared<<<1, 128, count * sizeof(int)>>>(input, output, count);
  cudaError_t status = cudaGetLastError();
  check::say("56,000 bytes of shared memory: %s", cudaGetErrorName(status));
  REQUIRE(status == cudaErrorInvalidValue);
  CUDA(cudaFuncSetAttribute(sumShared, cudaFuncAttributeMaxDynamicSharedMemorySize, count * sizeof(int)));
  sumShared<<<1, 128, count * sizeof(int)>>>(input, output, count);
  CUDA(cudaGetLastError());
  REQUIRE(output.read()[0] == expected);
  check::say("after opting in: sum %d", expected);
  sumShared<<<1, 128, count * sizeof(int) + 1024>>>(input, output, count);
  REQUIRE(cudaGetLastError() == cudaErrorInvalidValue);
  CUDA_GIVES(cudaErrorInvalidValue,
             cudaFuncSetAttribute(sumShared, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 20));
  REQUIRE(cudaGetLastError() == cudaErrorInvalidValue);
  sumShared<<<1, 128, 4000>>>(input, output, 1000);
  CUDA(cudaGetLastError());
  CUDA(cudaDeviceSynchronize());
}

static void blockShapes() {
  check::Device<int> output(4);
  const struct {
    const char* name;
    dim3 grid, block;
  } shapes[] = {{"1,025 threads", 1, 1025},
                {"no threads", 1, 0},
                {"no blocks", 0, 32},
                {"65 threads deep", 1, dim3(1, 1, 65)},
                {"65,536 blocks high", dim3(1, 65536), 32}};
  for (const auto& shape : shapes) {
    plain<<<shape.grid, shape.block>>>(output);
    const cudaError_t status = cudaGetLastError();
    check::say("%s: %s", shape.name, cudaGetErrorName(status));
    REQUIRE(status == cudaErrorInvalidValue);
    plain<<<4, 32>>>(output);
    CUDA(cudaGetLastError());
    check::same("the next launch", output.read(), std::vector<int>{400, 401, 402, 403});
  }
  // Within the device's limits, beyond the kernel's own: halve the block until it fits.
  int threads = 1024;
  cudaError_t status;
  do {
    bounded<<<1, threads>>>(output);
    status = cudaGetLastError();
    check::say("%d threads of at most 256: %s", threads, launched(status));
    if (status != cudaSuccess) threads /= 2;
  } while (status != cudaSuccess && threads > 0);
  CUDA(cudaDeviceSynchronize());
  REQUIRE(threads == 256 && output.read()[0] == 256);
}

static void clusters() {
  // Sixteen blocks a cluster need an opt-in that this kernel does not give: without clusters it works.
  check::Device<int> output(32);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(32);
  config.blockDim = dim3(64);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 16;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaError_t status = cudaLaunchKernelEx(&config, plain, output.get());
  cudaGetLastError();
  check::say("clusters of 16: %s", launched(status));
  if (status != cudaSuccess) {
    config.numAttrs = 0;
    CUDA(cudaLaunchKernelEx(&config, plain, output.get()));
    check::say("without clusters: launched");
  }
  const std::vector<int> got = output.read();
  for (int i = 0; i < 32; ++i) REQUIRE(got[i] == 3200 + i);
}

int main() {
  dynamicShared();
  blockShapes();
  clusters();
  return check::pass();
}
