// Kernels of the engine's tests for newer GPUs: asynchronous copies, barrier objects, clusters, large tiles.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>

#include <cuda/barrier>
#include <cuda/pipeline>
namespace cg = cooperative_groups;

extern "C" __global__ void barrierObject(int* data, int rounds) {
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  __shared__ int sums[256];
  if (threadIdx.x == 0) init(&barrier, blockDim.x);
  __syncthreads();
  int value = threadIdx.x;
  for (int i = 0; i < rounds; ++i) {
    sums[threadIdx.x] = value;
    barrier.arrive_and_wait();
    value = sums[(threadIdx.x + 1) % blockDim.x] + 1;
    auto token = barrier.arrive();
    barrier.wait(std::move(token));
  }
  data[threadIdx.x] = value;
}

extern "C" __global__ void asyncCopy(int* out, const int* in) {
  __shared__ alignas(16) int buffer[256];
  auto block = cg::this_thread_block();
  cg::memcpy_async(block, buffer, in, sizeof buffer);
  cg::wait(block);
  out[threadIdx.x] = buffer[255 - threadIdx.x];
}

extern "C" __global__ void pipelined(int* out, const int* in, int pieces) {
  __shared__ alignas(16) int buffer[2][256];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  auto block = cg::this_thread_block();
  auto pipeline = cuda::make_pipeline(block, &state);
  int sum = 0;
  for (int fetch = 0, use = 0; use < pieces; ++use) {
    for (; fetch < pieces && fetch < use + 2; ++fetch) {
      pipeline.producer_acquire();
      cuda::memcpy_async(block, buffer[fetch % 2], in + fetch * 256, sizeof(int) * 256, pipeline);
      pipeline.producer_commit();
    }
    pipeline.consumer_wait();
    sum += buffer[use % 2][255 - threadIdx.x];
    pipeline.consumer_release();
  }
  out[threadIdx.x] = sum;
}

extern "C" __global__ void bulkCopy(int* out, const int* in) {
  __shared__ alignas(16) int buffer[256];
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  if (threadIdx.x == 0) init(&barrier, blockDim.x);
  __syncthreads();
  cuda::barrier<cuda::thread_scope_block>::arrival_token token;
  if (threadIdx.x == 0) {
    cuda::device::memcpy_async_tx(buffer, in, cuda::aligned_size_t<16>(sizeof buffer), barrier);
    token = cuda::device::barrier_arrive_tx(barrier, 1, sizeof buffer);
  } else {
    token = barrier.arrive();
  }
  barrier.wait(std::move(token));
  out[threadIdx.x] = buffer[255 - threadIdx.x];
}

extern "C" __global__ void largeTile(int* data) {
  auto tile = cg::tiled_partition<64>(cg::this_thread_block());
  data[threadIdx.x] = cg::reduce(tile, data[threadIdx.x], cg::plus<int>());
}

extern "C" __global__ void cluster(int* out) {
  auto group = cg::this_cluster();
  __shared__ int value;
  if (threadIdx.x == 0) value = 5;
  group.sync();
  out[threadIdx.x] = *group.map_shared_rank(&value, 0) + group.num_blocks() + __reduce_add_sync(0xFFFFFFFF, threadIdx.x % 32);
}
