// Memory of the host that the device addresses, and that lies still for a second before it changes again:
// what a thread, a system call or the device writes then is there for the next kernel and for the host, as
// ever.
#include <unistd.h>

#include <thread>

#include "check.h"

constexpr int kCount = 64 * 1024, kLaunches = 90;

__global__ void sum(const int* values, int count, unsigned long long* total) {
  unsigned long long mine = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) mine += values[i];
  atomicAdd(total, mine);
}

__global__ void set(int* values, int index, int value) { values[index] = value; }

struct Sums {
  unsigned long long* device = nullptr;
  Sums() { CUDA(cudaMalloc(&device, sizeof *device)); }
  ~Sums() { CUDA(cudaFree(device)); }
  unsigned long long of(const int* values) const {
    CUDA(cudaMemset(device, 0, sizeof *device));
    sum<<<1, 128>>>(values, kCount, device);
    unsigned long long total = 0;
    CUDA(cudaMemcpy(&total, device, sizeof total, cudaMemcpyDeviceToHost));
    return total;
  }
};

// Long enough for whoever watches the memory to see that nothing is written.
static void lieStill(const Sums& sums, const int* device, unsigned long long expected) {
  for (int pause = 0; pause < 4; ++pause) {
    for (int i = 0; i < kLaunches; ++i) {
      const unsigned long long total = sums.of(device);
      if (total != expected) check::fail("launch %d: %llu in place of %llu", i, total, expected);
    }
    usleep(120'000);
  }
}

static void writeBySystemCall(int* to, int value) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  REQUIRE(write(ends[1], &value, sizeof value) == sizeof value);
  REQUIRE(read(ends[0], to, sizeof value) == sizeof value);
  close(ends[0]);
  close(ends[1]);
}

static void changes(const char* name, int* host, int* device) {
  const Sums sums;
  for (int i = 0; i < kCount; ++i) host[i] = 1;
  unsigned long long expected = kCount;
  lieStill(sums, device, expected);
  host[5] += 10;
  expected += 10;
  REQUIRE(sums.of(device) == expected);
  lieStill(sums, device, expected);
  std::thread([&] { host[kCount / 2] += 100; }).join();
  writeBySystemCall(host + kCount - 1, 1001);
  expected += 1100;
  REQUIRE(sums.of(device) == expected);
  set<<<1, 1>>>(device, 777, 10001);
  CUDA(cudaDeviceSynchronize());
  REQUIRE(host[777] == 10001);
  expected += 10000;
  lieStill(sums, device, expected);
  host[777] = 1;
  host[778] = 2;
  expected -= 9999;
  REQUIRE(sums.of(device) == expected);
  check::say("%s: %llu", name, expected);
}

int main() {
  int *host = nullptr, *device = nullptr;
  CUDA(cudaHostAlloc(&host, kCount * sizeof(int), cudaHostAllocMapped));
  CUDA(cudaHostGetDevicePointer(&device, host, 0));
  changes("mapped", host, device);
  CUDA(cudaFreeHost(host));
  CUDA(cudaMallocHost(&host, kCount * sizeof(int)));
  CUDA(cudaHostGetDevicePointer(&device, host, 0));
  changes("pinned", host, device);
  CUDA(cudaFreeHost(host));
  return check::pass();
}
