// An assertion that fails in a kernel: cudaErrorAssert, and every later call gives it too. The message goes
// to the standard error stream.
#include <cassert>

#include "check.h"

__global__ void checked(const int* values, int* output) {
  assert(values[threadIdx.x] < 100);
  output[threadIdx.x] = values[threadIdx.x];
}

int main() {
  std::vector<int> values(64, 5);
  check::Device<int> input(values), output(64);
  checked<<<1, 64>>>(input, output);
  check::same("assertions that hold", output.read(), values);
  values[40] = 100;
  input.put(values);
  checked<<<1, 64>>>(input, output);
  CUDA(cudaPeekAtLastError());  // the launch itself is fine
  CUDA_GIVES(cudaErrorAssert, cudaDeviceSynchronize());
  CUDA_GIVES(cudaErrorAssert, cudaGetLastError());
  CUDA_GIVES(cudaErrorAssert, cudaDeviceSynchronize());
  void* pointer = nullptr;
  CUDA_GIVES(cudaErrorAssert, cudaMalloc(&pointer, 16));
  CUDA_GIVES(cudaErrorAssert, cudaMemcpy(values.data(), output.get(), 4, cudaMemcpyDeviceToHost));
  checked<<<1, 64>>>(input, output);
  CUDA_GIVES(cudaErrorAssert, cudaGetLastError());
  return check::pass();
}
