// Relocatable device code: kernels here call functions and use variables of separate_device.cu.
#include "check.h"
#include "separate_device.h"

__global__ void combine(const int* input, int* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  output[i] = mix(input[i], i) + sharedTable[i % 16];
  atomicAdd(&sharedCalls, 1);
}

__global__ void indirect(int* output) { output[threadIdx.x] = chosenFunction(threadIdx.x); }

int main() {
  const int count = 3000;
  std::vector<int> values(count), expected(count);
  check::Random random(27);
  for (int i = 0; i < count; ++i) {
    values[i] = static_cast<int>(random.below(10000));
    expected[i] = mix(values[i], i) + (i % 16) * (i % 16);
  }
  fillTableOnDevice();  // a kernel of the other file
  check::Device<int> input(values), output(count);
  combine<<<(count + 127) / 128, 128>>>(input, output, count);
  CUDA(cudaGetLastError());
  check::same("across files", output.read(), expected);
  int calls = 0;
  CUDA(cudaMemcpyFromSymbol(&calls, sharedCalls, sizeof calls));
  check::say("calls: %d", calls);
  REQUIRE(calls == count && readCallsInOtherFile() == count);
  indirect<<<1, 32>>>(output);
  const std::vector<int> got = output.read();
  for (int i = 0; i < 32; ++i) REQUIRE(got[i] == i * 11);
  return check::pass();
}
