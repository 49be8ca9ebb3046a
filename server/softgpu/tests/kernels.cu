// Kernels of the engine's tests, compiled by nvcc when the tests are built.
extern "C" __global__ void vectorAdd(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

template <int tile>
__device__ void multiply(const float* a, const float* b, float* c, int n) {
  __shared__ float as[tile][tile];
  __shared__ float bs[tile][tile];
  int row = blockIdx.y * tile + threadIdx.y;
  int column = blockIdx.x * tile + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; k += tile) {
    as[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    bs[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    __syncthreads();
    for (int i = 0; i < tile; ++i) sum += as[threadIdx.y][i] * bs[i][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}
extern "C" __global__ void matmul16(const float* a, const float* b, float* c, int n) { multiply<16>(a, b, c, n); }
extern "C" __global__ void matmul32(const float* a, const float* b, float* c, int n) { multiply<32>(a, b, c, n); }

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <cassert>
#include <cstdio>
namespace cg = cooperative_groups;

extern "C" __global__ void reduce(const int* in, int* out, int n) {
  __shared__ int warps[32];
  int sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, delta);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0;
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, mask);
  if (threadIdx.x == 0) atomicAdd(out, sum);
}

extern "C" __global__ void scan(int* data, int n) {
  extern __shared__ int buffer[];
  int i = threadIdx.x;
  buffer[i] = i < n ? data[i] : 0;
  for (int step = 1; step < blockDim.x; step *= 2) {
    __syncthreads();
    int value = i >= step ? buffer[i - step] : 0;
    __syncthreads();
    buffer[i] += value;
  }
  if (i < n) data[i] = buffer[i];
}

extern "C" __global__ void histogram(const unsigned char* text, int n, unsigned* counts) {
  __shared__ unsigned local[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[text[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&counts[i], local[i]);
}

extern "C" __global__ void talk(int value, const char* name) {
  if (threadIdx.x == 0)
    printf("%d %5.2f|%-6s|%c %llx %lu %% %p %s\n", value, 1.5, "ab", 'z', 0x123456789abcdefull, 7ul, (void*)0, name);
}

extern "C" __global__ void check(int* data) { assert(data[threadIdx.x] < 3 && "too large"); }

struct Shape {
  int size;
  __device__ explicit Shape(int s) : size(s) {}
  __device__ virtual int area() const = 0;
};
struct Square : Shape {
  using Shape::Shape;
  __device__ int area() const override { return size * size; }
};
struct Double : Shape {
  using Shape::Shape;
  __device__ int area() const override { return 2 * size; }
};
extern "C" __global__ void makeShapes(Shape** shapes, int n) {
  for (int i = 0; i < n; ++i) shapes[i] = i % 2 == 0 ? static_cast<Shape*>(new Square(i)) : new Double(i);
}
extern "C" __global__ void useShapes(Shape** shapes, int* areas) { areas[threadIdx.x] = shapes[threadIdx.x]->area(); }
extern "C" __global__ void deleteShapes(Shape** shapes, int n) {
  for (int i = 0; i < n; ++i) free(shapes[i]);
}

typedef int (*Function)(int);
__device__ int plusOne(int a) { return a + 1; }
__device__ int twice(int a) { return a * 2; }
__device__ __noinline__ int meet(int a) { __syncthreads(); return a; }
__device__ Function functions[3] = {plusOne, twice, meet};
extern "C" __global__ void callThrough(int* data, int which) { data[threadIdx.x] = functions[which](data[threadIdx.x]); }

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
extern "C" __global__ void recurse(int* data) { data[threadIdx.x] = fibonacci(data[threadIdx.x]); }
__device__ __noinline__ int forever(volatile int* data, int n) { return data[n & 1] == 99 ? n : forever(data, n + 1) + 1; }
extern "C" __global__ void overflow(int* data) { data[0] = forever(data, 0); }

extern "C" __global__ void gridSync(int* data, int rounds) {
  cg::grid_group grid = cg::this_grid();
  int n = static_cast<int>(grid.size());
  int self = static_cast<int>(grid.thread_rank());
  for (int i = 0; i < rounds; ++i) {
    int next = data[(self + 1) % n];
    grid.sync();
    data[self] = next + 1;
    grid.sync();
  }
}

extern "C" __global__ void producer(volatile int* flag, volatile int* data) {
  if (threadIdx.x == 0) {
    while (*flag == 0) {}
    data[0] = *flag + 1;
  } else if (threadIdx.x == 40) {
    *flag = 41;
  }
}

extern "C" __global__ void lock(int* mutex, int* count) {
  for (int i = 0; i < 10; ++i) {
    while (atomicCAS(mutex, 0, 1) != 0) {}
    __threadfence();
    *reinterpret_cast<volatile int*>(count) = *reinterpret_cast<volatile int*>(count) + 1;
    __threadfence();
    atomicExch(mutex, 0);
  }
}

extern "C" __global__ void warpOperations(unsigned* out) {
  unsigned lane = threadIdx.x % 32;
  unsigned* mine = out + threadIdx.x * 8;
  mine[0] = __activemask();
  mine[1] = __ballot_sync(0xFFFFFFFF, lane % 3 == 0);
  if (lane < 10) {
    mine[2] = __activemask();
    mine[3] = __match_any_sync(0x3FF, lane / 4);
  }
  int all = 0;
  mine[4] = __match_all_sync(0xFFFFFFFF, 7, &all) + all;
  mine[5] = __any_sync(0xFFFFFFFF, lane == 31) * 2 + __all_sync(0xFFFFFFFF, lane < 31);
  mine[6] = __shfl_sync(0xFFFFFFFF, lane * 10, 3, 8);
  cg::coalesced_group group = cg::coalesced_threads();
  mine[7] = cg::reduce(group, lane, cg::plus<unsigned>());
}

extern "C" __global__ void partialWarp(unsigned* out) {
  if (threadIdx.x % 2 == 1) return;
  __syncthreads();
  out[threadIdx.x] = __shfl_down_sync(0x55555555, threadIdx.x, 2);
}

extern "C" __global__ void readAt(const int* at, int* out) { *out = *at; }
extern "C" __global__ void readPair(const int2* at, int2* out) { *out = *at; }
extern "C" __global__ void readShared(int index, int* out) {
  __shared__ int small[32];
  small[threadIdx.x % 32] = threadIdx.x;
  __syncthreads();
  *out = small[index];
}
extern "C" __global__ void trapIf(int which) {
  if (blockIdx.x == which) __trap();
}
extern "C" __global__ void halfBarrier(int* out) {
  if (threadIdx.x < 32) {
    asm volatile("bar.sync 1, 64;");
  }
  out[threadIdx.x] = 1;
}

struct Big {
  int values[4000];
};
extern "C" __global__ void bigParameter(Big big, int* out, int at) { *out = big.values[at]; }

extern "C" __global__ void localArray(int* out, int n) {
  int squares[64];
  for (int i = 0; i < 64; ++i) squares[i] = i * i;
  int* volatile where = squares;
  out[threadIdx.x] = where[(threadIdx.x * n) % 64];
}

__constant__ float table[4] = {1, 2, 4, 8};
__device__ int counter = 40;
__managed__ int managed = 7;
extern "C" __global__ void globals(float* out) {
  out[threadIdx.x] = table[threadIdx.x] + atomicAdd(&counter, 1) * 0 + managed;
}
