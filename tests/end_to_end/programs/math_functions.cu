// Mathematical functions in float and double against a wider type on the CPU: each within the error that the
// CUDA manual states, in units in the last place, plus one for the reference. 0 means correctly rounded.
#include "check.h"

// name, reference, lowest and highest argument, bound
#define FLOAT_FUNCTIONS(X)                  \
  X(sinf, std::sin, -20, 20, 2)             \
  X(cosf, std::cos, -20, 20, 2)             \
  X(sinf, std::sin, 1e6, 1e8, 2)            \
  X(tanf, std::tan, -20, 20, 4)             \
  X(asinf, std::asin, -1, 1, 2)             \
  X(acosf, std::acos, -1, 1, 2)             \
  X(atanf, std::atan, -50, 50, 2)           \
  X(sinhf, std::sinh, -10, 10, 3)           \
  X(coshf, std::cosh, -10, 10, 2)           \
  X(tanhf, std::tanh, -10, 10, 2)           \
  X(asinhf, std::asinh, -100, 100, 3)       \
  X(acoshf, std::acosh, 1, 100, 4)          \
  X(atanhf, std::atanh, -1, 1, 3)           \
  X(expf, std::exp, -80, 80, 2)             \
  X(exp2f, std::exp2, -120, 120, 2)         \
  X(exp10f, reference::exp10, -35, 35, 2)   \
  X(expm1f, std::expm1, -5, 5, 1)           \
  X(logf, std::log, 1e-6, 1000, 1)          \
  X(log2f, std::log2, 1e-6, 1000, 1)        \
  X(log10f, std::log10, 1e-6, 1000, 2)      \
  X(log1pf, std::log1p, -0.99, 100, 1)      \
  X(sqrtf, std::sqrt, 0, 1e10, 0)           \
  X(rsqrtf, reference::rsqrt, 1e-6, 1e6, 2) \
  X(cbrtf, std::cbrt, -1e6, 1e6, 1)         \
  X(erff, std::erf, -4, 4, 2)               \
  X(erfcf, std::erfc, -4, 8, 4)             \
  X(normcdff, reference::normcdf, -5, 5, 5) \
  X(lgammaf, std::lgamma, 0.1, 100, 6)      \
  X(tgammaf, std::tgamma, 0.1, 30, 5)       \
  X(sinpif, reference::sinpi, -10, 10, 2)   \
  X(cospif, reference::cospi, -10, 10, 2)   \
  X(floorf, std::floor, -1000, 1000, 0)     \
  X(ceilf, std::ceil, -1000, 1000, 0)       \
  X(truncf, std::trunc, -1000, 1000, 0)     \
  X(rintf, std::rint, -1000, 1000, 0)       \
  X(roundf, std::round, -1000, 1000, 0)     \
  X(fabsf, std::fabs, -1000, 1000, 0)       \
  X(1.0f /, reference::inverse, -100, 100, 0)

#define DOUBLE_FUNCTIONS(X)                \
  X(sin, std::sin, -20, 20, 2)             \
  X(cos, std::cos, -20, 20, 2)             \
  X(sin, std::sin, 1e9, 1e12, 2)           \
  X(tan, std::tan, -20, 20, 2)             \
  X(asin, std::asin, -1, 1, 2)             \
  X(acos, std::acos, -1, 1, 2)             \
  X(atan, std::atan, -50, 50, 2)           \
  X(sinh, std::sinh, -10, 10, 2)           \
  X(cosh, std::cosh, -10, 10, 1)           \
  X(tanh, std::tanh, -10, 10, 1)           \
  X(asinh, std::asinh, -100, 100, 3)       \
  X(acosh, std::acosh, 1, 100, 3)          \
  X(atanh, std::atanh, -1, 1, 2)           \
  X(exp, std::exp, -700, 700, 1)           \
  X(exp2, std::exp2, -1000, 1000, 1)       \
  X(exp10, reference::exp10, -300, 300, 1) \
  X(expm1, std::expm1, -5, 5, 1)           \
  X(log, std::log, 1e-6, 1000, 1)          \
  X(log2, std::log2, 1e-6, 1000, 1)        \
  X(log10, std::log10, 1e-6, 1000, 1)      \
  X(log1p, std::log1p, -0.99, 100, 1)      \
  X(sqrt, std::sqrt, 0, 1e10, 0)           \
  X(rsqrt, reference::rsqrt, 1e-6, 1e6, 1) \
  X(cbrt, std::cbrt, -1e6, 1e6, 1)         \
  X(erf, std::erf, -5, 5, 2)               \
  X(erfc, std::erfc, -5, 20, 5)            \
  X(lgamma, std::lgamma, 0.1, 100, 4)      \
  X(tgamma, std::tgamma, 0.1, 100, 10)     \
  X(sinpi, reference::sinpi, -10, 10, 2)   \
  X(cospi, reference::cospi, -10, 10, 2)   \
  X(floor, std::floor, -1000, 1000, 0)     \
  X(rint, std::rint, -1000, 1000, 0)       \
  X(1.0 /, reference::inverse, -100, 100, 0)

