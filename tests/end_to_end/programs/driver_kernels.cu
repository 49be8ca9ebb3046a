// The device code of driver_only: built by nvcc as a fat binary and as PTX, loaded at run time.
extern "C" {

__device__ float bias = 1.5f;
__constant__ int table[4] = {10, 20, 30, 40};

struct Settings {
  int count;
  float factor;
  char mode;
};

__global__ void scaleAndBias(const float* input, float* output, Settings settings) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= settings.count) return;
  float value = input[i] * settings.factor + bias;
  if (settings.mode == 't') value += table[i % 4];
  output[i] = value;
}

__global__ void sumBlock(const int* input, int* output) {
  extern __shared__ int buffer[];
  buffer[threadIdx.x] = input[threadIdx.x];
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) buffer[threadIdx.x] += buffer[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *output = buffer[0];
}
}
