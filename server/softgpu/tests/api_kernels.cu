// The kernels of the API tests; api_kernels.ptx is what `nvcc -ptx -arch=compute_75` makes of it.
extern "C" {
__device__ int counter = 5;
__constant__ int table[4] = {1, 2, 3, 4};
__managed__ int shared_value = 9;
__global__ void vectorAdd(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
__global__ void addTo(int* p, int v) { atomicAdd(p, v); }
__global__ void append(int* list, int* count, int v) { int i = atomicAdd(count, 1); list[i] = v; }
__global__ void waitFor(volatile int* flag) { while (*flag == 0) { } }
__global__ void badStore(int* p) { *p = 1; }
__global__ void trapping() { asm("trap;"); }
__global__ void bump() { atomicAdd(&counter, table[threadIdx.x]); }
__global__ void managed(int v) { shared_value += v; }
__global__ void sumShared(int* out, int n) {
  extern __shared__ int s[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) { int t = 0; for (int i = 0; i < n; ++i) t += s[i]; *out = t; }
}
struct Mixed { char c; double d; short s[3]; };
__global__ void mixed(double* out, char a, Mixed m, short b) { *out = a + m.c + m.d + m.s[2] + b; }
__global__ void __launch_bounds__(128) bounded(int* p) { if (threadIdx.x == 0) *p = blockDim.x; }
__global__ void fetch2D(cudaTextureObject_t t, const float2* at, float* out, int n) {
  int i = threadIdx.x; if (i < n) out[i] = tex2D<float>(t, at[i].x, at[i].y);
}
__global__ void fetch1D(cudaTextureObject_t t, float* out, int n) {
  int i = threadIdx.x; if (i < n) out[i] = tex1Dfetch<float>(t, i - 1);
}
__global__ void fetchInt(cudaTextureObject_t t, int* out, int n) {
  int i = threadIdx.x; if (i < n) { uchar4 v = tex2D<uchar4>(t, i + 0.5f, 0.5f); out[i] = v.x + 1000 * v.w; }
}
__global__ void surfaceDouble(cudaSurfaceObject_t s, int w) {
  int x = threadIdx.x; float v; surf2Dread(&v, s, x * 4, blockIdx.x); surf2Dwrite(v * 2, s, x * 4, blockIdx.x);
}
}
