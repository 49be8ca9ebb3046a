// Arithmetic and conversions in each of the four rounding modes, bit for bit against the CPU's own rounding
// modes.
#include <cfenv>

#include "check.h"

struct Pair {
  double x, y, z;
};
constexpr int kFloat = 20, kDouble = 20, kConversions = 28;

#define FOUR(f, ...) \
  put(f##_rn(__VA_ARGS__)), put(f##_rz(__VA_ARGS__)), put(f##_rd(__VA_ARGS__)), put(f##_ru(__VA_ARGS__))

__global__ void floats(const Pair* input, float* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float x = static_cast<float>(input[i].x), y = static_cast<float>(input[i].y),
              z = static_cast<float>(input[i].z);
  float* out = output + i * kFloat;
  const auto put = [&](float value) { *out++ = value; };
  FOUR(__fadd, x, y);
  FOUR(__fmul, x, y);
  FOUR(__fmaf, x, y, z);
  FOUR(__fdiv, x, y);
  FOUR(__fsqrt, fabsf(x));
}

__global__ void doubles(const Pair* input, double* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const double x = input[i].x, y = input[i].y, z = input[i].z;
  double* out = output + i * kDouble;
  const auto put = [&](double value) { *out++ = value; };
  FOUR(__dadd, x, y);
  FOUR(__dmul, x, y);
  FOUR(__fma, x, y, z);
  FOUR(__ddiv, x, y);
  FOUR(__dsqrt, fabs(x));
}

__global__ void conversions(const Pair* input, long long* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const double x = input[i].x, small = fmod(x, 1e6);
  const float narrow = static_cast<float>(small);
  const long long whole = static_cast<long long>(fmod(x, 9e18));
  long long* out = output + i * kConversions;
  const auto put = [&](long long value) { *out++ = value; };
  FOUR(__double2int, small);
  FOUR(__double2ll, small * 1e6);
  FOUR(__float2int, narrow);
  FOUR(__float2ll, narrow * 1e6f);
#undef FOUR
#define FOUR(bits, f, value) \
  put(bits(f##_rn(value))), put(bits(f##_rz(value))), put(bits(f##_rd(value))), put(bits(f##_ru(value)))
  FOUR(__float_as_int, __double2float, x);
  FOUR(__float_as_int, __ll2float, whole);
  FOUR(__double_as_longlong, __ll2double, whole);
#undef FOUR
}

static const int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

// Runs a function in each mode of the CPU. The operands are volatile so that nothing is computed at build
// time.
template <typename Results, typename Function>
static void inEachMode(Results& results, Function function) {
  for (int mode : kModes) {
    std::fesetround(mode);
    const auto value = function();
    std::fesetround(FE_TONEAREST);
    results.push_back(value);
  }
}

template <typename T>
static std::vector<T> arithmetic(const Pair& pair) {
  volatile T x = static_cast<T>(pair.x), y = static_cast<T>(pair.y), z = static_cast<T>(pair.z),
             a = std::fabs(x);
  std::vector<T> results;
  inEachMode(results, [&]() -> T {
    volatile T r = x + y;
    return r;
  });
  inEachMode(results, [&]() -> T {
    volatile T r = x * y;
    return r;
  });
  inEachMode(results, [&]() -> T {
    volatile T r = std::fma(T(x), T(y), T(z));
    return r;
  });
  inEachMode(results, [&]() -> T {
    volatile T r = x / y;
    return r;
  });
  inEachMode(results, [&]() -> T {
    volatile T r = std::sqrt(T(a));
    return r;
  });
  return results;
}

static long long bitsOf(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static long long bitsOf(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static std::vector<long long> converted(const Pair& pair) {
  volatile double x = pair.x, small = std::fmod(pair.x, 1e6), large = small * 1e6;
  volatile float narrow = static_cast<float>(small), wide = narrow * 1e6f;
  volatile long long whole = static_cast<long long>(std::fmod(pair.x, 9e18));
  std::vector<long long> results;
  inEachMode(results, [&] { return static_cast<long long>(std::nearbyint(small)); });
  inEachMode(results, [&] { return static_cast<long long>(std::nearbyint(large)); });
  inEachMode(results, [&] { return static_cast<long long>(std::nearbyint(narrow)); });
  inEachMode(results, [&] { return static_cast<long long>(std::nearbyint(wide)); });
  inEachMode(results, [&] {
    volatile float r = static_cast<float>(x);
    return bitsOf(float(r));
  });
  inEachMode(results, [&] {
    volatile float r = static_cast<float>(whole);
    return bitsOf(float(r));
  });
  inEachMode(results, [&] {
    volatile double r = static_cast<double>(whole);
    return bitsOf(double(r));
  });
  return results;
}

template <typename T>
static bool equal(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

template <typename T, typename Kernel, typename Host>
static void compare(const char* name, const std::vector<Pair>& pairs, int each, Kernel kernel, Host host) {
  const int count = static_cast<int>(pairs.size());
  Pair* input;
  CUDA(cudaMalloc(&input, count * sizeof(Pair)));
  CUDA(cudaMemcpy(input, pairs.data(), count * sizeof(Pair), cudaMemcpyHostToDevice));
  check::Device<T> output(static_cast<size_t>(count) * each);
  kernel<<<(count + 127) / 128, 128>>>(input, output, count);
  const std::vector<T> got = output.read();
  CUDA(cudaFree(input));
  for (int i = 0; i < count; ++i) {
    const std::vector<T> expected = host(pairs[i]);
    REQUIRE(expected.size() == static_cast<size_t>(each));
    for (int k = 0; k < each; ++k)
      if (!equal(got[i * each + k], expected[k]))
        check::fail("%s: operation %d mode %d of (%a, %a, %a) is %a, expected %a", name, k / 4, k % 4,
                    pairs[i].x, pairs[i].y, pairs[i].z, static_cast<double>(got[i * each + k]),
                    static_cast<double>(expected[k]));
  }
  check::say("%s: %d cases, %d results each are exact", name, count, each);
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 4000);
  check::Random random(34);
  std::vector<Pair> pairs(count);
  const auto pick = [&](int spread) {
    const double fraction = 1 + (random.next() + random.next() / 4294967296.0) / 4294967296.0;
    const double value = std::ldexp(fraction, static_cast<int>(random.below(2 * spread)) - spread);
    return random.below(2) ? value : -value;
  };
  for (Pair& pair : pairs) pair = {pick(30), pick(30), pick(60)};
  for (int i = 0; i < count; i += 7) pairs[i].y = pairs[i].x * 3;  // sums that cancel, exact quotients
  for (int i = 3; i < count; i += 11)
    pairs[i].z = -pairs[i].x * pairs[i].y;  // fma that leaves the product's error
  for (int i = 5; i < count; i += 13) pairs[i].x = std::floor(pairs[i].x) + 0.5;
  compare<float>("float", pairs, kFloat, floats, arithmetic<float>);
  compare<double>("double", pairs, kDouble, doubles, arithmetic<double>);
  compare<long long>("conversions", pairs, kConversions, conversions, converted);
  return check::pass();
}