// name, reference, range of x, range of y, bound
#define FLOAT_PAIRS(X)                                   \
  X(powf, std::pow, 0.01, 100, -15, 15, 4)               \
  X(atan2f, std::atan2, -10, 10, -10, 10, 3)             \
  X(hypotf, std::hypot, -1000, 1000, -1000, 1000, 3)     \
  X(fmodf, std::fmod, -1000, 1000, 0.1, 10, 0)           \
  X(remainderf, std::remainder, -1000, 1000, 0.1, 10, 0) \
  X(fdimf, std::fdim, -10, 10, -10, 10, 0)               \
  X(fminf, std::fmin, -10, 10, -10, 10, 0)               \
  X(copysignf, std::copysign, -10, 10, -10, 10, 0)       \
  X(reference::quotient, reference::quotient, -10, 10, -10, 10, 0)

#define DOUBLE_PAIRS(X)                                 \
  X(pow, std::pow, 0.01, 100, -100, 100, 2)             \
  X(atan2, std::atan2, -10, 10, -10, 10, 2)             \
  X(hypot, std::hypot, -1000, 1000, -1000, 1000, 2)     \
  X(fmod, std::fmod, -1000, 1000, 0.1, 10, 0)           \
  X(remainder, std::remainder, -1000, 1000, 0.1, 10, 0) \
  X(reference::quotient, reference::quotient, -10, 10, -10, 10, 0)

namespace reference {
constexpr long double kPi = 3.141592653589793238462643383279502884L;
template <typename R>
R exp10(R x) {
  return std::pow(R(10), x);
}
template <typename R>
R rsqrt(R x) {
  return 1 / std::sqrt(x);
}
template <typename R>
R normcdf(R x) {
  return std::erfc(-x / std::sqrt(R(2))) / 2;
}
template <typename R>
R sinpi(R x) {
  return std::sin(R(kPi) * std::remainder(x, R(2)));
}
template <typename R>
R cospi(R x) {  // near its zeros, where reducing matters, as a sine
  const R turned = std::remainder(x, R(2));
  return std::sin(R(kPi) * (R(0.5) - std::fabs(turned)));
}
template <typename R>
R inverse(R x) {
  return 1 / x;
}
template <typename R>
__host__ __device__ R quotient(R x, R y) {
  return x / y;
}
}  // namespace reference

#define CASE(function, ...)  \
  case __COUNTER__ - kFirst: \
    return function(x);
#define CASE_PAIR(function, ...) \
  case __COUNTER__ - kFirst:     \
    return function(x, y);

__device__ float evaluate(int which, float x) {
  constexpr int kFirst = __COUNTER__ + 1;
  switch (which) { FLOAT_FUNCTIONS(CASE) }
  return 0;
}
__device__ double evaluate(int which, double x) {
  constexpr int kFirst = __COUNTER__ + 1;
  switch (which) { DOUBLE_FUNCTIONS(CASE) }
  return 0;
}
__device__ float evaluate(int which, float x, float y) {
  constexpr int kFirst = __COUNTER__ + 1;
  switch (which) { FLOAT_PAIRS(CASE_PAIR) }
  return 0;
}
__device__ double evaluate(int which, double x, double y) {
  constexpr int kFirst = __COUNTER__ + 1;
  switch (which) { DOUBLE_PAIRS(CASE_PAIR) }
  return 0;
}

