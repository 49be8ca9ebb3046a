// A kernel that writes where nothing is: the error comes with the next synchronisation and then with every
// call; the process cannot go on with the device, yet it ends in order.
#include "check.h"

__global__ void fill(int* values) { values[threadIdx.x] = threadIdx.x; }
__global__ void writeTo(int* address) { *address = 1; }

int main() {
  check::Device<int> values(64);
  cudaStream_t stream;
  cudaEvent_t event;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&event));
  fill<<<1, 64, 0, stream>>>(values);
  CUDA(cudaStreamSynchronize(stream));
  writeTo<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(0x10));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaStreamSynchronize(stream));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaPeekAtLastError());
  CUDA_GIVES(cudaErrorIllegalAddress, cudaGetLastError());
  CUDA_GIVES(cudaErrorIllegalAddress, cudaDeviceSynchronize());
  void* pointer = nullptr;
  int host = 0;
  CUDA_GIVES(cudaErrorIllegalAddress, cudaMalloc(&pointer, 64));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaMemcpy(&host, values.get(), 4, cudaMemcpyDeviceToHost));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaMemset(values.get(), 0, 4));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaEventRecord(event, stream));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaStreamQuery(stream));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaFree(values.get()));
  fill<<<1, 64>>>(values);
  CUDA_GIVES(cudaErrorIllegalAddress, cudaGetLastError());
  int device = -1, count = 0;
  CUDA_GIVES(cudaSuccess, cudaGetDevice(&device));  // what needs no device still works
  CUDA_GIVES(cudaSuccess, cudaGetDeviceCount(&count));
  REQUIRE(device == 0 && count >= 1);
  return check::pass();
}
