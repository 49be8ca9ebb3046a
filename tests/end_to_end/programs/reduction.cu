// Sum, minimum and maximum by warp shuffles, then across warps through shared memory.
#include <climits>

#include "check.h"

struct Sum {
  __host__ __device__ static int identity() { return 0; }
  __host__ __device__ static int apply(int a, int b) { return a + b; }
};
struct Minimum {
  __host__ __device__ static int identity() { return INT_MAX; }
  __host__ __device__ static int apply(int a, int b) { return a < b ? a : b; }
};

template <typename Operation>
__device__ int reduceWarp(int value) {
  for (int offset = 16; offset > 0; offset /= 2)
    value = Operation::apply(value, __shfl_down_sync(0xffffffffu, value, offset));
  return value;
}

template <typename Operation>
__global__ void reduce(const int* input, int count, int* perBlock) {
  __shared__ int perWarp[32];
  int value = Operation::identity();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    value = Operation::apply(value, input[i]);
  value = reduceWarp<Operation>(value);
  if (threadIdx.x % 32 == 0) perWarp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = threadIdx.x < blockDim.x / 32 ? perWarp[threadIdx.x] : Operation::identity();
    value = reduceWarp<Operation>(value);
    if (threadIdx.x == 0) perBlock[blockIdx.x] = value;
  }
}

// Every lane gets the sum (butterfly), and float addition in a fixed order is deterministic.
__global__ void warpSums(const float* input, float* output) {
  float value = input[threadIdx.x + blockIdx.x * blockDim.x];
  for (int mask = 1; mask < 32; mask *= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  output[threadIdx.x + blockIdx.x * blockDim.x] = value;
}

template <typename Operation>
static int onDevice(const std::vector<int>& values, int blocks, int threads) {
  check::Device<int> input(values), perBlock(blocks), result(1);
  reduce<Operation><<<blocks, threads>>>(input, values.size(), perBlock);
  reduce<Operation><<<1, 128>>>(perBlock, blocks, result);
  CUDA(cudaGetLastError());
  return result.read()[0];
}

template <typename Operation>
static void compare(const char* name, const std::vector<int>& values) {
  int expected = Operation::identity();
  for (int value : values) expected = Operation::apply(expected, value);
  for (int threads : {32, 96, 256, 1024}) {
    const int got = onDevice<Operation>(values, 13, threads);
    if (got != expected) check::fail("%s with %d threads is %d, expected %d", name, threads, got, expected);
  }
  check::say("%s of %zu values: %d", name, values.size(), expected);
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 200001);
  check::Random random(5);
  std::vector<int> values(count);
  for (int& value : values) value = static_cast<int>(random.below(20001)) - 10000;
  compare<Sum>("sum", values);
  compare<Minimum>("minimum", values);

  const std::vector<float> floats = check::randomFloats(256, 6);
  check::Device<float> input(floats), output(floats.size());
  warpSums<<<2, 128>>>(input, output);
  std::vector<float> expected(floats.size());
  for (size_t warp = 0; warp < floats.size(); warp += 32) {
    float partial[32];
    for (int lane = 0; lane < 32; ++lane) partial[lane] = floats[warp + lane];
    for (int mask = 1; mask < 32; mask *= 2) {
      float next[32];
      for (int lane = 0; lane < 32; ++lane) next[lane] = partial[lane] + partial[lane ^ mask];
      for (int lane = 0; lane < 32; ++lane) partial[lane] = next[lane];
    }
    for (int lane = 0; lane < 32; ++lane) expected[warp + lane] = partial[lane];
  }
  check::same("butterfly sums", output.read(), expected);
  return check::pass();
}
