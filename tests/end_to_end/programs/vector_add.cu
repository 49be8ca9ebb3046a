// c = a + b, the first program of every CUDA course.
#include "check.h"

__global__ void add(const float* a, const float* b, float* c, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) c[i] = a[i] + b[i];
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 100003);
  const std::vector<float> a = check::randomFloats(count, 1, -100, 100);
  const std::vector<float> b = check::randomFloats(count, 2, -100, 100);
  float *deviceA, *deviceB, *deviceC;
  const size_t bytes = count * sizeof(float);
  CUDA(cudaMalloc(&deviceA, bytes));
  CUDA(cudaMalloc(&deviceB, bytes));
  CUDA(cudaMalloc(&deviceC, bytes));
  CUDA(cudaMemcpy(deviceA, a.data(), bytes, cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(deviceB, b.data(), bytes, cudaMemcpyHostToDevice));
  add<<<(count + 255) / 256, 256>>>(deviceA, deviceB, deviceC, count);
  CUDA(cudaGetLastError());
  std::vector<float> c(count), expected(count);
  CUDA(cudaMemcpy(c.data(), deviceC, bytes, cudaMemcpyDeviceToHost));
  for (int i = 0; i < count; ++i) expected[i] = a[i] + b[i];
  check::same("a + b", c, expected);
  CUDA(cudaFree(deviceA));
  CUDA(cudaFree(deviceB));
  CUDA(cudaFree(deviceC));
  return check::pass();
}
