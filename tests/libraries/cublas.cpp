// cuBLAS: products of every type, batches, and operations of levels 1 to 3.
#include <cublas_v2.h>

#include "library.h"

using library::Buffer;
using library::numbers;
using library::value;

inline std::string statusText(cublasStatus_t status) { return cublasGetStatusString(status); }

namespace {

// sum over i of a(row, i) b(i, column), both stored by columns; `leading` is their number of rows.
template <typename T>
double dot(const T* a, size_t leadingA, const T* b, size_t leadingB, size_t count, size_t row,
           size_t column) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += value(a[i * leadingA + row]) * value(b[column * leadingB + i]);
  return sum;
}

// C = A B of one size by cublasGemmEx: the types are the arguments' own.
template <typename In, typename Out, typename Scale>
void gemmEx(cublasHandle_t handle, const char* name, cudaDataType_t in, cudaDataType_t out,
            cublasComputeType_t compute, int size, double tolerance) {
  library::operation(name, [&] {
    const size_t count = size_t(size) * size;
    const auto a = numbers<In>(count, 11), b = numbers<In>(count, 12);
    const Buffer<In> deviceA(a), deviceB(b);
    const Buffer<Out> deviceC(count, 0xff);
    const Scale alpha = 1, beta = 0;
    TRY(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, size, size, size, &alpha, deviceA.get(), in, size,
                     deviceB.get(), in, size, &beta, deviceC.get(), out, size, compute, CUBLAS_GEMM_DEFAULT));
    library::result(name, deviceC.read(), tolerance, [&](size_t at) {
      return dot(a.data(), size, b.data(), size, size, at % size, at / size);
    });
  });
}

void typedProducts(cublasHandle_t handle) {
  gemmEx<float, float, float>(handle, "gemmEx fp32 2048", CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, 2048,
                              1e-4);
  gemmEx<float, float, float>(handle, "gemmEx tf32 2048", CUDA_R_32F, CUDA_R_32F,
                              CUBLAS_COMPUTE_32F_FAST_TF32, 2048, 5e-2);
  gemmEx<double, double, double>(handle, "gemmEx fp64 1024", CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F, 1024,
                                 1e-12);
  gemmEx<__half, __half, float>(handle, "gemmEx fp16 2048", CUDA_R_16F, CUDA_R_16F, CUBLAS_COMPUTE_32F, 2048,
                                2e-2);
  gemmEx<__half, __half, __half>(handle, "gemmEx fp16 in fp16 512", CUDA_R_16F, CUDA_R_16F,
                                 CUBLAS_COMPUTE_16F, 512, 2e-1);
  gemmEx<__half, float, float>(handle, "gemmEx fp16 to fp32 2048", CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F,
                               2048, 1e-3);
  gemmEx<__nv_bfloat16, __nv_bfloat16, float>(handle, "gemmEx bf16 2048", CUDA_R_16BF, CUDA_R_16BF,
                                              CUBLAS_COMPUTE_32F, 2048, 5e-2);
  gemmEx<int8_t, int32_t, int32_t>(handle, "gemmEx int8 2048", CUDA_R_8I, CUDA_R_32I, CUBLAS_COMPUTE_32I,
                                   2048, 0);
}

void plainProducts(cublasHandle_t handle) {
  const int m = 300, n = 200, k = 500;
  library::operation("sgemm", [&] {
    const auto a = numbers<float>(m * k, 1), b = numbers<float>(k * n, 2), c = numbers<float>(m * n, 3);
    const Buffer<float> deviceA(a), deviceB(b), deviceC(c);
    const float alpha = 1.5f, beta = -0.5f;
    TRY(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &alpha, deviceA, m, deviceB, k, &beta, deviceC,
                    m));
    library::result("sgemm", deviceC.read(), 1e-4, [&](size_t at) {
      return 1.5 * dot(a.data(), m, b.data(), k, k, at % m, at / m) - 0.5 * c[at];
    });
  });
  library::operation("dgemm", [&] {
    const auto a = numbers<double>(m * k, 1), b = numbers<double>(k * n, 2);
    const Buffer<double> deviceA(a), deviceB(b), deviceC(m * n, 0xff);
    // The factors lie on the device: nothing is read back to the host.
    const Buffer<double> factors(std::vector<double>{2, 0});
    TRY(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE));
    TRY(cublasDgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, factors.get(), deviceA, m, deviceB, k,
                    factors.get() + 1, deviceC, m));
    TRY(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_HOST));
    library::result("dgemm", deviceC.read(), 1e-12,
                    [&](size_t at) { return 2 * dot(a.data(), m, b.data(), k, k, at % m, at / m); });
  });
}

