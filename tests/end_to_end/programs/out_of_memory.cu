// Memory that runs out: in pieces of several sizes until the error, which does not stick; the books agree
// with what was handed out, what was got before still works, and when all is given back the largest block can
// be had again.
#include <algorithm>

#include "check.h"

__global__ void fill(unsigned* values, unsigned count, unsigned seed) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = i * 2654435761u + seed;
}

struct Books {
  size_t free = 0, total = 0;
  Books() { CUDA(cudaMemGetInfo(&free, &total)); }
};

static constexpr unsigned kCount = 5000;

static void use(void* block, unsigned seed) {
  auto* values = static_cast<unsigned*>(block);
  fill<<<(kCount + 255) / 256, 256>>>(values, kCount, seed);
  CUDA(cudaGetLastError());
  std::vector<unsigned> got(kCount);
  CUDA(cudaMemcpy(got.data(), values, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost));
  for (unsigned i = 0; i < kCount; ++i)
    if (got[i] != i * 2654435761u + seed) check::fail("value %u of block %u is wrong", i, seed);
}

// Blocks of `bytes` until there are no more.
static std::vector<void*> exhaust(size_t bytes) {
  std::vector<void*> blocks;
  cudaError_t status = cudaSuccess;
  while (status == cudaSuccess) {
    const Books before;
    void* block = nullptr;
    status = cudaMalloc(&block, bytes);
    const Books after;
    REQUIRE(before.total == after.total);
    if (status == cudaSuccess) {
      blocks.push_back(block);
      REQUIRE(after.free <= before.free - bytes + (bytes >> 4) && after.free <= after.total);
    } else {
      REQUIRE(block == nullptr && after.free == before.free);
    }
  }
  REQUIRE(status == cudaErrorMemoryAllocation);
  REQUIRE(cudaGetLastError() == cudaErrorMemoryAllocation);
  REQUIRE(cudaGetLastError() == cudaSuccess);
  return blocks;
}

static void giveBack(std::vector<void*>& blocks) {
  for (void* block : blocks) CUDA(cudaFree(block));
  blocks.clear();
}

static void round(const char* what, size_t bytes, size_t most) {
  std::vector<void*> blocks = exhaust(bytes);
  // Not more than there is, and not much less: what small allocations share is lost to large ones.
  if (blocks.empty() || blocks.size() > most || blocks.size() + most / 8 + 1 < most)
    check::fail("%s: %zu blocks, %zu fit", what, blocks.size(), most);
  for (size_t i = 0; i < blocks.size(); ++i) use(blocks[i], static_cast<unsigned>(i));
  // Room for one more is made by giving one back.
  CUDA(cudaFree(blocks[blocks.size() / 2]));
  CUDA(cudaMalloc(&blocks[blocks.size() / 2], bytes));
  use(blocks[blocks.size() / 2], 77);
  use(blocks[0], 78);
  giveBack(blocks);
  check::say("%s: out of memory, used, and given back", what);
}

int main() {
  check::Device<int> small(16);  // whatever the first allocation brings along
  const Books start;
  const size_t mib = size_t{1} << 20;
  const size_t largest = start.free / 4 * 3 / mib * mib;
  void* block = nullptr;
  CUDA(cudaMalloc(&block, start.free / 64 * 63 / mib * mib));
  use(block, 78);
  CUDA(cudaFree(block));
  check::say("63 of 64 parts of what is free are one block");
  round("one large block", largest, 1);
  round("thirds", start.free / 3 / mib * mib - mib, 3);
  round("sixteenths", start.free / 16 / mib * mib, 16);
  round("hundredths", start.free / 100, 100);

  CUDA_GIVES(cudaErrorMemoryAllocation, cudaMalloc(&block, start.total + mib));
  CUDA_GIVES(cudaErrorMemoryAllocation, cudaMallocAsync(&block, start.total + mib, nullptr));
  CUDA_GIVES(cudaErrorMemoryAllocation, cudaMalloc(&block, ~size_t{0} / 2));
  CUDA_GIVES(cudaErrorMemoryAllocation, cudaGetLastError());
  CUDA_GIVES(cudaSuccess, cudaGetLastError());
  CUDA(cudaMallocAsync(&block, mib, nullptr));
  use(block, 79);
  CUDA(cudaFreeAsync(block, nullptr));
  CUDA(cudaDeviceSynchronize());

  CUDA(cudaMalloc(&block, largest));
  use(block, 80);
  CUDA(cudaFree(block));
  const Books end;
  REQUIRE(end.total == start.total);
  REQUIRE(end.free + start.free / 16 >= start.free);  // a pool may keep what it once had
  return check::pass();
}
