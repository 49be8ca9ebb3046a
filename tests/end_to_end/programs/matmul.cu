// Tiled matrix product through shared memory. With --verbose it also names the device and the times.
#include <chrono>

#include "check.h"

constexpr int kTile = 16;

__global__ void multiply(const float* a, const float* b, float* c, int size) {
  __shared__ float tileA[kTile][kTile];
  __shared__ float tileB[kTile][kTile];
  const int row = blockIdx.y * kTile + threadIdx.y;
  const int column = blockIdx.x * kTile + threadIdx.x;
  float sum = 0;
  for (int start = 0; start < size; start += kTile) {
    const int inA = start + threadIdx.x, inB = start + threadIdx.y;
    tileA[threadIdx.y][threadIdx.x] = row < size && inA < size ? a[row * size + inA] : 0.0f;
    tileB[threadIdx.y][threadIdx.x] = inB < size && column < size ? b[inB * size + column] : 0.0f;
    __syncthreads();
    for (int k = 0; k < kTile; ++k) sum += tileA[threadIdx.y][k] * tileB[k][threadIdx.x];
    __syncthreads();
  }
  if (row < size && column < size) c[row * size + column] = sum;
}

// The product with double accumulators; small integers as factors would hide rounding, so random floats it
// is.
static std::vector<float> reference(const std::vector<float>& a, const std::vector<float>& b, int size) {
  std::vector<float> c(a.size());
  std::vector<double> row(size);
  for (int i = 0; i < size; ++i) {
    for (double& value : row) value = 0;
    for (int k = 0; k < size; ++k)
      for (int j = 0; j < size; ++j) row[j] += static_cast<double>(a[i * size + k]) * b[k * size + j];
    for (int j = 0; j < size; ++j) c[i * size + j] = static_cast<float>(row[j]);
  }
  return c;
}

int main(int argc, char** argv) {
  const bool verbose = check::flag(argc, argv, "--verbose");
  const int size = check::option(argc, argv, "--size", 200);
  const std::vector<float> a = check::randomFloats(size * size, 3, -1, 1);
  const std::vector<float> b = check::randomFloats(size * size, 4, -1, 1);
  const auto begin = std::chrono::steady_clock::now();
  check::Device<float> deviceA(a), deviceB(b), deviceC(a.size());

  cudaEvent_t start, stop;
  CUDA(cudaEventCreate(&start));
  CUDA(cudaEventCreate(&stop));
  const dim3 block(kTile, kTile), grid((size + kTile - 1) / kTile, (size + kTile - 1) / kTile);
  multiply<<<grid, block>>>(deviceA, deviceB, deviceC, size);
  CUDA(cudaEventRecord(start));
  multiply<<<grid, block>>>(deviceA, deviceB, deviceC, size);
  CUDA(cudaEventRecord(stop));
  CUDA(cudaEventSynchronize(stop));
  float milliseconds = -1;
  CUDA(cudaEventElapsedTime(&milliseconds, start, stop));
  REQUIRE(milliseconds >= 0);
  const std::vector<float> c = deviceC.read();
  const std::chrono::duration<double, std::milli> total = std::chrono::steady_clock::now() - begin;
  if (verbose) {
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    check::say("device: %s", properties.name);
    check::say("kernel: %.3f ms, %.2f GFLOP/s; everything: %.1f ms", milliseconds,
               2.0 * size * size * size / (milliseconds * 1e6), total.count());
  }
  check::near("a * b", c, reference(a, b, size), 1e-5, 1e-4);
  CUDA(cudaEventDestroy(start));
  CUDA(cudaEventDestroy(stop));
  return check::pass();
}
