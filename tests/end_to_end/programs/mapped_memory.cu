// Host memory that the device addresses: allocated mapped, allocated portable, and the program's own,
// registered.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "check.h"

__global__ void addIndex(int* values, int count, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] += i * step;
}

// Pinned memory that was copied from, and is another allocation now: its zeros are zeros on the device too.
static void usedBefore(check::Device<int>& device, int count, bool pinned) {
  int* old = nullptr;
  CUDA(cudaMallocHost(&old, count * sizeof(int)));
  for (int i = 0; i < count; ++i) old[i] = 0x5a5a5a5a;
  CUDA(cudaMemcpyAsync(device, old, count * sizeof(int), cudaMemcpyHostToDevice));
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaFreeHost(old));
  int *host = nullptr, *onDevice = nullptr;
  if (pinned) {
    CUDA(cudaMallocHost(&host, count * sizeof(int)));
    std::memset(host, 0, count * sizeof(int));
  } else {
    host = static_cast<int*>(std::calloc(count, sizeof(int)));
    CUDA(cudaHostRegister(host, count * sizeof(int), cudaHostRegisterMapped));
  }
  host[5] = 7;
  CUDA(cudaHostGetDevicePointer(&onDevice, host, 0));
  addIndex<<<1, 64>>>(onDevice, count, 3);
  CUDA(cudaDeviceSynchronize());
  int wrong = 0;
  for (int i = 0; i < count; ++i) wrong += host[i] != 3 * i + (i == 5 ? 7 : 0);
  check::say("%s where other memory was: %d wrong", pinned ? "pinned" : "registered", wrong);
  REQUIRE(wrong == 0);
  if (pinned) {
    CUDA(cudaFreeHost(host));
  } else {
    CUDA(cudaHostUnregister(host));
    std::free(host);
  }
}

static void onDevice(const char* name, int* host, int count) {
  for (int i = 0; i < count; ++i) host[i] = 1000;
  int* device = nullptr;
  CUDA(cudaHostGetDevicePointer(&device, host, 0));
  addIndex<<<8, 128>>>(device, count, 3);
  CUDA(cudaDeviceSynchronize());
  for (int i = 0; i < count; ++i)
    if (host[i] != 1000 + 3 * i) check::fail("%s: [%d] is %d", name, i, host[i]);
  // The middle through a derived pointer.
  int* middle = nullptr;
  CUDA(cudaHostGetDevicePointer(&middle, host, 0));
  addIndex<<<1, 32>>>(middle + count / 2, 32, -1);
  CUDA(cudaDeviceSynchronize());
  for (int i = 0; i < 32; ++i) REQUIRE(host[count / 2 + i] == 1000 + 3 * (count / 2 + i) - i);
  check::say("%s: %d values written by the device", name, count);
}

int main() {
  const int count = 20000;
  int* host = nullptr;
  CUDA(cudaHostAlloc(&host, count * sizeof(int), cudaHostAllocMapped));
  onDevice("mapped", host, count);
  unsigned flags = 0;
  CUDA(cudaHostGetFlags(&flags, host));
  REQUIRE((flags & cudaHostAllocMapped) != 0);
  cudaPointerAttributes attributes;
  CUDA(cudaPointerGetAttributes(&attributes, host + 5));
  REQUIRE(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == host + 5);
  CUDA(cudaFreeHost(host));

  CUDA(cudaHostAlloc(&host, count * sizeof(int), cudaHostAllocPortable | cudaHostAllocMapped));
  onDevice("portable", host, count);
  CUDA(cudaFreeHost(host));
  CUDA(cudaHostAlloc(&host, count * sizeof(int), cudaHostAllocWriteCombined | cudaHostAllocMapped));
  onDevice("write-combined", host, count);
  CUDA(cudaFreeHost(host));
  CUDA(cudaMallocHost(&host, count * sizeof(int)));
  onDevice("pinned", host, count);
  CUDA(cudaFreeHost(host));

  // Registered: memory of malloc's (not aligned to pages) and whole pages.
  int* own = static_cast<int*>(std::malloc(count * sizeof(int)));
  CUDA(cudaHostRegister(own, count * sizeof(int), cudaHostRegisterMapped));
  onDevice("registered malloc", own, count);
  CUDA_GIVES(cudaErrorHostMemoryAlreadyRegistered,
             cudaHostRegister(own, count * sizeof(int), cudaHostRegisterMapped));
  cudaGetLastError();
  CUDA(cudaHostUnregister(own));
  CUDA_GIVES(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(own));
  cudaGetLastError();
  CUDA(cudaPointerGetAttributes(&attributes, own));
  REQUIRE(attributes.type == cudaMemoryTypeUnregistered);
  std::free(own);

  const size_t bytes = 1 << 20;
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(pages != MAP_FAILED);
  CUDA(cudaHostRegister(pages, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
  onDevice("registered pages", static_cast<int*>(pages), bytes / sizeof(int));
  // Async copies out of registered memory.
  check::Device<int> device(bytes / sizeof(int));
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaMemcpyAsync(device, pages, bytes, cudaMemcpyHostToDevice, stream));
  addIndex<<<8, 128, 0, stream>>>(device, bytes / sizeof(int), 1);
  CUDA(cudaMemcpyAsync(pages, device, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  REQUIRE(static_cast<int*>(pages)[100] == 1000 + 4 * 100);
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaHostUnregister(pages));
  munmap(pages, bytes);

  usedBefore(device, 1000, true);
  usedBefore(device, 1000, false);
  return check::pass();
}
