// Copies of one byte to 64 MiB, aligned and not, from pageable and pinned memory, to and from and within the
// device; and the order in which asynchronous copies take and give their bytes.
#include <thread>

#include "check.h"

static void pattern(unsigned char* bytes, size_t count, uint32_t seed) {
  uint32_t state = seed * 2654435761u + 1;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    bytes[i] = static_cast<unsigned char>(state >> 24);
  }
}

// Host -> device -> device (shifted) -> host, all on one stream; guards around every range stay.
static void roundTrip(const char* kind, unsigned char* source, unsigned char* target, unsigned char* deviceA,
                      unsigned char* deviceB, size_t size, unsigned shift, cudaStream_t stream) {
  const size_t guard = 64;
  const unsigned from = shift % 7, middle = shift % 5, to = shift % 3;
  pattern(source, size + guard, static_cast<uint32_t>(size) + shift);
  std::memset(target, 0x5a, size + 2 * guard);
  CUDA(cudaMemsetAsync(deviceB, 0xa5, size + 2 * guard, stream));
  CUDA(cudaMemcpyAsync(deviceA + middle, source + from, size, cudaMemcpyHostToDevice, stream));
  CUDA(cudaMemcpyAsync(deviceB + guard + to, deviceA + middle, size, cudaMemcpyDeviceToDevice, stream));
  CUDA(cudaMemcpyAsync(target + guard, deviceB + guard + to, size, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  if (std::memcmp(target + guard, source + from, size) != 0)
    check::fail("%s: %zu bytes (shift %u) came back changed", kind, size, shift);
  for (size_t i = 0; i < guard; ++i)
    if (target[i] != 0x5a || target[guard + size + i] != 0x5a)
      check::fail("%s: %zu bytes: written beyond", kind, size);
  unsigned char edge[2];
  CUDA(cudaMemcpy(&edge[0], deviceB + guard + to - 1, 1, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(&edge[1], deviceB + guard + to + size, 1, cudaMemcpyDeviceToHost));
  if (edge[0] != 0xa5 || edge[1] != 0xa5)
    check::fail("%s: %zu bytes: written beyond on the device", kind, size);
}

static std::vector<size_t> sizes(size_t largest) {
  std::vector<size_t> all;
  for (size_t size = 1; size <= largest; size *= 2)
    for (int delta : {-1, 0, 1}) {
      const size_t candidate = size + delta;
      if (candidate >= 1 && candidate <= largest && (size < 65536 || delta <= 0 || size * 4 > largest))
        all.push_back(candidate);
    }
  for (size_t odd : {3333u, 70001u, 1234567u, 9999991u})
    if (odd <= largest) all.push_back(odd);
  return all;
}

// A pageable source may be overwritten as soon as the call returns; a pinned one once the stream has passed.
static void sourceReuse(unsigned char* device, cudaStream_t stream, size_t size) {
  std::vector<unsigned char> source(size), first(size), got(size);
  for (int round = 0; round < 8; ++round) {
    pattern(source.data(), size, round);
    if (round % 2 == 0) first = source;
    CUDA(cudaMemcpyAsync(device + (round % 2) * size, source.data(), size, cudaMemcpyHostToDevice, stream));
    std::memset(source.data(), 0xff, size);
    if (round % 2 == 1) {
      CUDA(cudaMemcpyAsync(got.data(), device, size, cudaMemcpyDeviceToHost, stream));
      CUDA(cudaStreamSynchronize(stream));
      if (got != first) check::fail("a pageable source of %zu bytes was read after the call returned", size);
    }
  }
}

// Overlapping uses of one buffer: each copy must see exactly what the one before it left.
static void chain(unsigned char* device, unsigned char* pinned, size_t chunk, cudaStream_t stream) {
  constexpr int kLinks = 16;
  pattern(pinned, chunk, 77);
  const uint64_t expected = check::digest(pinned, chunk);
  std::memset(pinned + chunk, 0, kLinks * chunk);
  for (int link = 0; link < kLinks; ++link) {
    CUDA(cudaMemcpyAsync(device, pinned + link * chunk, chunk, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemcpyAsync(device + chunk, device, chunk, cudaMemcpyDeviceToDevice, stream));
    CUDA(cudaMemsetAsync(device, 0, chunk, stream));
    CUDA(cudaMemcpyAsync(pinned + (link + 1) * chunk, device + chunk, chunk, cudaMemcpyDeviceToHost, stream));
  }
  CUDA(cudaStreamSynchronize(stream));
  for (int link = 0; link <= kLinks; ++link)
    if (check::digest(pinned + link * chunk, chunk) != expected)
      check::fail("link %d of a chain is broken", link);
  check::say("a chain of %d copies of %zu bytes: %016llx", kLinks, chunk,
             static_cast<unsigned long long>(expected));
}

// Large copies of pageable memory, synchronous, from several threads at once, while kernels run beside them.
__global__ void stir(unsigned* values, int count, int rounds) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    for (int round = 0; round < rounds; ++round) values[i] = values[i] * 1664525u + 1013904223u;
}

static void large(unsigned char* deviceA, unsigned char* deviceB, unsigned char* pinned, size_t size) {
  constexpr int kCount = 1 << 16, kLaunches = 20, kRounds = 8;
  unsigned* values;
  CUDA(cudaMalloc(&values, kCount * sizeof(unsigned)));
  CUDA(cudaMemset(values, 0, kCount * sizeof(unsigned)));
  CUDA(cudaDeviceSynchronize());  // a non-blocking stream does not wait for the NULL stream's memset
  cudaStream_t beside;
  CUDA(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  for (int launch = 0; launch < kLaunches; ++launch) stir<<<32, 128, 0, beside>>>(values, kCount, kRounds);
  auto there = [&](unsigned char* device, unsigned seed) {
    std::vector<unsigned char> source(size + 3), target(size + 3, 0);
    pattern(source.data(), source.size(), seed);
    CUDA(cudaMemcpy(device, source.data() + 3, size, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(target.data() + 1, device, size, cudaMemcpyDeviceToHost));
    if (std::memcmp(target.data() + 1, source.data() + 3, size) != 0 || target[0] != 0 ||
        target[size + 1] != 0)
      check::fail("a large copy (seed %u) came back changed", seed);
  };
  std::thread other([&] {
    CUDA(cudaSetDevice(0));
    there(deviceB, 9);
  });
  there(deviceA, 5);
  other.join();
  // Back into pinned memory, and at once from there to the device again.
  CUDA(cudaMemcpyAsync(pinned, deviceA, size, cudaMemcpyDeviceToHost, beside));
  CUDA(cudaMemcpyAsync(deviceB, pinned, size, cudaMemcpyHostToDevice, beside));
  std::vector<unsigned char> source(size + 3), got(size);
  pattern(source.data(), source.size(), 5);
  CUDA(cudaMemcpyAsync(got.data(), deviceB, size, cudaMemcpyDeviceToHost, beside));
  CUDA(cudaStreamSynchronize(beside));
  if (std::memcmp(got.data(), source.data() + 3, size) != 0 ||
      std::memcmp(pinned, source.data() + 3, size) != 0)
    check::fail("pinned memory was sent before the device had written it");
  std::vector<unsigned> stirred(kCount);
  CUDA(cudaMemcpy(stirred.data(), values, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost));
  unsigned expected = 0;
  for (int round = 0; round < kLaunches * kRounds; ++round) expected = expected * 1664525u + 1013904223u;
  for (int i = 0; i < kCount; ++i)
    if (stirred[i] != expected) check::fail("[%d] is wrong after copies beside kernels", i);
  check::say("%zu bytes there and back from two threads beside kernels are exact", size);
  CUDA(cudaStreamDestroy(beside));
  CUDA(cudaFree(values));
}

int main(int argc, char** argv) {
  const size_t largest = static_cast<size_t>(check::option(argc, argv, "--size", 16 << 20));
  const size_t room = largest + 1024;
  unsigned char *deviceA, *deviceB, *pinnedA, *pinnedB;
  CUDA(cudaMalloc(&deviceA, room));
  CUDA(cudaMalloc(&deviceB, room));
  CUDA(cudaMallocHost(&pinnedA, room));
  CUDA(cudaMallocHost(&pinnedB, room));
  std::vector<unsigned char> pageableA(room), pageableB(room);
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::vector<size_t> all = sizes(largest);
  unsigned shift = 0;
  for (size_t size : all) {
    roundTrip("pageable", pageableA.data(), pageableB.data(), deviceA, deviceB, size, ++shift, stream);
    roundTrip("pinned", pinnedA, pinnedB, deviceA, deviceB, size, shift, stream);
    roundTrip("pinned to pageable", pinnedA, pageableB.data(), deviceA, deviceB, size, ++shift,
              cudaStreamLegacy);
  }
  check::say("%zu sizes up to %zu bytes are exact", all.size(), largest);
  for (size_t size : {100, 4096, 70000, 1 << 20}) sourceReuse(deviceA, stream, size);
  check::say("pageable sources can be used again at once");
  for (size_t chunk : {1000, 65536, 300001}) chain(deviceA, pinnedA, chunk, stream);
  CUDA(cudaStreamDestroy(stream));
  for (unsigned char* pointer : {deviceA, deviceB}) CUDA(cudaFree(pointer));
  for (unsigned char* pointer : {pinnedA, pinnedB}) CUDA(cudaFreeHost(pointer));
  const size_t most = static_cast<size_t>(check::option(argc, argv, "--large", (64 << 20) + 12345));
  for (unsigned char** pointer : {&deviceA, &deviceB}) CUDA(cudaMalloc(pointer, most));
  CUDA(cudaMallocHost(&pinnedA, most));
  CUDA(cudaMallocHost(&pinnedB, 1));
  large(deviceA, deviceB, pinnedA, most);
  for (unsigned char* pointer : {deviceA, deviceB}) CUDA(cudaFree(pointer));
  for (unsigned char* pointer : {pinnedA, pinnedB}) CUDA(cudaFreeHost(pointer));
  return check::pass();
}
