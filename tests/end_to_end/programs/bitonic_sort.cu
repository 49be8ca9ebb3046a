// Bitonic sort: steps within a block in dynamic shared memory, wider ones in global memory.
#include <algorithm>

#include "check.h"

__global__ void sortShared(unsigned* values) {
  extern __shared__ unsigned block[];
  const int offset = blockIdx.x * blockDim.x;
  const int lane = threadIdx.x;
  block[lane] = values[offset + lane];
  for (int size = 2; size <= blockDim.x; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      const int other = lane ^ stride;
      if (other > lane) {
        const bool ascending = ((offset + lane) & size) == 0;
        const unsigned a = block[lane], b = block[other];
        if ((a > b) == ascending) {
          block[lane] = b;
          block[other] = a;
        }
      }
    }
  }
  __syncthreads();
  values[offset + lane] = block[lane];
}

__global__ void mergeGlobal(unsigned* values, int size, int stride) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int other = i ^ stride;
  if (other <= i) return;
  const unsigned a = values[i], b = values[other];
  if ((a > b) == ((i & size) == 0)) {
    values[i] = b;
    values[other] = a;
  }
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 16384);
  const int threads = 256;
  REQUIRE(count >= threads && (count & (count - 1)) == 0);
  check::Random random(10);
  std::vector<unsigned> values(count);
  for (unsigned& value : values) value = random.next();
  check::Device<unsigned> device(values);
  sortShared<<<count / threads, threads, threads * sizeof(unsigned)>>>(device);
  for (int size = threads * 2; size <= count; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2)
      mergeGlobal<<<count / threads, threads>>>(device, size, stride);
  CUDA(cudaGetLastError());
  std::sort(values.begin(), values.end());
  check::same("sorted", device.read(), values);
  return check::pass();
}
