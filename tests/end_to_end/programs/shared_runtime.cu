// The runtime as a shared library (built with -cudart shared), two modules of device code in one process:
// this program's and the runtime functions every program uses.
#include <dlfcn.h>

#include "check.h"

__global__ void square(const float* input, float* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) output[i] = input[i] * input[i];
}

int main() {
  REQUIRE(dlsym(RTLD_DEFAULT, "cudaMalloc") != nullptr);  // found only in a shared runtime
  int runtime = 0, driver = 0;
  CUDA(cudaRuntimeGetVersion(&runtime));
  CUDA(cudaDriverGetVersion(&driver));
  REQUIRE(runtime == CUDART_VERSION && driver >= 12000);
  const std::vector<float> values = check::randomFloats(5000, 28, -5, 5);
  std::vector<float> expected;
  for (float value : values) expected.push_back(value * value);
  check::Device<float> input(values), output(values.size());
  square<<<40, 128>>>(input, output, static_cast<int>(values.size()));
  check::same("squares", output.read(), expected);
  cudaDeviceProp properties;
  CUDA(cudaGetDeviceProperties(&properties, 0));
  REQUIRE(properties.warpSize == 32 && properties.maxThreadsPerBlock == 1024 && properties.name[0] != 0);
  return check::pass();
}
