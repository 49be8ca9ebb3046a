// Votes, ballots, matches and masks within a warp, also when only some lanes take part.
#include "check.h"

// The sum over the odd lanes, which alone are here.
__device__ unsigned sumOfOddLanes(unsigned value) {
  for (int offset = 2; offset < 32; offset *= 2) value += __shfl_xor_sync(0xaaaaaaaau, value, offset);
  return value;
}

__global__ void votes(const int* input, unsigned* output) {
  const int value = input[threadIdx.x];
  unsigned* out = output + threadIdx.x * 12;
  out[0] = __ballot_sync(0xffffffffu, value % 3 == 0);
  out[1] = __any_sync(0xffffffffu, value > 90);
  out[2] = __all_sync(0xffffffffu, value >= 0);
  out[3] = __match_any_sync(0xffffffffu, value % 5);
  int same = -1;
  out[4] = __match_all_sync(0xffffffffu, value / 1000, &same);
  out[5] = same;
  out[6] = __activemask();
  out[7] = out[8] = out[9] = 0;
  if (threadIdx.x % 2) {
    out[7] = __ballot_sync(0xaaaaaaaau, value % 2);
    out[8] = __shfl_sync(0xaaaaaaaau, value, 5);
    out[9] = sumOfOddLanes(value);
  }
  __syncwarp();
  unsigned below, above;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  asm("mov.u32 %0, %%lanemask_ge;" : "=r"(above));
  out[10] = below;
  out[11] = above;
}

__global__ void segments(const int* input, int* output) {
  // Widths below 32 divide the warp, and a source outside its segment leaves the value as it is.
  const int value = input[threadIdx.x];
  output[threadIdx.x * 4] = __shfl_sync(0xffffffffu, value, 3, 8);
  output[threadIdx.x * 4 + 1] = __shfl_up_sync(0xffffffffu, value, 2, 4);
  output[threadIdx.x * 4 + 2] = __shfl_down_sync(0xffffffffu, value, 5, 16);
  output[threadIdx.x * 4 + 3] =
      static_cast<int>(__shfl_xor_sync(0xffffffffu, static_cast<long long>(value) << 33, 9) >> 33);
}

__global__ void blockVotes(const int* input, int* output) {
  output[threadIdx.x * 3] = __syncthreads_count(input[threadIdx.x] % 2);
  output[threadIdx.x * 3 + 1] = __syncthreads_and(input[threadIdx.x] >= 0);
  output[threadIdx.x * 3 + 2] = __syncthreads_or(input[threadIdx.x] == 55);
}

int main() {
  const int count = 64;
  std::vector<int> values(count);
  check::Random random(29);
  for (int& value : values) value = random.below(100);
  check::Device<int> input(values), small(count * 4);
  check::Device<unsigned> output(count * 12);
  votes<<<1, count>>>(input, output);
  CUDA(cudaGetLastError());
  std::vector<unsigned> expected;
  for (int i = 0; i < count; ++i) {
    const int* warp = &values[i / 32 * 32];
    const auto ballot = [&](auto predicate) {
      unsigned mask = 0;
      for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(predicate(lane) ? 1 : 0) << lane;
      return mask;
    };
    const int lane = i % 32;
    unsigned odd = 0;
    for (int k = 1; k < 32; k += 2) odd += warp[k];
    const unsigned results[] = {ballot([&](int k) { return warp[k] % 3 == 0; }),
                                ballot([&](int k) { return warp[k] > 90; }) != 0,
                                1,
                                ballot([&](int k) { return warp[k] % 5 == warp[lane] % 5; }),
                                0xffffffffu,
                                1,
                                0xffffffffu,
                                lane % 2 ? ballot([&](int k) { return k % 2 && warp[k] % 2; }) : 0,
                                lane % 2 ? static_cast<unsigned>(warp[5]) : 0,
                                lane % 2 ? odd : 0,
                                (1u << lane) - 1,
                                ~((1u << lane) - 1)};
    expected.insert(expected.end(), results, results + 12);
  }
  check::same("votes", output.read(), expected);

  segments<<<1, count>>>(input, small);
  std::vector<int> wanted;
  for (int i = 0; i < count; ++i) {
    wanted.push_back(values[i / 8 * 8 + 3]);
    wanted.push_back(values[i % 4 >= 2 ? i - 2 : i]);
    wanted.push_back(values[i % 16 + 5 < 16 ? i + 5 : i]);
    wanted.push_back(values[i ^ 9]);
  }
  check::same("segments", small.read(), wanted);
  check::Device<int> blocks(count * 3);
  blockVotes<<<1, count>>>(input, blocks);
  int odd = 0, any = 0;
  for (int value : values) {
    odd += value % 2;
    any |= value == 55;
  }
  wanted.clear();
  for (int i = 0; i < count; ++i) wanted.insert(wanted.end(), {odd, 1, any});
  check::same("block votes", blocks.read(), wanted);
  return check::pass();
}
