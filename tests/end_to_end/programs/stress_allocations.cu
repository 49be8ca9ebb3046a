// Many small and some large allocations, freed in random order; each holds its own pattern, which kernels
// write and check; ranges never overlap.
#include <map>

#include "check.h"

__global__ void write(unsigned* words, unsigned count, unsigned key) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) words[i] = key ^ (i * 2654435761u);
}
__global__ void verify(const unsigned* words, unsigned count, unsigned key, unsigned* wrong) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
    if (words[i] != (key ^ (i * 2654435761u))) atomicAdd(wrong, 1u);
}

struct Block {
  unsigned* words;
  unsigned count, key;
};

class Arena {
 public:
  explicit Arena(unsigned* wrong) : wrong_(wrong) {}

  void allocate(unsigned count, unsigned key) {
    Block block = {nullptr, count, key};
    CUDA(cudaMalloc(&block.words, count * sizeof(unsigned)));
    const auto begin = reinterpret_cast<uintptr_t>(block.words), end = begin + count * sizeof(unsigned);
    REQUIRE(begin % 256 == 0);
    const auto after = ranges_.upper_bound(begin);
    REQUIRE(after == ranges_.end() || after->first >= end);
    if (after != ranges_.begin()) REQUIRE(std::prev(after)->second <= begin);
    ranges_[begin] = end;
    write<<<1, 128>>>(block.words, count, key);
    blocks_.push_back(block);
  }

  void release(size_t which) {
    const Block block = blocks_[which];
    verify<<<1, 128>>>(block.words, block.count, block.key, wrong_);
    CUDA(cudaFree(block.words));
    ranges_.erase(reinterpret_cast<uintptr_t>(block.words));
    blocks_[which] = blocks_.back();
    blocks_.pop_back();
  }
  size_t size() const { return blocks_.size(); }

 private:
  unsigned* wrong_;
  std::vector<Block> blocks_;
  std::map<uintptr_t, uintptr_t> ranges_;
};

int main(int argc, char** argv) {
  const int rounds = check::option(argc, argv, "--rounds", 1500);
  check::Device<unsigned> wrong(1);
  CUDA(cudaMemset(wrong, 0, sizeof(unsigned)));
  Arena arena(wrong);
  check::Random random(37);
  size_t most = 0;
  for (int round = 0; round < rounds; ++round) {
    if (arena.size() == 0 || random.below(100) < 55) {
      const unsigned large = random.below(40) == 0 ? 1 << 18 : 1 << random.below(12);
      arena.allocate(1 + random.below(large), random.next());
    } else {
      arena.release(random.below(arena.size()));
    }
    if (arena.size() > most) most = arena.size();
  }
  while (arena.size() > 0) arena.release(random.below(arena.size()));
  check::say("%d rounds, at most %zu alive, %u wrong", rounds, most, wrong.read()[0]);
  REQUIRE(wrong.read()[0] == 0);
  return check::pass();
}
