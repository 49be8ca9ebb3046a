// Transpose through a padded shared tile, of sizes that do not divide by the tile.
#include "check.h"

constexpr int kTile = 32, kRows = 8;

template <typename T>
__global__ void transpose(const T* input, T* output, int width, int height) {
  __shared__ T tile[kTile][kTile + 1];
  int x = blockIdx.x * kTile + threadIdx.x, y = blockIdx.y * kTile + threadIdx.y;
  for (int row = 0; row < kTile; row += kRows)
    if (x < width && y + row < height) tile[threadIdx.y + row][threadIdx.x] = input[(y + row) * width + x];
  __syncthreads();
  x = blockIdx.y * kTile + threadIdx.x;
  y = blockIdx.x * kTile + threadIdx.y;
  for (int row = 0; row < kTile; row += kRows)
    if (x < height && y + row < width) output[(y + row) * height + x] = tile[threadIdx.x][threadIdx.y + row];
}

template <typename T>
static void run(const char* name, int width, int height) {
  std::vector<T> values(width * height), expected(values.size());
  check::Random random(9);
  for (T& value : values) value = static_cast<T>(random.next());
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x) expected[x * height + y] = values[y * width + x];
  check::Device<T> input(values), output(values.size());
  transpose<<<dim3((width + kTile - 1) / kTile, (height + kTile - 1) / kTile), dim3(kTile, kRows)>>>(
      input.get(), output.get(), width, height);
  CUDA(cudaGetLastError());
  check::same(name, output.read(), expected);
}

int main() {
  run<float>("float 320x200", 320, 200);
  run<double>("double 129x65", 129, 65);
  run<unsigned char>("bytes 77x301", 77, 301);
  run<uint64_t>("64 bits 1x50", 1, 50);
  return check::pass();
}