template <typename T>
__global__ void one(int which, const T* x, T* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) output[i] = evaluate(which, x[i]);
}
template <typename T>
__global__ void two(int which, const T* x, const T* y, T* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) output[i] = evaluate(which, x[i], y[i]);
}

template <typename T, typename Wide>
struct Function {
  const char* name;
  Wide (*one)(Wide);
  Wide (*two)(Wide, Wide);
  double low, high, lowY, highY, bound;
};

// The distance between got and expected, in units in the last place of a T.
template <typename T, typename Wide>
static double ulps(T got, Wide expected) {
  if (std::isnan(expected) || std::isnan(got)) return std::isnan(expected) && std::isnan(got) ? 0 : INFINITY;
  const T rounded = static_cast<T>(expected);
  if (std::isinf(rounded) || std::isinf(got)) return got == rounded ? 0 : INFINITY;
  const T magnitude = std::fabs(rounded);
  const T unit = magnitude - std::nextafter(magnitude, T(0));
  if (unit == 0) return got == 0 ? 0 : INFINITY;
  return static_cast<double>(std::fabs(static_cast<Wide>(got) - expected) / unit);
}

template <typename T>
static std::vector<T> arguments(check::Random& random, int count, double low, double high) {
  std::vector<T> values(count);
  for (T& value : values) {
    const double unit = (random.next() + random.next() / 4294967296.0) / 4294967296.0;
    value = static_cast<T>(low + (high - low) * unit);
    if (static_cast<double>(value) <= low || static_cast<double>(value) >= high)
      value = static_cast<T>((low + high) / 2);
  }
  return values;
}

template <typename T, typename Wide>
static void compare(int which, const Function<T, Wide>& function, int count) {
  check::Random random(which + 1000);
  const std::vector<T> x = arguments<T>(random, count, function.low, function.high);
  const std::vector<T> y = arguments<T>(random, count, function.lowY, function.highY);
  check::Device<T> inputX(x), inputY(y), output(count);
  if (function.one != nullptr)
    one<T><<<(count + 127) / 128, 128>>>(which, inputX, output, count);
  else
    two<T><<<(count + 127) / 128, 128>>>(which, inputX, inputY, output, count);
  CUDA(cudaGetLastError());
  const std::vector<T> got = output.read();
  const double allowed = function.bound == 0 ? 0.5001 : function.bound + 1;
  for (int i = 0; i < count; ++i) {
    const Wide expected = function.one != nullptr ? function.one(x[i]) : function.two(x[i], y[i]);
    const double error = ulps<T, Wide>(got[i], expected);
    if (!(error <= allowed))
      check::fail("%s(%.17g, %.17g) is %.17g, expected %.17g: %.2f units", function.name,
                  static_cast<double>(x[i]), static_cast<double>(y[i]), static_cast<double>(got[i]),
                  static_cast<double>(expected), error);
  }
  check::say("%s %s: %d values in [%g, %g] within %g", sizeof(T) == 4 ? "float" : "double", function.name,
             count, function.low, function.high, function.bound);
}

template <typename T, typename Wide>
static void compareAll(const std::vector<Function<T, Wide>>& functions, int count) {
  for (size_t which = 0; which < functions.size(); ++which)
    compare(static_cast<int>(which), functions[which], count);
}

#define ROW(function, wide, low, high, bound) \
  {#function, [](Wide x) -> Wide { return wide(x); }, nullptr, low, high, 0, 1, bound},
#define ROW_PAIR(function, wide, low, high, lowY, highY, bound) \
  {#function, nullptr, [](Wide x, Wide y) -> Wide { return wide(x, y); }, low, high, lowY, highY, bound},

static void floats(int count) {
  using Wide = double;
  compareAll<float, Wide>({FLOAT_FUNCTIONS(ROW)}, count);
  compareAll<float, Wide>({FLOAT_PAIRS(ROW_PAIR)}, count);
}
static void doubles(int count) {
  using Wide = long double;
  compareAll<double, Wide>({DOUBLE_FUNCTIONS(ROW)}, count);
  compareAll<double, Wide>({DOUBLE_PAIRS(ROW_PAIR)}, count);
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 1000);
  floats(count);
  doubles(count);
  return check::pass();
}