// Complex numbers travel as pairs of floats: even places are real parts, odd ones imaginary.
void complexProduct(cublasHandle_t handle) {
  library::operation("cgemm", [&] {
    const int size = 256;
    const auto a = numbers<float>(2 * size * size, 4), b = numbers<float>(2 * size * size, 5);
    const Buffer<float> deviceA(a), deviceB(b), deviceC(2 * size * size, 0xff);
    const cuComplex alpha = {1, 0}, beta = {0, 0};
    const auto complex = [](const Buffer<float>& buffer) {
      return reinterpret_cast<cuComplex*>(buffer.get());
    };
    TRY(cublasCgemm(handle, CUBLAS_OP_N, CUBLAS_OP_C, size, size, size, &alpha, complex(deviceA), size,
                    complex(deviceB), size, &beta, complex(deviceC), size));
    library::result("cgemm", deviceC.read(), 1e-4, [&](size_t at) {
      const size_t row = at / 2 % size, column = at / 2 / size;
      std::complex<double> sum = 0;
      for (size_t i = 0; i < size_t(size); ++i) {
        const size_t left = 2 * (i * size + row), right = 2 * (i * size + column);
        sum += std::complex<double>(a[left], a[left + 1]) * std::complex<double>(b[right], -b[right + 1]);
      }
      return at % 2 ? sum.imag() : sum.real();
    });
  });
}

template <typename T>
std::vector<T*> matrices(const Buffer<T>& buffer, size_t stride, int count) {
  std::vector<T*> pointers;
  for (int i = 0; i < count; ++i) pointers.push_back(buffer.get() + i * stride);
  return pointers;
}

void batches(cublasHandle_t handle) {
  const int size = 64, batch = 20;
  const size_t one = size * size;
  const auto a = numbers<float>(one * batch, 6), b = numbers<float>(one * batch, 7);
  const auto reference = [&](size_t at) {
    const size_t start = at / one * one;
    return dot(a.data() + start, size, b.data() + start, size, size, at % one % size, at % one / size);
  };
  const float alpha = 1, beta = 0;
  library::operation("sgemmBatched", [&] {
    const Buffer<float> deviceA(a), deviceB(b), deviceC(one * batch, 0xff);
    const Buffer<float*> listA(matrices(deviceA, one, batch)), listB(matrices(deviceB, one, batch)),
        listC(matrices(deviceC, one, batch));
    TRY(cublasSgemmBatched(handle, CUBLAS_OP_N, CUBLAS_OP_N, size, size, size, &alpha, listA.get(), size,
                           listB.get(), size, &beta, listC.get(), size, batch));
    library::result("sgemmBatched", deviceC.read(), 1e-4, reference);
  });
  library::operation("sgemmStridedBatched", [&] {
    const Buffer<float> deviceA(a), deviceB(b), deviceC(one * batch, 0xff);
    TRY(cublasSgemmStridedBatched(handle, CUBLAS_OP_N, CUBLAS_OP_N, size, size, size, &alpha, deviceA, size,
                                  one, deviceB, size, one, &beta, deviceC, size, one, batch));
    library::result("sgemmStridedBatched", deviceC.read(), 1e-4, reference);
  });
}

void halfBatch(cublasHandle_t handle) {
  library::operation("gemmStridedBatchedEx fp16", [&] {
    const int m = 128, n = 96, k = 64, batch = 24;
    const auto a = numbers<__half>(size_t(m) * k * batch, 8), b = numbers<__half>(size_t(k) * n * batch, 9);
    const Buffer<__half> deviceA(a), deviceB(b), deviceC(size_t(m) * n * batch, 0xff);
    const float alpha = 1, beta = 0;
    TRY(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &alpha, deviceA.get(),
                                   CUDA_R_16F, m, m * k, deviceB.get(), CUDA_R_16F, k, k * n, &beta,
                                   deviceC.get(), CUDA_R_16F, m, m * n, batch, CUBLAS_COMPUTE_32F,
                                   CUBLAS_GEMM_DEFAULT));
    library::result("gemmStridedBatchedEx fp16", deviceC.read(), 1e-2, [&](size_t at) {
      const size_t matrix = at / (m * n), place = at % (m * n);
      return dot(a.data() + matrix * m * k, m, b.data() + matrix * k * n, k, k, place % m, place / m);
    });
  });
}

