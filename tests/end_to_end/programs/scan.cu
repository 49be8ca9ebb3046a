// Exclusive prefix sum of any length: blocks scan, the block sums are scanned, then added back.
#include "check.h"

constexpr int kBlock = 256;

__global__ void scanBlocks(const unsigned* input, unsigned* output, unsigned* blockSums, int count) {
  __shared__ unsigned buffer[2][kBlock];
  const int i = blockIdx.x * kBlock + threadIdx.x;
  const unsigned own = i < count ? input[i] : 0;
  int from = 0;
  buffer[0][threadIdx.x] = own;
  __syncthreads();
  for (int offset = 1; offset < kBlock; offset *= 2) {
    unsigned value = buffer[from][threadIdx.x];
    if (threadIdx.x >= offset) value += buffer[from][threadIdx.x - offset];
    buffer[1 - from][threadIdx.x] = value;
    from = 1 - from;
    __syncthreads();
  }
  if (i < count) output[i] = buffer[from][threadIdx.x] - own;
  if (threadIdx.x == kBlock - 1) blockSums[blockIdx.x] = buffer[from][threadIdx.x];
}

__global__ void addOffsets(unsigned* values, const unsigned* offsets, int count) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i < count) values[i] += offsets[blockIdx.x];
}

// Within a warp by shuffles, inclusive.
__global__ void scanWarp(int* values) {
  const int lane = threadIdx.x;
  int value = values[lane];
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, value, offset);
    if (lane >= offset) value += other;
  }
  values[lane] = value;
}

static void scan(const unsigned* input, unsigned* output, int count) {
  const int blocks = (count + kBlock - 1) / kBlock;
  check::Device<unsigned> sums(blocks);
  scanBlocks<<<blocks, kBlock>>>(input, output, sums, count);
  if (blocks > 1) {
    check::Device<unsigned> offsets(blocks);
    scan(sums, offsets, blocks);
    addOffsets<<<blocks, kBlock>>>(output, offsets, count);
  }
  CUDA(cudaGetLastError());
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 70000);
  check::Random random(7);
  std::vector<unsigned> values(count), expected(count);
  unsigned total = 0;
  for (int i = 0; i < count; ++i) {
    values[i] = random.below(1000);
    expected[i] = total;
    total += values[i];
  }
  check::Device<unsigned> input(values), output(count);
  scan(input, output, count);
  check::same("exclusive scan", output.read(), expected);

  std::vector<int> lanes(32), sums(32);
  for (int lane = 0, sum = 0; lane < 32; ++lane) {
    lanes[lane] = lane * lane - 100;
    sums[lane] = sum += lanes[lane];
  }
  check::Device<int> warp(lanes);
  scanWarp<<<1, 32>>>(warp);
  check::same("warp scan", warp.read(), sums);
  return check::pass();
}
