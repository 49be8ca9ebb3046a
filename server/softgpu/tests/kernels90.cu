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

#include <cuda_fp16.h>
#include <mma.h>

// One warp: 16 x 16 x 32, the sum in float.
extern "C" __global__ void wmmaHalf(const half* a, const half* b, float* c) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> right;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 1.0f);
  for (int k = 0; k < 32; k += 16) {
    wmma::load_matrix_sync(left, a + k, 32);
    wmma::load_matrix_sync(right, b + k, 32);
    wmma::mma_sync(sum, left, right, sum);
  }
  for (int i = 0; i < sum.num_elements; ++i) sum.x[i] *= 2;
  wmma::store_matrix_sync(c, sum, 16, wmma::mem_row_major);
}

// mma.m16n8k16 with fragments as the manual lays them out, loaded by ldmatrix.
extern "C" __global__ void mmaHalf(const half* a, const half* b, float* c) {
  __shared__ alignas(16) half left[16 * 16];
  __shared__ alignas(16) half right[16 * 8];
  int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) left[i] = a[i];
  for (int i = lane; i < 128; i += 32) right[i] = b[i];
  __syncwarp();
  unsigned x[4], y[2];
  auto rows = static_cast<unsigned>(__cvta_generic_to_shared(left + lane % 16 * 16 + lane / 16 * 8));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(rows));
  auto columns = static_cast<unsigned>(__cvta_generic_to_shared(right + lane % 16 * 8));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(y[0]), "=r"(y[1]) : "r"(columns));
  float d[4];
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]), "f"(0.5f));
  for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

extern "C" __global__ void mmaBytes(const unsigned* a, const unsigned* b, int* c) {
  int lane = threadIdx.x;
  int group = lane / 4, within = lane % 4;
  unsigned x[4], y[2];
  for (int i = 0; i < 4; ++i) x[i] = a[(group + i % 2 * 8) * 8 + within + i / 2 * 4];
  for (int i = 0; i < 2; ++i) y[i] = b[group * 8 + within + i * 4];
  int d[4];
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]), "r"(-7));
  for (int i = 0; i < 4; ++i) c[(group + i / 2 * 8) * 8 + within * 2 + i % 2] = d[i];
}

extern "C" __global__ void mmaDouble(const double* a, const double* b, double* c) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 8, 8, 4, double, wmma::row_major> left;
  wmma::fragment<wmma::matrix_b, 8, 8, 4, double, wmma::row_major> right;
  wmma::fragment<wmma::accumulator, 8, 8, 4, double> sum;
  wmma::fill_fragment(sum, 0.0);
  wmma::load_matrix_sync(left, a, 4);
  wmma::load_matrix_sync(right, b, 8);
  wmma::mma_sync(sum, left, right, sum);
  wmma::store_matrix_sync(c, sum, 8, wmma::mem_col_major);
}
