// A module of some hundred KiB for measuring how code is loaded: many kernels of straight code, and a word
// that perf-cases changes so that an image nobody has seen before can be had at will.
extern "C" __device__ int marker = 1234567890;

template <int N>
__device__ float turn(float value) {
  for (int i = 0; i < N; ++i) value = value * (1.0f + i) + __sinf(value + N);
  return value;
}

template <int N>
__global__ void kernel(float* data) {
  float value = data[threadIdx.x];
#pragma unroll
  for (int i = 0; i < 48; ++i) value = __fmaf_rn(value, 1.0f + i * N, __sinf(value));
  data[threadIdx.x] = turn<N>(value);
}

extern "C" __global__ void entry() {}

#define FOUR(n)                                   \
  template __global__ void kernel<n>(float*);     \
  template __global__ void kernel<n + 1>(float*); \
  template __global__ void kernel<n + 2>(float*); \
  template __global__ void kernel<n + 3>(float*);
#define SIXTEEN(n) FOUR(n) FOUR(n + 4) FOUR(n + 8) FOUR(n + 12)
SIXTEEN(1) SIXTEEN(17) SIXTEEN(33) SIXTEEN(49)
