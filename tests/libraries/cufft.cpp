// cuFFT: transforms in one to three dimensions, complex and real, single and double, many at once and with
// strides.
#include <cufft.h>

#include "library.h"

using library::Buffer;
using library::numbers;

inline std::string statusText(cufftResult status) { return "cuFFT error " + std::to_string(status); }

namespace {

constexpr double kPi = 3.14159265358979323846;

struct Sizes {
  size_t z = 1, y = 1, x = 1;
  size_t count() const { return z * y * x; }
};

// One output of the transform by its definition. at(index) gives the input as a complex number.
template <typename Input>
std::complex<double> transformed(const Sizes& n, size_t kz, size_t ky, size_t kx, int sign, Input at) {
  std::complex<double> sum = 0;
  for (size_t z = 0; z < n.z; ++z)
    for (size_t y = 0; y < n.y; ++y)
      for (size_t x = 0; x < n.x; ++x) {
        const double turns =
            double(kz * z % n.z) / n.z + double(ky * y % n.y) / n.y + double(kx * x % n.x) / n.x;
        sum += std::complex<double>(at((z * n.y + y) * n.x + x)) * std::polar(1.0, sign * 2 * kPi * turns);
      }
  return sum;
}

double part(std::complex<double> number, size_t at) { return at % 2 ? number.imag() : number.real(); }

class Plan {
 public:
  Plan(const std::vector<int>& sizes, cufftType type, int batch) {
    auto n = sizes;
    TRY(cufftPlanMany(&plan_, int(n.size()), n.data(), nullptr, 1, 0, nullptr, 1, 0, type, batch));
  }
  // Many transforms of one dimension: elements `stride` apart, transforms `distance` apart, in and out.
  Plan(int size, int stride, int distance, cufftType type, int batch) {
    TRY(cufftPlanMany(&plan_, 1, &size, &size, stride, distance, &size, stride, distance, type, batch));
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { cufftDestroy(plan_); }
  operator cufftHandle() const { return plan_; }

 private:
  cufftHandle plan_ = 0;
};

std::vector<int> list(const Sizes& n) {
  std::vector<int> sizes;
  if (n.z > 1) sizes.push_back(int(n.z));
  if (n.y > 1) sizes.push_back(int(n.y));
  sizes.push_back(int(n.x));
  return sizes;
}

void forward(const char* name, const Sizes& n, int batch, size_t samples) {
  library::operation(name, [&] {
    const auto values = numbers<float>(2 * n.count() * batch, 1);
    const Buffer<float> in(values), out(values.size(), 0xff);
    const Plan plan(list(n), CUFFT_C2C, batch);
    TRY(cufftExecC2C(plan, reinterpret_cast<cufftComplex*>(in.get()),
                     reinterpret_cast<cufftComplex*>(out.get()), CUFFT_FORWARD));
    library::result(
        name, out.read(), 1e-3,
        [&](size_t at) {
          const size_t one = at / 2 / n.count(), k = at / 2 % n.count();
          return part(transformed(n, k / n.x / n.y, k / n.x % n.y, k % n.x, -1,
                                  [&](size_t i) {
                                    const size_t place = 2 * (one * n.count() + i);
                                    return std::complex<double>(values[place], values[place + 1]);
                                  }),
                      at);
        },
        samples);
  });
}

void doubles() {
  const size_t size = 4096;
  const auto values = numbers<double>(2 * size, 2);
  const Buffer<double> in(values), out(2 * size, 0xff);
  const Plan plan({int(size)}, CUFFT_Z2Z, 1);
  auto* from = reinterpret_cast<cufftDoubleComplex*>(in.get());
  auto* to = reinterpret_cast<cufftDoubleComplex*>(out.get());
  TRY(cufftExecZ2Z(plan, from, to, CUFFT_INVERSE));
  library::result("Z2Z 4096, inverse", out.read(), 1e-9, [&](size_t at) {
    return part(transformed({1, 1, size}, 0, 0, at / 2, 1,
                            [&](size_t i) { return std::complex<double>(values[2 * i], values[2 * i + 1]); }),
                at);
  });
  TRY(cufftExecZ2Z(plan, to, from, CUFFT_FORWARD));
  library::result(
      "Z2Z 4096, there and back", in.read(), 1e-9, [&](size_t at) { return values[at] * size; }, 8192);
}

// Real numbers to half of their spectrum, and back.
void real(const char* name, const Sizes& n, size_t samples) {
  library::operation(name, [&] {
    const size_t half = n.x / 2 + 1, outputs = n.z * n.y * half;
    const auto values = numbers<float>(n.count(), 3);
    const Buffer<float> in(values), out(2 * outputs, 0xff), back(n.count(), 0xff);
    const Plan plan(list(n), CUFFT_R2C, 1), inverse(list(n), CUFFT_C2R, 1);
    auto* spectrum = reinterpret_cast<cufftComplex*>(out.get());
    TRY(cufftExecR2C(plan, in, spectrum));
    library::result(
        name, out.read(), 1e-3,
        [&](size_t at) {
          const size_t k = at / 2;
          return part(transformed(n, k / half / n.y, k / half % n.y, k % half, -1,
                                  [&](size_t i) { return values[i]; }),
                      at);
        },
        samples);
    TRY(cufftExecC2R(inverse, spectrum, back));
    library::result((std::string(name) + " and back").c_str(), back.read(), 1e-3,
                    [&](size_t at) { return double(values[at]) * n.count(); });
  });
}

// The columns of a matrix: elements lie a row apart.
void strided() {
  const size_t rows = 128, columns = 48;
  const auto values = numbers<float>(2 * rows * columns, 4);
  const Buffer<float> data(values);
  const Plan plan(int(rows), int(columns), 1, CUFFT_C2C, int(columns));
  auto* both = reinterpret_cast<cufftComplex*>(data.get());
  TRY(cufftExecC2C(plan, both, both, CUFFT_FORWARD));
  library::result("columns of a matrix, in place", data.read(), 1e-3, [&](size_t at) {
    const size_t column = at / 2 % columns, k = at / 2 / columns;
    return part(transformed({1, 1, rows}, 0, 0, k, -1,
                            [&](size_t i) {
                              const size_t place = 2 * (i * columns + column);
                              return std::complex<double>(values[place], values[place + 1]);
                            }),
                at);
  });
}

// On a stream of one's own, with work space of one's own.
void ownWorkArea() {
  cudaStream_t stream;
  TRY(cudaStreamCreate(&stream));
  const size_t size = 10007;  // a prime: needs work space
  const auto values = numbers<float>(2 * size, 5);
  const Buffer<float> in(values), out(2 * size, 0xff);
  cufftHandle plan;
  size_t bytes = 0;
  TRY(cufftCreate(&plan));
  TRY(cufftSetAutoAllocation(plan, 0));
  TRY(cufftMakePlan1d(plan, int(size), CUFFT_C2C, 1, &bytes));
  check::say("C2C 10007: %zu bytes of work space", bytes);
  const Buffer<char> work(bytes + 1);
  TRY(cufftSetWorkArea(plan, work.get()));
  TRY(cufftSetStream(plan, stream));
  TRY(cufftExecC2C(plan, reinterpret_cast<cufftComplex*>(in.get()),
                   reinterpret_cast<cufftComplex*>(out.get()), CUFFT_FORWARD));
  TRY(cudaStreamSynchronize(stream));
  library::result("C2C 10007, own work space", out.read(), 1e-3, [&](size_t at) {
    return part(transformed({1, 1, size}, 0, 0, at / 2, -1,
                            [&](size_t i) { return std::complex<double>(values[2 * i], values[2 * i + 1]); }),
                at);
  });
  TRY(cufftDestroy(plan));
  TRY(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  const bool machineCode = !check::flag(argc, argv, "--ptx");
  forward("C2C 1024 x 16", {1, 1, 1024}, 16, 64);
  forward("C2C 1009", {1, 1, 1009}, 1, 64);
  forward("C2C 3 x 1000", {1, 1, 1000}, 3, 64);
  if (machineCode) forward("C2C 2^20", {1, 1, 1 << 20}, 1, 6);
  forward("C2C 96 x 80", {1, 96, 80}, 1, 32);
  forward("C2C 512 x 512", {1, 512, 512}, 1, 6);
  forward("C2C 24 x 20 x 16", {24, 20, 16}, 1, 32);
  library::operation("Z2Z 4096", doubles);
  real("R2C 1000", {1, 1, 1000}, 64);
  real("R2C 90 x 64", {1, 90, 64}, 32);
  real("R2C 16 x 12 x 20", {16, 12, 20}, 32);
  library::operation("columns of a matrix", strided);
  if (machineCode) library::operation("own work space", ownWorkArea);
  return library::finish();
}
