// Pi by throwing darts; every thread has its own generator, so hits are the same integer everywhere.
#include "check.h"

__host__ __device__ inline uint32_t nextRandom(uint64_t& state) {  // PCG-XSH-RR
  const uint64_t old = state;
  state = old * 6364136223846793005ull + 1442695040888963407ull;
  const uint32_t shifted = static_cast<uint32_t>(((old >> 18) ^ old) >> 27), turn = old >> 59;
  return (shifted >> turn) | (shifted << ((32 - turn) & 31));
}

__host__ __device__ inline unsigned long long throwDarts(uint64_t seed, int darts) {
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  unsigned long long hits = 0;
  for (int i = 0; i < darts; ++i) {
    const uint64_t x = nextRandom(state) >> 8, y = nextRandom(state) >> 8;
    hits += x * x + y * y < (uint64_t{1} << 48);
  }
  return hits;
}

__global__ void estimate(unsigned long long* total, int darts) {
  const unsigned long long hits = throwDarts(blockIdx.x * blockDim.x + threadIdx.x, darts);
  atomicAdd(total, hits);
}

int main(int argc, char** argv) {
  const int threads = 4096, darts = check::option(argc, argv, "--darts", 500);
  check::Device<unsigned long long> total(1);
  CUDA(cudaMemset(total, 0, sizeof(unsigned long long)));
  estimate<<<threads / 128, 128>>>(total, darts);
  CUDA(cudaGetLastError());
  unsigned long long expected = 0;
  for (int thread = 0; thread < threads; ++thread) expected += throwDarts(thread, darts);
  const unsigned long long hits = total.read()[0];
  const double pi = 4.0 * hits / (static_cast<double>(threads) * darts);
  check::say("%llu hits, pi is about %.3f", hits, pi);
  REQUIRE(hits == expected);
  REQUIRE(std::fabs(pi - M_PI) < 0.01);
  return check::pass();
}
