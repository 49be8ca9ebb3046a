// Cooperative groups: grid-wide synchronisation, tiled partitions, coalesced groups, and their collectives.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

#include "check.h"

namespace cg = cooperative_groups;

// Jacobi-like rounds over the whole grid: each needs what every block wrote in the last one.
__global__ void rounds(unsigned* a, unsigned* b, int count, int steps) {
  cg::grid_group grid = cg::this_grid();
  for (int step = 0; step < steps; ++step) {
    for (int i = grid.thread_rank(); i < count; i += grid.size())
      b[i] = a[(i + count / 2 + step) % count] * 3 + a[(i + 1) % count];
    grid.sync();
    unsigned* swapped = a;
    a = b;
    b = swapped;
  }
}

__global__ void groups(int* output) {
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
  cg::thread_block_tile<8> tile = cg::tiled_partition<8>(warp);
  const int value = block.thread_rank() * 3 + 1;
  const int tileSum = cg::reduce(tile, value, cg::plus<int>());
  const int warpMaximum = cg::reduce(warp, value, cg::greater<int>());
  const int tilePrefix = cg::exclusive_scan(tile, value, cg::plus<int>());
  const int fromFirst = tile.shfl(value, 0);
  const int neighbour = tile.shfl_xor(value, 1);
  int coalesced = 0;
  if (block.thread_rank() % 3 == 0) {
    cg::coalesced_group active = cg::coalesced_threads();
    coalesced = active.size() * 100 + active.thread_rank();
  }
  int* out = output + block.thread_rank() * 8;
  out[0] = tileSum;
  out[1] = warpMaximum;
  out[2] = tilePrefix;
  out[3] = fromFirst;
  out[4] = neighbour;
  out[5] = coalesced;
  out[6] = tile.meta_group_rank() * 100 + tile.thread_rank();
  out[7] = tile.any(value % 5 == 0) + 2 * tile.all(value > 0) + 4 * __popc(tile.ballot(value % 2));
}

static void gridSync() {
  int supported = 0, perMultiprocessor = 0, multiprocessors = 0;
  CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrCooperativeLaunch, 0));
  REQUIRE(supported == 1);
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&perMultiprocessor, rounds, 64, 0));
  CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  REQUIRE(perMultiprocessor * multiprocessors >= 2);
  const int blocks = perMultiprocessor * multiprocessors < 6 ? perMultiprocessor * multiprocessors : 6;
  int count = 1000, steps = 10;
  std::vector<unsigned> values(count), next(count);
  check::Random random(26);
  for (unsigned& value : values) value = random.next();
  check::Device<unsigned> a(values), b(count);
  unsigned *pointerA = a, *pointerB = b;
  void* arguments[] = {&pointerA, &pointerB, &count, &steps};
  CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(rounds), dim3(blocks), dim3(64), arguments, 0, 0));
  CUDA(cudaDeviceSynchronize());
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < count; ++i)
      next[i] = values[(i + count / 2 + step) % count] * 3 + values[(i + 1) % count];
    values.swap(next);
  }
  check::same("grid rounds", a.read(), values);

  // More blocks than can be resident at once cannot synchronise: refused at the launch.
  const dim3 tooMany(perMultiprocessor * multiprocessors + 1);
  const cudaError_t refused =
      cudaLaunchCooperativeKernel(reinterpret_cast<void*>(rounds), tooMany, dim3(64), arguments, 0, 0);
  check::say("a cooperative grid that is too large: %s", cudaGetErrorName(refused));
  REQUIRE(refused == cudaErrorCooperativeLaunchTooLarge);
  REQUIRE(cudaGetLastError() == cudaErrorCooperativeLaunchTooLarge);
  CUDA(cudaDeviceSynchronize());
}

int main() {
  gridSync();
  const int threads = 96;
  check::Device<int> output(threads * 8);
  groups<<<1, threads>>>(output);
  CUDA(cudaGetLastError());
  std::vector<int> expected;
  for (int i = 0; i < threads; ++i) {
    const auto value = [](int rank) { return rank * 3 + 1; };
    const int first = i / 8 * 8;
    int sum = 0, prefix = 0, any = 0, odd = 0;
    for (int k = first; k < first + 8; ++k) {
      sum += value(k);
      if (k < i) prefix += value(k);
      any |= value(k) % 5 == 0;
      odd += value(k) % 2;
    }
    int active = 0, before = 0;
    for (int k = i / 32 * 32; k < i / 32 * 32 + 32; ++k)
      if (k % 3 == 0) {
        ++active;
        before += k < i;
      }
    const int results[] = {sum,
                           value(i / 32 * 32 + 31),
                           prefix,
                           value(first),
                           value(i ^ 1),
                           i % 3 == 0 ? active * 100 + before : 0,
                           i % 32 / 8 * 100 + i % 8,
                           any + 2 + 4 * odd};
    expected.insert(expected.end(), results, results + 8);
  }
  check::same("groups", output.read(), expected);
  return check::pass();
}
