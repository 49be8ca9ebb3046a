// cuSOLVER: factorizations and solutions, eigenvalues and singular values, checked by putting them back
// together.
#include <cusolverDn.h>

#include "library.h"

using library::Buffer;
using library::numbers;

inline std::string statusText(cusolverStatus_t status) { return "cuSOLVER error " + std::to_string(status); }

namespace {

// Matrices are stored by columns.
double times(const std::vector<double>& a, const std::vector<double>& b, size_t rows, size_t inner,
             size_t row, size_t column) {
  double sum = 0;
  for (size_t i = 0; i < inner; ++i) sum += a[i * rows + row] * b[column * inner + i];
  return sum;
}

std::vector<double> positive(int size) {
  const auto a = numbers<double>(size_t(size) * size, 1);
  std::vector<double> made(size_t(size) * size);
  for (int column = 0; column < size; ++column)
    for (int row = 0; row < size; ++row) {
      double sum = row == column ? size : 0;
      for (int i = 0; i < size; ++i) sum += a[i * size + row] * a[i * size + column];
      made[column * size + row] = sum;
    }
  return made;
}

void succeeded(const char* name, const Buffer<int>& info) {
  const int value = info.read()[0];
  if (value != 0) throw library::Failure{std::string(name) + " reports " + std::to_string(value)};
}

void lu(cusolverDnHandle_t handle) {
  const int size = 300, right = 5;
  const auto a = numbers<double>(size * size, 2), b = numbers<double>(size * right, 3);
  const Buffer<double> deviceA(a), deviceB(b);
  const Buffer<int> pivots(size), info(1, 0xff);
  int count = 0;
  TRY(cusolverDnDgetrf_bufferSize(handle, size, size, deviceA, size, &count));
  const Buffer<double> work(count + 1);
  TRY(cusolverDnDgetrf(handle, size, size, deviceA, size, work, pivots, info));
  succeeded("getrf", info);
  const auto factors = deviceA.read();
  library::result("getrf", factors, 0, [&](size_t at) { return factors[at]; });
  const auto order = pivots.read();
  library::result("getrf pivots", order, 0, [&](size_t at) { return order[at] > int(at) ? order[at] : -1; });
  TRY(cusolverDnDgetrs(handle, CUBLAS_OP_N, size, right, deviceA, size, pivots, deviceB, size, info));
  succeeded("getrs", info);
  const auto x = deviceB.read();
  library::result("getrs", x, 1e-8, [&](size_t at) {
    return x[at] + b[at] - times(a, x, size, size, at % size, at / size);  // A x must be b
  });
}

void cholesky(cusolverDnHandle_t handle) {
  const int size = 256;
  const auto a = positive(size);
  const Buffer<double> device(a);
  const Buffer<int> info(1, 0xff);
  int count = 0;
  TRY(cusolverDnDpotrf_bufferSize(handle, CUBLAS_FILL_MODE_LOWER, size, device, size, &count));
  const Buffer<double> work(count + 1);
  TRY(cusolverDnDpotrf(handle, CUBLAS_FILL_MODE_LOWER, size, device, size, work, count, info));
  succeeded("potrf", info);
  const auto l = device.read();
  library::result("potrf", l, 1e-9, [&](size_t at) {
    const size_t row = at % size, column = at / size;
    if (row < column) return l[at];  // the other half is left alone
    double sum = 0;
    for (size_t i = 0; i <= column; ++i) sum += l[i * size + row] * l[i * size + column];
    return l[at] + (a[at] - sum);
  });
}

void choleskySingle(cusolverDnHandle_t handle) {
  const int size = 200;
  const auto wide = positive(size);
  const std::vector<float> a(wide.begin(), wide.end());
  const Buffer<float> device(a);
  const Buffer<int> info(1, 0xff);
  int count = 0;
  TRY(cusolverDnSpotrf_bufferSize(handle, CUBLAS_FILL_MODE_UPPER, size, device, size, &count));
  const Buffer<float> work(count + 1);
  TRY(cusolverDnSpotrf(handle, CUBLAS_FILL_MODE_UPPER, size, device, size, work, count, info));
  succeeded("potrf fp32", info);
  const auto u = device.read();
  library::result("potrf fp32", u, 1e-3, [&](size_t at) {
    const size_t row = at % size, column = at / size;
    if (row > column) return double(u[at]);
    double sum = 0;
    for (size_t i = 0; i <= row; ++i) sum += double(u[row * size + i]) * u[column * size + i];
    return u[at] + (a[at] - sum) / u[row * size + row];
  });
}

void eigenvalues(cusolverDnHandle_t handle) {
  const int size = 128;
  const auto a = positive(size);
  const Buffer<double> vectors(a), values(size, 0xff);
  const Buffer<int> info(1, 0xff);
  int count = 0;
  TRY(cusolverDnDsyevd_bufferSize(handle, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, size, vectors,
                                  size, values, &count));
  const Buffer<double> work(count + 1);
  TRY(cusolverDnDsyevd(handle, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, size, vectors, size, values,
                       work, count, info));
  succeeded("syevd", info);
  const auto v = vectors.read(), lambda = values.read();
  library::result("syevd values", lambda, 1e-9, [&](size_t at) {
    double quotient = 0;
    for (int row = 0; row < size; ++row) quotient += v[at * size + row] * times(a, v, size, size, row, at);
    return quotient;
  });
  library::result("syevd vectors", v, 1e-9, [&](size_t at) {
    return times(a, v, size, size, at % size, at / size) / lambda[at / size];
  });
}

void singularValues(cusolverDnHandle_t handle) {
  const int rows = 120, columns = 80;
  const auto a = numbers<double>(rows * columns, 5);
  const Buffer<double> device(a), s(columns, 0xff), u(rows * rows, 0xff), vt(columns * columns, 0xff);
  const Buffer<int> info(1, 0xff);
  int count = 0;
  TRY(cusolverDnDgesvd_bufferSize(handle, rows, columns, &count));
  const Buffer<double> work(count + 1);
  TRY(cusolverDnDgesvd(handle, 'A', 'A', rows, columns, device, rows, s, u, rows, vt, columns, work, count,
                       nullptr, info));
  succeeded("gesvd", info);
  const auto values = s.read(), left = u.read(), right = vt.read();
  library::result("gesvd values", values, 1e-9, [&](size_t at) {  // u' A v
    double sum = 0;
    for (int column = 0; column < columns; ++column)
      for (int row = 0; row < rows; ++row)
        sum += left[at * rows + row] * a[column * rows + row] * right[column * columns + at];
    return sum;
  });
  library::result("gesvd left", left, 0, [&](size_t at) { return left[at]; });
  library::result("gesvd right", right, 0, [&](size_t at) { return right[at]; });
}

// QR: the columns of Q stand at right angles.
void qr(cusolverDnHandle_t handle) {
  const int rows = 160, columns = 90;
  const auto a = numbers<double>(rows * columns, 6);
  const Buffer<double> device(a), tau(columns, 0xff);
  const Buffer<int> info(1, 0xff);
  int first = 0, second = 0;
  TRY(cusolverDnDgeqrf_bufferSize(handle, rows, columns, device, rows, &first));
  TRY(cusolverDnDorgqr_bufferSize(handle, rows, columns, columns, device, rows, tau, &second));
  const int count = std::max(first, second);
  const Buffer<double> work(count + 1);
  TRY(cusolverDnDgeqrf(handle, rows, columns, device, rows, tau, work, count, info));
  succeeded("geqrf", info);
  const auto r = device.read();
  TRY(cusolverDnDorgqr(handle, rows, columns, columns, device, rows, tau, work, count, info));
  succeeded("orgqr", info);
  const auto q = device.read();
  library::result("geqrf", r, 1e-10, [&](size_t at) {
    const size_t row = at % rows, column = at / rows;
    if (row > column) return r[at];
    double sum = 0;  // R = Q' A
    for (int i = 0; i < rows; ++i) sum += q[row * rows + i] * a[column * rows + i];
    return sum;
  });
  library::result("orgqr", q, 0, [&](size_t at) { return q[at]; });
}

}  // namespace

int main() {
  library::operation("create", [] {
    cusolverDnHandle_t handle;
    TRY(cusolverDnCreate(&handle));
    library::operation("getrf, getrs", [&] { lu(handle); });
    library::operation("potrf", [&] { cholesky(handle); });
    library::operation("potrf fp32", [&] { choleskySingle(handle); });
    library::operation("syevd", [&] { eigenvalues(handle); });
    library::operation("gesvd", [&] { singularValues(handle); });
    library::operation("geqrf, orgqr", [&] { qr(handle); });
    TRY(cusolverDnDestroy(handle));
  });
  return library::finish();
}
