// Prefetching and advice are for managed memory alone: of other memory, or of a range that is managed in
// part, they are refused. Where a device has no concurrent managed access, a driver may refuse managed memory
// too.
#include "driver_check.h"

constexpr size_t kBytes = 1 << 20, kBeyond = 64 << 20;

__managed__ int symbol[1024];

static void isRefused(const char* what, const void* memory, size_t bytes) {
  cudaMemLocation device{}, host{};
  device.type = cudaMemLocationTypeDevice;
  host.type = cudaMemLocationTypeHost;
  REQUIRE(cudaMemPrefetchAsync(memory, bytes, device, 0, nullptr) == cudaErrorInvalidValue);
  REQUIRE(cudaMemPrefetchAsync(memory, bytes, host, 0, nullptr) == cudaErrorInvalidValue);
  for (cudaMemoryAdvise advice : {cudaMemAdviseSetReadMostly, cudaMemAdviseSetPreferredLocation,
                                  cudaMemAdviseSetAccessedBy, cudaMemAdviseUnsetAccessedBy})
    REQUIRE(cudaMemAdvise(memory, bytes, advice, device) == cudaErrorInvalidValue);
  cudaGetLastError();
  check::say("%s: refused", what);
}

int main() {
  int concurrent = 0;
  CUDA(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
  char *managed, *device, *pinned;
  CUDA(cudaMallocManaged(&managed, kBytes));
  CUDA(cudaMalloc(&device, kBytes));
  CUDA(cudaMallocHost(&pinned, kBytes));
  std::memset(managed, 1, kBytes);

  isRefused("device memory", device, kBytes);
  isRefused("pinned memory", pinned, kBytes);
  isRefused("managed memory and what follows it", managed, kBytes + kBeyond);

  cudaMemLocation here{}, host{};
  here.type = cudaMemLocationTypeDevice;
  host.type = cudaMemLocationTypeHost;
  auto works = [&](cudaError_t status) {
    const bool mayRefuse = !concurrent && status == cudaErrorInvalidDevice;
    if (status != cudaSuccess && !mayRefuse) check::fail("it gave %s", cudaGetErrorName(status));
    cudaGetLastError();
  };
  for (void* memory :
       {static_cast<void*>(managed), static_cast<void*>(managed + 4096), static_cast<void*>(symbol)}) {
    const size_t bytes = memory == managed ? kBytes : 4096;
    works(cudaMemPrefetchAsync(memory, bytes, here, 0, nullptr));
    works(cudaMemPrefetchAsync(memory, bytes, host, 0, nullptr));
    works(cudaMemAdvise(memory, bytes, cudaMemAdviseSetReadMostly, here));
    works(cudaMemAdvise(memory, bytes, cudaMemAdviseUnsetReadMostly, here));
    works(cudaMemAdvise(memory, bytes, cudaMemAdviseSetPreferredLocation, host));
    works(cudaMemAdvise(memory, bytes, cudaMemAdviseUnsetPreferredLocation, host));
    works(cudaMemAdvise(memory, bytes, cudaMemAdviseSetAccessedBy, here));
    works(cudaMemAdvise(memory, bytes, cudaMemAdviseUnsetAccessedBy, here));
  }
  check::say("managed memory: accepted");

  // In batches: the first two ranges to the device, the third to the host.
  void* ranges[3] = {managed, managed + 8192, symbol};
  size_t sizes[3] = {4096, 8192, sizeof symbol}, firsts[2] = {0, 2};
  cudaMemLocation places[2] = {here, host};
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  works(cudaMemPrefetchBatchAsync(ranges, sizes, 3, places, firsts, 2, 0, stream));
  works(cudaMemDiscardAndPrefetchBatchAsync(ranges + 2, sizes + 2, 1, places, firsts, 1, 0, stream));
  works(cudaMemDiscardBatchAsync(ranges + 2, sizes + 2, 1, 0, stream));
  REQUIRE(cudaMemDiscardBatchAsync(ranges + 2, sizes + 2, 1, 0, nullptr) != cudaSuccess);
  REQUIRE(cudaMemPrefetchBatchAsync(ranges, sizes, 3, places, firsts, 2, 0, nullptr) != cudaSuccess);
  ranges[1] = device;
  REQUIRE(cudaMemPrefetchBatchAsync(ranges, sizes, 3, places, firsts, 2, 0, stream) != cudaSuccess);
  REQUIRE(cudaMemDiscardBatchAsync(ranges, sizes, 3, 0, stream) != cudaSuccess);
  cudaGetLastError();
  symbol[0] = 5;

  here.id = 1000;
  REQUIRE(cudaMemPrefetchAsync(managed, kBytes, here, 0, nullptr) != cudaSuccess);
  REQUIRE(cudaMemAdvise(managed, kBytes, cudaMemAdviseSetPreferredLocation, here) != cudaSuccess);
  here.id = 0;
  REQUIRE(cudaMemAdvise(managed, kBytes, static_cast<cudaMemoryAdvise>(99), here) != cudaSuccess);
  cudaGetLastError();
  check::say("no such place or advice: refused");

  CUDA(cudaStreamAttachMemAsync(stream, managed, 0, cudaMemAttachGlobal));
  REQUIRE(cudaStreamAttachMemAsync(stream, device, 0, cudaMemAttachGlobal) != cudaSuccess);
  cudaGetLastError();
  CUDA(cudaStreamSynchronize(stream));
  for (size_t i = 0; i < kBytes; i += 4095) REQUIRE(managed[i] == 1);
  CUDA(cudaFree(managed));
  CUDA(cudaFree(device));
  CUDA(cudaFreeHost(pinned));
  return check::pass();
}
