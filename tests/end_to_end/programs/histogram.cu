// 256-bin histogram twice: straight to global memory, and through per-block bins in shared memory.
#include "check.h"

__global__ void histogramGlobal(const unsigned char* data, int count, unsigned* bins) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    atomicAdd(&bins[data[i]], 1u);
}

__global__ void histogramShared(const unsigned char* data, int count, unsigned* bins) {
  __shared__ unsigned local[256];
  for (int bin = threadIdx.x; bin < 256; bin += blockDim.x) local[bin] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    atomicAdd(&local[data[i]], 1u);
  __syncthreads();
  for (int bin = threadIdx.x; bin < 256; bin += blockDim.x)
    if (local[bin] != 0) atomicAdd(&bins[bin], local[bin]);
}

// One of each atomic, on values for which the result does not depend on the order.
struct Extremes {
  int minimum, maximum;
  unsigned either, every, parity, wrapped;
  unsigned long long total;
  int swaps;
  float floatSum;
  double doubleSum;
  unsigned short pad;
};

__global__ void atomics(Extremes* e, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  atomicMin(&e->minimum, 5 - i);
  atomicMax(&e->maximum, i * 3);
  atomicOr(&e->either, 1u << (i % 20));
  atomicAnd(&e->every, ~(1u << (i % 7)));
  atomicXor(&e->parity, static_cast<unsigned>(i));
  atomicInc(&e->wrapped, 9);
  atomicAdd(&e->total, static_cast<unsigned long long>(i) << 20);
  atomicAdd(&e->floatSum, 0.5f);
  atomicAdd(&e->doubleSum, 0.25);
  int seen = e->swaps, assumed;
  do {
    assumed = seen;
    seen = atomicCAS(&e->swaps, assumed, assumed + 2);
  } while (seen != assumed);
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 300000);
  check::Random random(8);
  std::vector<unsigned char> data(count);
  std::vector<unsigned> expected(256);
  for (unsigned char& value : data) {
    value = static_cast<unsigned char>(random.below(256) & random.below(256));
    ++expected[value];
  }
  check::Device<unsigned char> input(data);
  check::Device<unsigned> bins(256);
  CUDA(cudaMemset(bins, 0, 256 * sizeof(unsigned)));
  histogramGlobal<<<24, 256>>>(input, count, bins);
  check::same("global atomics", bins.read(), expected);
  CUDA(cudaMemset(bins, 0, 256 * sizeof(unsigned)));
  histogramShared<<<24, 256>>>(input, count, bins);
  check::same("shared atomics", bins.read(), expected);

  Extremes e{};
  e.every = ~0u;
  Extremes* device;
  CUDA(cudaMalloc(&device, sizeof e));
  CUDA(cudaMemcpy(device, &e, sizeof e, cudaMemcpyHostToDevice));
  atomics<<<16, 128>>>(device, 2000);
  CUDA(cudaMemcpy(&e, device, sizeof e, cudaMemcpyDeviceToHost));
  CUDA(cudaFree(device));
  check::say("min %d max %d or %x and %x xor %u inc %u sum %llu cas %d float %g double %g", e.minimum,
             e.maximum, e.either, e.every, e.parity, e.wrapped, e.total, e.swaps, e.floatSum, e.doubleSum);
  REQUIRE(e.minimum == 5 - 1999 && e.maximum == 1999 * 3 && e.either == 0xfffff && e.every == ~0x7fu);
  REQUIRE(e.wrapped == 0 && e.total == (1999ull * 1000) << 20 && e.swaps == 4000);
  REQUIRE(e.floatSum == 1000.0f && e.doubleSum == 500.0);
  return check::pass();
}
