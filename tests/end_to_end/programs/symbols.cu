// Constant memory and __device__ variables: copies to, from and between symbols, their addresses and sizes,
// and pointers between them that only the loader can have set.
#include "check.h"

__constant__ float coefficients[16] = {1, 2, 3};
__device__ int counter = 41;
__device__ double table[100];
__device__ int* pointerToCounter = &counter;  // relocated at load
__constant__ const float* pointerToThird = coefficients + 2;
static __device__ unsigned char bytes[13] = {'s', 't', 'a', 't', 'i', 'c'};
__device__ struct Nested {
  int number;
  const char* text;
  short list[3];
} nested = {7, "hello", {1, -2, 3}};

__global__ void polynomial(const float* x, float* y, int degree) {
  float sum = 0;
  for (int i = degree; i >= 0; --i) sum = sum * x[threadIdx.x] + coefficients[i];
  y[threadIdx.x] = sum;
}

__global__ void bump() {
  atomicAdd(pointerToCounter, 1);
  table[threadIdx.x] += threadIdx.x;
}

__global__ void lookAround(int* result) {
  result[0] = static_cast<int>(*pointerToThird);
  result[1] = bytes[0] + bytes[12];
  result[2] = nested.number;
  result[3] = nested.text[4];
  result[4] = nested.list[1];
  result[5] = pointerToCounter == &counter;
}

int main() {
  float values[16];
  CUDA(cudaMemcpyFromSymbol(values, coefficients, sizeof values));
  check::say("initial coefficients: %g %g %g %g", values[0], values[1], values[2], values[3]);
  REQUIRE(values[0] == 1 && values[1] == 2 && values[2] == 3 && values[3] == 0);
  for (int i = 0; i < 16; ++i) values[i] = 0.5f * i - 2;
  CUDA(cudaMemcpyToSymbol(coefficients, values, 8 * sizeof(float)));
  CUDA(cudaMemcpyToSymbol(coefficients, values + 8, 8 * sizeof(float), 8 * sizeof(float)));  // at an offset
  const std::vector<float> x = check::randomFloats(64, 19, -1, 1);
  std::vector<float> expected;
  for (float at : x) {
    double sum = 0;
    for (int i = 15; i >= 0; --i) sum = sum * at + values[i];
    expected.push_back(static_cast<float>(sum));
  }
  check::Device<float> deviceX(x), y(x.size());
  polynomial<<<1, 64>>>(deviceX, y, 15);
  check::near("polynomial", y.read(), expected, 1e-5, 1e-5);

  int count = 0;
  bump<<<1, 100>>>();
  CUDA(cudaMemcpyFromSymbol(&count, counter, sizeof count));
  check::say("counter: %d", count);
  REQUIRE(count == 141);
  double entries[3];
  CUDA(cudaMemcpyFromSymbol(entries, table, sizeof entries, 97 * sizeof(double)));
  REQUIRE(entries[0] == 97 && entries[2] == 99);

  void *address = nullptr, *tableAddress = nullptr;
  size_t size = 0;
  CUDA(cudaGetSymbolAddress(&address, counter));
  CUDA(cudaGetSymbolSize(&size, counter));
  REQUIRE(address != nullptr && size == sizeof(int));
  CUDA(cudaGetSymbolSize(&size, table));
  REQUIRE(size == sizeof(double) * 100);
  CUDA(cudaGetSymbolSize(&size, bytes));
  REQUIRE(size == 13);
  CUDA(cudaGetSymbolAddress(&tableAddress, table));
  cudaPointerAttributes attributes;
  CUDA(cudaPointerGetAttributes(&attributes, tableAddress));
  REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
  const int seven = 7;
  CUDA(cudaMemcpy(address, &seven, sizeof seven, cudaMemcpyHostToDevice));  // as ordinary device memory
  bump<<<1, 3>>>();
  CUDA(cudaMemcpyFromSymbol(&count, counter, sizeof count));
  REQUIRE(count == 10);
  CUDA(cudaMemset(tableAddress, 0, sizeof(double) * 100));

  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaMemcpyToSymbolAsync(counter, address, sizeof count, 0, cudaMemcpyDeviceToDevice, stream));
  CUDA(cudaMemcpyFromSymbolAsync(&count, counter, sizeof count, 0, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  REQUIRE(count == 10);
  CUDA(cudaStreamDestroy(stream));

  check::Device<int> result(6);
  lookAround<<<1, 1>>>(result);
  check::same("initialised data", result.read(), std::vector<int>{-1, 's', 7, 'o', -2, 1});
  CUDA_GIVES(cudaErrorInvalidValue, cudaMemcpyToSymbol(counter, values, 5));
  CUDA_GIVES(cudaErrorInvalidValue, cudaMemcpyFromSymbol(entries, table, 8, 800));
  return check::pass();
}
