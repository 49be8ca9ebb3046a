// Five-point heat stencil with a halo in shared memory, and a wide one-dimensional stencil with constant
// weights.
#include <utility>

#include "check.h"

constexpr int kBlock = 16, kRadius = 4;
__constant__ int weights[2 * kRadius + 1];

__global__ void heat(const double* input, double* output, int width, int height) {
  __shared__ double tile[kBlock + 2][kBlock + 2];
  const int x = blockIdx.x * kBlock + threadIdx.x, y = blockIdx.y * kBlock + threadIdx.y;
  // Every thread loads its part of the tile and its halo.
  for (int row = threadIdx.y; row < kBlock + 2; row += kBlock)
    for (int column = threadIdx.x; column < kBlock + 2; column += kBlock) {
      const int fromX = static_cast<int>(blockIdx.x) * kBlock + column - 1;
      const int fromY = static_cast<int>(blockIdx.y) * kBlock + row - 1;
      const bool inside = fromX >= 0 && fromX < width && fromY >= 0 && fromY < height;
      tile[row][column] = inside ? input[fromY * width + fromX] : 0.0;
    }
  __syncthreads();
  if (x >= width || y >= height) return;
  const int i = threadIdx.y + 1, j = threadIdx.x + 1;
  output[y * width + x] =
      0.5 * tile[i][j] + 0.125 * (tile[i - 1][j] + tile[i + 1][j] + tile[i][j - 1] + tile[i][j + 1]);
}

__global__ void wide(const int* input, int* output, int count) {
  extern __shared__ int window[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int at = threadIdx.x + kRadius;
  window[at] = i < count ? input[i] : 0;
  if (threadIdx.x < kRadius) {
    window[threadIdx.x] = i >= kRadius && i - kRadius < count ? input[i - kRadius] : 0;
    const int right = i + blockDim.x;
    window[at + blockDim.x] = right < count ? input[right] : 0;
  }
  __syncthreads();
  if (i >= count) return;
  int sum = 0;
  for (int k = -kRadius; k <= kRadius; ++k) sum += weights[k + kRadius] * window[at + k];
  output[i] = sum;
}

static std::vector<double> heatReference(std::vector<double> field, int width, int height, int steps) {
  const auto at = [&](int x, int y) {
    return x >= 0 && x < width && y >= 0 && y < height ? field[y * width + x] : 0.0;
  };
  for (int step = 0; step < steps; ++step) {
    std::vector<double> next(field.size());
    for (int y = 0; y < height; ++y)
      for (int x = 0; x < width; ++x)
        next[y * width + x] =
            0.5 * at(x, y) + 0.125 * (at(x, y - 1) + at(x, y + 1) + at(x - 1, y) + at(x + 1, y));
    field.swap(next);
  }
  return field;
}

int main(int argc, char** argv) {
  const int width = check::option(argc, argv, "--size", 100), height = width * 3 / 4 + 1, steps = 20;
  std::vector<double> field(width * height);
  check::Random random(16);
  for (double& value : field) value = random.unit();
  check::Device<double> first(field), second(field.size());
  double *from = first, *to = second;
  for (int step = 0; step < steps; ++step) {
    heat<<<dim3((width + kBlock - 1) / kBlock, (height + kBlock - 1) / kBlock), dim3(kBlock, kBlock)>>>(
        from, to, width, height);
    std::swap(from, to);
  }
  CUDA(cudaGetLastError());
  check::near("heat", first.read(), heatReference(field, width, height, steps), 1e-12);

  const int hostWeights[2 * kRadius + 1] = {1, -2, 3, -4, 5, -4, 3, -2, 1};
  CUDA(cudaMemcpyToSymbol(weights, hostWeights, sizeof hostWeights));
  const int count = 5000;
  std::vector<int> values(count), expected(count);
  for (int& value : values) value = static_cast<int>(random.below(2000)) - 1000;
  for (int i = 0; i < count; ++i)
    for (int k = -kRadius; k <= kRadius; ++k)
      if (i + k >= 0 && i + k < count) expected[i] += hostWeights[k + kRadius] * values[i + k];
  check::Device<int> input(values), output(count);
  wide<<<(count + 127) / 128, 128, (128 + 2 * kRadius) * sizeof(int)>>>(input, output, count);
  check::same("wide stencil", output.read(), expected);
  return check::pass();
}