void vectors(cublasHandle_t handle) {
  const int size = 100000;
  const auto x = numbers<float>(size, 21), y = numbers<float>(size, 22);
  library::operation("saxpy", [&] {
    const Buffer<float> deviceX(x), deviceY(y);
    const float alpha = 3;
    TRY(cublasSaxpy(handle, size, &alpha, deviceX, 1, deviceY, 1));
    library::result("saxpy", deviceY.read(), 1e-6, [&](size_t at) { return 3.0 * x[at] + y[at]; });
  });
  library::operation("sdot, snrm2, isamax", [&] {
    const Buffer<float> deviceX(x), deviceY(y);
    std::vector<float> got(3);
    int largest = 0;
    TRY(cublasSdot(handle, size, deviceX, 1, deviceY, 1, &got[0]));
    TRY(cublasSnrm2(handle, size, deviceX, 1, &got[1]));
    TRY(cublasIsamax(handle, size, deviceX, 1, &largest));
    got[2] = static_cast<float>(largest);
    double product = 0, squares = 0;
    int at = 0;
    for (int i = 0; i < size; ++i) {
      product += double(x[i]) * y[i];
      squares += double(x[i]) * x[i];
      if (std::fabs(x[i]) > std::fabs(x[at])) at = i;
    }
    const double expected[] = {product, std::sqrt(squares), at + 1.0};
    library::result("sdot, snrm2, isamax", got, 1e-4, [&](size_t index) { return expected[index]; });
  });
}

void matrixVector(cublasHandle_t handle) {
  library::operation("sgemv", [&] {
    const int m = 700, n = 500;
    const auto a = numbers<float>(m * n, 23), x = numbers<float>(m, 24);
    const Buffer<float> deviceA(a), deviceX(x), deviceY(n, 0xff);
    const float alpha = 1, beta = 0;
    TRY(cublasSgemv(handle, CUBLAS_OP_T, m, n, &alpha, deviceA, m, deviceX, 1, &beta, deviceY, 1));
    library::result("sgemv", deviceY.read(), 1e-4, [&](size_t column) {
      double sum = 0;
      for (int i = 0; i < m; ++i) sum += double(a[column * m + i]) * x[i];
      return sum;
    });
  });
}

void triangular(cublasHandle_t handle) {
  library::operation("dtrsm", [&] {
    const int m = 200, n = 50;
    auto a = numbers<double>(m * m, 25);
    for (int i = 0; i < m; ++i) a[i * m + i] = m;  // well conditioned
    const auto b = numbers<double>(m * n, 26);
    const Buffer<double> deviceA(a), deviceB(b);
    const double alpha = 1;
    TRY(cublasDtrsm(handle, CUBLAS_SIDE_LEFT, CUBLAS_FILL_MODE_LOWER, CUBLAS_OP_N, CUBLAS_DIAG_NON_UNIT, m, n,
                    &alpha, deviceA, m, deviceB, m));
    const auto x = deviceB.read();
    std::vector<double> back(m * n);  // L x must be b again
    for (int column = 0; column < n; ++column)
      for (int row = 0; row < m; ++row)
        for (int i = 0; i <= row; ++i) back[column * m + row] += a[i * m + row] * x[column * m + i];
    library::result("dtrsm", x, 1e-10, [&](size_t at) { return x[at] + b[at] - back[at]; });
  });
}

}  // namespace

int main() {
  library::operation("create", [&] {
    cublasHandle_t handle;
    TRY(cublasCreate(&handle));
    plainProducts(handle);
    complexProduct(handle);
    typedProducts(handle);
    batches(handle);
    halfBatch(handle);
    vectors(handle);
    matrixVector(handle);
    triangular(handle);
    TRY(cublasDestroy(handle));
  });
  return library::finish();
}
