// Everything that a session has on a device while it is put aside: allocations of many sizes, a device
// variable, a graph that addresses them, a texture on one, an array, pinned memory. All of it is made, looked
// at, and looked at again.
//   --mib N     so much device memory (default 24), in pieces of up to 1 GiB
//   --wait      between the two looks: says "ready" and waits for a line on standard input. Then says how
//   long the
//               first call after it took, in microseconds, on standard error.
#include <chrono>

#include "check.h"

__device__ unsigned counted;

__device__ unsigned expectedAt(size_t index, unsigned key) {
  return static_cast<unsigned>(index * 2654435761u) ^ static_cast<unsigned>(index >> 32) ^ key;
}

__global__ void fill(unsigned* words, size_t count, unsigned key) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    words[i] = expectedAt(i, key);
}
__global__ void compare(const unsigned* words, size_t count, unsigned key, unsigned* wrong) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    if (words[i] != expectedAt(i, key)) atomicAdd(wrong, 1u);
}
__global__ void count(unsigned by) { counted += by; }
__global__ void sumTexture(cudaTextureObject_t texture, int count, unsigned* sum) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) atomicAdd(sum, tex1Dfetch<unsigned>(texture, i));
}

struct Piece {
  unsigned* words = nullptr;
  size_t count = 0;
  unsigned key = 0;
};

static std::vector<Piece> allocate(size_t bytes) {
  constexpr size_t kMost = size_t{1} << 30;
  check::Random random(7);
  std::vector<Piece> pieces;
  for (size_t left = bytes; left != 0;) {
    // Half of them large, the others of a few KiB to a few MiB.
    const size_t wanted =
        random.below(2) ? kMost : (size_t{4096} << random.below(11)) + 4 * random.below(1000);
    const size_t some = wanted < left ? wanted / 4 * 4 : left;
    Piece piece{nullptr, some / 4, random.next()};
    CUDA(cudaMalloc(&piece.words, some));
    fill<<<64, 128>>>(piece.words, piece.count, piece.key);
    pieces.push_back(piece);
    left -= some;
  }
  return pieces;
}

int main(int argc, char** argv) {
  const size_t bytes = size_t(check::option(argc, argv, "--mib", 24)) << 20;
  const std::vector<Piece> pieces = allocate(bytes);
  constexpr int kTexels = 4096;
  check::Device<unsigned> results(std::vector<unsigned>{0, 0, 0});
  check::Device<unsigned> texels(std::vector<unsigned>(kTexels, 3));
  unsigned* const wrong = results;
  unsigned* const sum = wrong + 1;
  unsigned* pinned = nullptr;
  CUDA(cudaMallocHost(&pinned, 4096));
  for (int i = 0; i < 1024; ++i) pinned[i] = i;
  cudaArray_t array = nullptr;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned>();
  CUDA(cudaMallocArray(&array, &format, 256, 4));
  CUDA(cudaMemcpy2DToArray(array, 0, 0, pinned, 1024, 1024, 4, cudaMemcpyHostToDevice));

  cudaResourceDesc resource{};
  resource.resType = cudaResourceTypeLinear;
  resource.res.linear = {static_cast<unsigned*>(texels), format, kTexels * sizeof(unsigned)};
  cudaTextureDesc how{};
  cudaTextureObject_t texture = 0;
  CUDA(cudaCreateTextureObject(&texture, &resource, &how, nullptr));

  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (const Piece& piece : pieces)
    compare<<<64, 128, 0, stream>>>(piece.words, piece.count, piece.key, wrong);
  sumTexture<<<1, 64, 0, stream>>>(texture, kTexels, sum);
  count<<<1, 1, 0, stream>>>(5);
  CUDA(cudaMemcpyAsync(pinned, results, 3 * sizeof(unsigned), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));

  const auto look = [&](unsigned times) {
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    REQUIRE(pinned[0] == 0);
    REQUIRE(pinned[1] == times * 3 * kTexels);
    unsigned seen = 0;
    CUDA(cudaMemcpyFromSymbol(&seen, counted, sizeof seen));
    REQUIRE(seen == 5 * times);
    std::vector<unsigned> texelsSeen(1024);
    CUDA(cudaMemcpy2DFromArray(texelsSeen.data(), 1024, array, 0, 0, 1024, 4, cudaMemcpyDeviceToHost));
    for (unsigned i = 3; i < 1024; ++i) REQUIRE(texelsSeen[i] == i);
  };
  look(1);
  if (check::flag(argc, argv, "--wait")) {
    check::say("ready");
    char line[16];
    if (std::fgets(line, sizeof line, stdin) == nullptr) check::fail("standard input ended");
    const auto begin = std::chrono::steady_clock::now();
    CUDA(cudaStreamSynchronize(stream));
    count<<<1, 1, 0, stream>>>(0);
    CUDA(cudaStreamSynchronize(stream));
    const auto took = std::chrono::steady_clock::now() - begin;
    std::fprintf(stderr, "%lld\n",
                 static_cast<long long>(std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
  }
  for (unsigned times = 2; times < 7; ++times) look(times);
  return check::pass();
}
