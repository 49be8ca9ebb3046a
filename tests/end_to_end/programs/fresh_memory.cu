// What a process is given holds nothing of whoever had it before: device memory, small and large, and pinned
// memory are all zero. Then it is filled with a pattern for whoever comes next. --mib N: so much.
#include <cstring>

#include "check.h"

__global__ void countNonzero(const unsigned long long* words, size_t count, unsigned long long* found) {
  unsigned long long mine = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    mine += words[i] != 0;
  if (mine != 0) atomicAdd(found, mine);
}

static unsigned long long nonzero(const void* data, size_t bytes) {
  check::Device<unsigned long long> found(std::vector<unsigned long long>{0});
  countNonzero<<<64, 128>>>(static_cast<const unsigned long long*>(data), bytes / 8, found);
  CUDA(cudaGetLastError());
  return found.read()[0];
}

int main(int argc, char** argv) {
  const size_t mib = size_t{1} << 20;
  const size_t sizes[] = {4096, 3 * mib, 70 * mib,
                          static_cast<size_t>(check::option(argc, argv, "--mib", 200)) * mib};
  unsigned long long found = 0;
  for (size_t bytes : sizes) {
    void* device = nullptr;
    CUDA(cudaMalloc(&device, bytes));
    found += nonzero(device, bytes);
    CUDA(cudaMemset(device, 0xa5, bytes));
  }
  check::say("words of device memory that were not zero: %llu", found);
  found = 0;
  for (size_t bytes : {size_t{4096}, 8 * mib}) {
    unsigned char* pinned = nullptr;
    CUDA(cudaMallocHost(&pinned, bytes));
    found += nonzero(pinned, bytes);
    for (size_t i = 0; i < bytes; ++i) found += pinned[i] != 0;
    std::memset(pinned, 0xa5, bytes);
  }
  check::say("words and bytes of pinned memory that were not zero: %llu", found);
  REQUIRE(found == 0);
  CUDA(cudaDeviceSynchronize());
  return check::pass();
}
