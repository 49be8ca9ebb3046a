// cuSPARSE: a CSR matrix times a vector, a dense matrix and another CSR matrix, by algorithms that repeat bit
// by bit.
#include <cusparse.h>

#include "library.h"

using library::Buffer;
using library::numbers;

inline std::string statusText(cusparseStatus_t status) { return cusparseGetErrorName(status); }

namespace {

template <typename T>
struct Csr {
  int rows, columns;
  std::vector<int> starts, places;
  std::vector<T> values;

  // Rows of 1 to 20 values, in ascending columns.
  Csr(int rows, int columns, uint64_t seed) : rows(rows), columns(columns), starts{0} {
    check::Random random(seed);
    for (int row = 0; row < rows; ++row) {
      int column = int(random.below(10));
      for (uint32_t left = 1 + random.below(20); left > 0 && column < columns; --left) {
        places.push_back(column);
        column += 1 + int(random.below(uint32_t(columns) / 10));
      }
      starts.push_back(int(places.size()));
    }
    values = numbers<T>(places.size(), seed + 1);
  }
  // Values of which every sum is exact, in whatever order an algorithm takes them.
  void coarsen() {
    for (T& each : values) each = std::round(each * 8) / 8;
  }
  double at(int row, int column) const {
    for (int i = starts[row]; i < starts[row + 1]; ++i)
      if (places[i] == column) return double(values[i]);
    return 0;
  }
};

template <typename T>
constexpr cudaDataType typeOf() {
  return std::is_same_v<T, double> ? CUDA_R_64F : CUDA_R_32F;
}

// The matrix on the device, with cuSPARSE's description of it.
template <typename T>
struct OnDevice {
  explicit OnDevice(const Csr<T>& csr) : starts(csr.starts), places(csr.places), values(csr.values) {
    TRY(cusparseCreateCsr(&matrix, csr.rows, csr.columns, int64_t(csr.places.size()), starts.get(),
                          places.get(), values.get(), CUSPARSE_INDEX_32I, CUSPARSE_INDEX_32I,
                          CUSPARSE_INDEX_BASE_ZERO, typeOf<T>()));
  }
  ~OnDevice() { cusparseDestroySpMat(matrix); }
  Buffer<int> starts, places;
  Buffer<T> values;
  cusparseSpMatDescr_t matrix = nullptr;
};

template <typename T>
void timesVector(cusparseHandle_t handle, const char* name, double tolerance) {
  library::operation(name, [&] {
    const Csr<T> csr(3000, 2500, 1);
    const OnDevice<T> a(csr);
    const auto x = numbers<T>(csr.columns, 3), y = numbers<T>(csr.rows, 4);
    const Buffer<T> deviceX(x), deviceY(y);
    cusparseDnVecDescr_t vectorX, vectorY;
    TRY(cusparseCreateDnVec(&vectorX, csr.columns, deviceX.get(), typeOf<T>()));
    TRY(cusparseCreateDnVec(&vectorY, csr.rows, deviceY.get(), typeOf<T>()));
    const T alpha = 2, beta = 1;
    size_t bytes = 0;
    TRY(cusparseSpMV_bufferSize(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, &alpha, a.matrix, vectorX, &beta,
                                vectorY, typeOf<T>(), CUSPARSE_SPMV_CSR_ALG2, &bytes));
    const Buffer<char> work(bytes + 1);
    TRY(cusparseSpMV(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, &alpha, a.matrix, vectorX, &beta, vectorY,
                     typeOf<T>(), CUSPARSE_SPMV_CSR_ALG2, work.get()));
    library::result(name, deviceY.read(), tolerance, [&](size_t row) {
      double sum = double(y[row]);
      for (int i = csr.starts[row]; i < csr.starts[row + 1]; ++i)
        sum += 2 * double(csr.values[i]) * x[csr.places[i]];
      return sum;
    });
    TRY(cusparseDestroyDnVec(vectorX));
    TRY(cusparseDestroyDnVec(vectorY));
  });
}

template <typename T>
void timesDense(cusparseHandle_t handle, const char* name, cusparseSpMMAlg_t algorithm, double tolerance) {
  library::operation(name, [&] {
    const int width = 64;
    const Csr<T> csr(1000, 800, 5);
    const OnDevice<T> a(csr);
    const auto b = numbers<T>(size_t(csr.columns) * width, 6);
    const Buffer<T> deviceB(b), deviceC(size_t(csr.rows) * width, 0xff);
    cusparseDnMatDescr_t matrixB, matrixC;
    TRY(cusparseCreateDnMat(&matrixB, csr.columns, width, width, deviceB.get(), typeOf<T>(),
                            CUSPARSE_ORDER_ROW));
    TRY(cusparseCreateDnMat(&matrixC, csr.rows, width, width, deviceC.get(), typeOf<T>(),
                            CUSPARSE_ORDER_ROW));
    const T alpha = 1, beta = 0;
    size_t bytes = 0;
    TRY(cusparseSpMM_bufferSize(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, CUSPARSE_OPERATION_NON_TRANSPOSE,
                                &alpha, a.matrix, matrixB, &beta, matrixC, typeOf<T>(), algorithm, &bytes));
    const Buffer<char> work(bytes + 1);
    TRY(cusparseSpMM(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, CUSPARSE_OPERATION_NON_TRANSPOSE, &alpha,
                     a.matrix, matrixB, &beta, matrixC, typeOf<T>(), algorithm, work.get()));
    library::result(name, deviceC.read(), tolerance, [&](size_t at) {
      const size_t row = at / width, column = at % width;
      double sum = 0;
      for (int i = csr.starts[row]; i < csr.starts[row + 1]; ++i)
        sum += double(csr.values[i]) * b[size_t(csr.places[i]) * width + column];
      return sum;
    });
    TRY(cusparseDestroyDnMat(matrixB));
    TRY(cusparseDestroyDnMat(matrixC));
  });
}

// C = A B, all CSR: sizes are found out on the way.
void timesSparse(cusparseHandle_t handle) {
  Csr<float> left(600, 500, 7), right(500, 400, 8);
  left.coarsen();
  right.coarsen();
  const OnDevice<float> a(left), b(right);
  const Buffer<int> starts(left.rows + 1);
  cusparseSpMatDescr_t c;
  TRY(cusparseCreateCsr(&c, left.rows, right.columns, 0, starts.get(), nullptr, nullptr, CUSPARSE_INDEX_32I,
                        CUSPARSE_INDEX_32I, CUSPARSE_INDEX_BASE_ZERO, CUDA_R_32F));
  cusparseSpGEMMDescr_t state;
  TRY(cusparseSpGEMM_createDescr(&state));
  const float alpha = 1, beta = 0;
  const auto plain = CUSPARSE_OPERATION_NON_TRANSPOSE;
  const auto algorithm = CUSPARSE_SPGEMM_DEFAULT;
  size_t bytes = 0;
  TRY(cusparseSpGEMM_workEstimation(handle, plain, plain, &alpha, a.matrix, b.matrix, &beta, c, CUDA_R_32F,
                                    algorithm, state, &bytes, nullptr));
  const Buffer<char> first(bytes + 1);
  TRY(cusparseSpGEMM_workEstimation(handle, plain, plain, &alpha, a.matrix, b.matrix, &beta, c, CUDA_R_32F,
                                    algorithm, state, &bytes, first.get()));
  TRY(cusparseSpGEMM_compute(handle, plain, plain, &alpha, a.matrix, b.matrix, &beta, c, CUDA_R_32F,
                             algorithm, state, &bytes, nullptr));
  const Buffer<char> second(bytes + 1);
  TRY(cusparseSpGEMM_compute(handle, plain, plain, &alpha, a.matrix, b.matrix, &beta, c, CUDA_R_32F,
                             algorithm, state, &bytes, second.get()));
  int64_t rows = 0, columns = 0, count = 0;
  TRY(cusparseSpMatGetSize(c, &rows, &columns, &count));
  const Buffer<int> places(size_t(count), 0xff);
  const Buffer<float> values(size_t(count), 0xff);
  TRY(cusparseCsrSetPointers(c, starts.get(), places.get(), values.get()));
  TRY(cusparseSpGEMM_copy(handle, plain, plain, &alpha, a.matrix, b.matrix, &beta, c, CUDA_R_32F, algorithm,
                          state));
  const auto rowStarts = starts.read(), columnOf = places.read();
  library::result(
      "SpGEMM starts", rowStarts, 0,
      [&](size_t at) { return at == size_t(rows) ? double(count) : rowStarts[at]; }, size_t(rows) + 1);
  library::result("SpGEMM columns", columnOf, 0,
                  [&](size_t at) { return columnOf[at] >= 0 && columnOf[at] < columns ? columnOf[at] : -1; });
  library::result("SpGEMM values", values.read(), 0, [&](size_t at) {
    const int row =
        int(std::upper_bound(rowStarts.begin(), rowStarts.end(), int(at)) - rowStarts.begin()) - 1;
    double sum = 0;
    for (int i = left.starts[row]; i < left.starts[row + 1]; ++i)
      sum += double(left.values[i]) * right.at(left.places[i], columnOf[at]);
    return sum;
  });
  TRY(cusparseSpGEMM_destroyDescr(state));
  TRY(cusparseDestroySpMat(c));
}

}  // namespace

int main() {
  library::operation("create", [] {
    cusparseHandle_t handle;
    TRY(cusparseCreate(&handle));
    timesVector<float>(handle, "SpMV fp32", 1e-5);
    timesVector<double>(handle, "SpMV fp64", 1e-13);
    timesDense<float>(handle, "SpMM fp32", CUSPARSE_SPMM_CSR_ALG2, 1e-5);
    timesDense<float>(handle, "SpMM fp32, deterministic", CUSPARSE_SPMM_CSR_ALG3, 1e-5);
    timesDense<double>(handle, "SpMM fp64", CUSPARSE_SPMM_CSR_ALG2, 1e-13);
    library::operation("SpGEMM", [&] { timesSparse(handle); });
    TRY(cusparseDestroy(handle));
  });
  return library::finish();
}
