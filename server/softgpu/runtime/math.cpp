#include "server/softgpu/runtime/math.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "server/softgpu/runtime/calls.h"

namespace gpupool::softgpu::runtime {

uint32_t toSmall(double value, SmallFormat format, Rounding rounding) {
  const unsigned width = format.mantissa + format.exponent;
  const uint32_t infinity = ((1u << format.exponent) - 1) << format.mantissa;
  const int bias = (1 << (format.exponent - 1)) - 1;
  auto bits = std::bit_cast<uint64_t>(value);
  uint32_t sign = static_cast<uint32_t>(bits >> 63) << width;
  if (std::isnan(value)) return (1u << width) - 1;
  if (std::isinf(value)) return sign | infinity;
  uint64_t significand = bits & ((uint64_t{1} << 52) - 1);
  int exponent = static_cast<int>((bits >> 52) & 0x7FF) - 1023;
  if (exponent == -1023)
    exponent = -1022;
  else
    significand |= uint64_t{1} << 52;
  if (significand == 0) return sign;
  unsigned shift = 52 - format.mantissa;
  bool subnormal = exponent < 1 - bias;
  if (subnormal) shift += static_cast<unsigned>(1 - bias - exponent);
  uint64_t kept = 0;
  uint64_t rest = 1;
  uint64_t half = 2;
  if (shift < 63) {
    kept = significand >> shift;
    rest = significand & ((uint64_t{1} << shift) - 1);
    half = uint64_t{1} << (shift - 1);
  }
  bool up = false;
  switch (rounding) {
    case Rounding::nearest:
      up = rest > half || (rest == half && (kept & 1) != 0);
      break;
    case Rounding::away:
      up = rest >= half;
      break;
    case Rounding::zero:
      break;
    case Rounding::down:
      up = sign != 0 && rest != 0;
      break;
    case Rounding::up:
      up = sign == 0 && rest != 0;
      break;
  }
  kept += up;
  if (subnormal) return sign | static_cast<uint32_t>(kept);
  int64_t biased = exponent + bias;
  uint64_t result =
      (static_cast<uint64_t>(biased) << format.mantissa) + kept - (uint64_t{1} << format.mantissa);
  if (result < infinity) return sign | static_cast<uint32_t>(result);
  bool toInfinity = rounding == Rounding::nearest || rounding == Rounding::away ||
                    (rounding == Rounding::up && sign == 0) || (rounding == Rounding::down && sign != 0);
  return sign | (toInfinity ? infinity : infinity - 1);
}

float halfToFloat(uint32_t bits) {
  uint32_t sign = (bits & 0x8000) << 16;
  uint32_t exponent = (bits >> 10) & 31;
  uint32_t mantissa = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  float tiny = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(tiny) | sign);
}

// The product of two small floats is exact in double; the sum is rounded to odd, so that rounding again to
// the small format is as rounding once.
uint32_t fmaSmall(double a, double b, double c, SmallFormat format) {
  double product = a * b;
  double sum = product + c;
  if (std::isfinite(sum)) {
    double back = sum - product;
    double error = (product - (sum - back)) + (c - back);
    auto bits = std::bit_cast<uint64_t>(sum);
    if (error != 0 && (bits & 1) == 0) {
      bool away = (error > 0) == (sum > 0);
      bits = away ? bits + 1 : bits - 1;
      sum = std::bit_cast<double>(bits);
    }
  }
  return toSmall(sum, format, Rounding::nearest);
}

uint32_t toFloat8(float value, uint32_t wide, uint32_t relu) {
  if (std::isnan(value)) return 0x7F;
  if (relu != 0 && !(value > 0)) value = 0;
  if (wide != 0) {
    uint32_t bits = toSmall(value, {2, 5}, Rounding::nearest);
    return (bits & 0x7F) >= 0x7C ? (bits & 0x80) | 0x7B : bits;
  }
  // e4m3 has no infinity: 0x7E is 448, the largest. The largest exponent, an IEEE format's infinity, holds
  // numbers: they are rounded 16 times smaller.
  uint32_t sign = std::signbit(value) ? 0x80 : 0;
  double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 240)
    return sign | std::min(0x7Eu, toSmall(magnitude * 0x1p-4, {3, 4}, Rounding::nearest) + 0x20);
  return sign | toSmall(magnitude, {3, 4}, Rounding::nearest);
}

uint32_t float8ToHalf(uint32_t bits, uint32_t wide) {
  if (wide != 0) return (bits & 0x7C) == 0x7C && (bits & 3) != 0 ? 0x7FFF : bits << 8;
  uint32_t sign = (bits & 0x80) << 8;
  uint32_t magnitude = bits & 0x7F;
  if (magnitude == 0x7F) return 0x7FFF;
  double value = (magnitude >> 3) != 0
                     ? (1.0 + (magnitude & 7) / 8.0) * std::ldexp(1.0, static_cast<int>(magnitude >> 3) - 7)
                     : (magnitude & 7) / 8.0 * 0x1p-6;
  return sign | toSmall(value, kHalf, Rounding::nearest);
}

namespace {

// ---- directed rounding: the operation under another rounding mode of MXCSR, out of the compiler's sight
// ------------
class RoundingMode {
 public:
  explicit RoundingMode(Rounding mode) : saved_(_mm_getcsr()) {
    unsigned field = mode == Rounding::zero   ? 0x6000
                     : mode == Rounding::down ? 0x2000
                     : mode == Rounding::up   ? 0x4000
                                              : 0;
    _mm_setcsr((saved_ & ~0x6000u) | field);
  }
  ~RoundingMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

template <typename T>
T launder(T value) {
  if constexpr (std::is_floating_point_v<T>)
    asm volatile("" : "+x"(value));
  else
    asm volatile("" : "+r"(value));
  return value;
}

template <typename T, Rounding mode>
T addRounded(T a, T b) {
  RoundingMode scope(mode);
  return launder<T>(launder(a) + launder(b));
}
template <typename T, Rounding mode>
T mulRounded(T a, T b) {
  RoundingMode scope(mode);
  return launder<T>(launder(a) * launder(b));
}
template <typename T, Rounding mode>
T divRounded(T a, T b) {
  RoundingMode scope(mode);
  return launder<T>(launder(a) / launder(b));
}
template <typename T, Rounding mode>
T sqrtRounded(T a) {
  RoundingMode scope(mode);
  a = launder(a);
  if constexpr (sizeof(T) == 4)
    return launder<T>(_mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))));
  else
    return launder<T>(_mm_cvtsd_f64(_mm_sqrt_sd(_mm_set_sd(a), _mm_set_sd(a))));
}
template <typename T, Rounding mode>
T fmaRounded(T a, T b, T c) {
  RoundingMode scope(mode);
  return launder<T>(std::fma(launder(a), launder(b), launder(c)));
}
template <typename T, Rounding mode>
T fromS64(int64_t value) {
  RoundingMode scope(mode);
  return launder<T>(static_cast<T>(launder(value)));
}
// Unsigned numbers beyond 2^63 are halved first, the lost bit kept sticky.
template <typename T, Rounding mode>
T fromU64(uint64_t value) {
  RoundingMode scope(mode);
  if (static_cast<int64_t>(value) >= 0)
    return launder<T>(static_cast<T>(launder(static_cast<int64_t>(value))));
  auto halved = static_cast<int64_t>((value >> 1) | (value & 1));
  return launder<T>(static_cast<T>(launder(halved)) * 2);
}
template <Rounding mode>
float narrowRounded(double value) {
  RoundingMode scope(mode);
  return launder(static_cast<float>(launder(value)));
}

uint32_t toHalf(double value, uint32_t mode) { return toSmall(value, kHalf, static_cast<Rounding>(mode)); }
uint32_t toBfloat(double value, uint32_t mode) {
  return toSmall(value, kBfloat, static_cast<Rounding>(mode));
}
uint32_t fmaHalf(double a, double b, double c) { return fmaSmall(a, b, c, kHalf); }
uint32_t fmaBfloat(double a, double b, double c) { return fmaSmall(a, b, c, kBfloat); }

// 53 bits hold every 64-bit integer to within a sticky bit: enough for 8 or 11 bits.
double sticky(uint64_t value, uint32_t isSigned) {
  bool negative = isSigned != 0 && static_cast<int64_t>(value) < 0;
  uint64_t magnitude = negative ? ~value + 1 : value;
  if ((magnitude >> 32) != 0)
    magnitude = (magnitude & ~uint64_t{0xFFFF}) | ((magnitude & 0xFFFF) != 0 ? 0x8000 : 0);
  double result = static_cast<double>(magnitude);
  return negative ? -result : result;
}
uint32_t integerToHalf(uint64_t value, uint32_t isSigned, uint32_t mode) {
  return toHalf(sticky(value, isSigned), mode);
}
uint32_t integerToBfloat(uint64_t value, uint32_t isSigned, uint32_t mode) {
  return toBfloat(sticky(value, isSigned), mode);
}

uint32_t toTf32(float value, uint32_t mode) {
  auto rounding = static_cast<Rounding>(mode);
  if (std::isnan(value))
    return rounding == Rounding::away ? std::bit_cast<uint32_t>(value) & ~0x1FFFu : 0x7FFFE000;
  return toSmall(value, {10, 8}, rounding) << 13;
}

// PTX ISA 9.7.1.20: the offset-th set bit from `base` upwards, or downwards when the offset is negative.
uint32_t fns(uint32_t mask, uint32_t base, uint32_t offset) {
  auto wanted = static_cast<int32_t>(offset);
  if (wanted == 0) return base < 32 && ((mask >> base) & 1) != 0 ? base : 0xFFFFFFFF;
  int step = wanted > 0 ? 1 : -1;
  int32_t left = wanted > 0 ? wanted : -wanted;
  for (int64_t at = base; at >= 0 && at < 32; at += step)
    if (((mask >> at) & 1) != 0 && --left == 0) return static_cast<uint32_t>(at);
  return 0xFFFFFFFF;
}

float approximateSin(float a) { return std::sin(a); }
float approximateCos(float a) { return std::cos(a); }
float approximateLog2(float a) { return std::log2(a); }
float approximateExp2(float a) { return std::exp2(a); }
float approximateTanh(float a) { return std::tanh(a); }

template <typename Function>
void* address(Function function) {
  return reinterpret_cast<void*>(function);
}

template <Rounding mode>
void addRow(std::vector<Symbol>& rows, std::string_view suffix) {
  static std::string names[32];
  static int used = 0;
  auto add = [&](const char* name, std::string_view type, void* code) {
    std::string& text = names[used++];
    text = std::string("gpupool.") + name + "." + std::string(suffix) + std::string(type);
    rows.push_back({text, code});
  };
  add("add", ".f32", address(addRounded<float, mode>));
  add("add", ".f64", address(addRounded<double, mode>));
  add("mul", ".f32", address(mulRounded<float, mode>));
  add("mul", ".f64", address(mulRounded<double, mode>));
  add("div", ".f32", address(divRounded<float, mode>));
  add("div", ".f64", address(divRounded<double, mode>));
  add("sqrt", ".f32", address(sqrtRounded<float, mode>));
  add("sqrt", ".f64", address(sqrtRounded<double, mode>));
  add("fma", ".f32", address(fmaRounded<float, mode>));
  add("fma", ".f64", address(fmaRounded<double, mode>));
  add("fromS64", ".f32", address(fromS64<float, mode>));
  add("fromS64", ".f64", address(fromS64<double, mode>));
  add("fromU64", ".f32", address(fromU64<float, mode>));
  add("fromU64", ".f64", address(fromU64<double, mode>));
  add("narrow", ".f32", address(narrowRounded<mode>));
}

}  // namespace

std::span<const Symbol> mathSymbols() {
  static const std::vector<Symbol> table = [] {
    std::vector<Symbol> rows = {
        {"gpupool.toHalf", address(toHalf)},
        {"gpupool.toBfloat", address(toBfloat)},
        {"gpupool.halfToFloat", address(halfToFloat)},
        {"gpupool.fmaHalf", address(fmaHalf)},
        {"gpupool.fmaBfloat", address(fmaBfloat)},
        {"gpupool.integerToHalf", address(integerToHalf)},
        {"gpupool.integerToBfloat", address(integerToBfloat)},
        {"gpupool.toTf32", address(toTf32)},
        {"gpupool.toFloat8", address(toFloat8)},
        {"gpupool.float8ToHalf", address(float8ToHalf)},
        {"gpupool.fns", address(fns)},
        {"gpupool.sin.f32", address(approximateSin)},
        {"gpupool.cos.f32", address(approximateCos)},
        {"gpupool.lg2.f32", address(approximateLog2)},
        {"gpupool.ex2.f32", address(approximateExp2)},
        {"gpupool.tanh.f32", address(approximateTanh)},
    };
    addRow<Rounding::zero>(rows, "rz");
    addRow<Rounding::down>(rows, "rm");
    addRow<Rounding::up>(rows, "rp");
    return rows;
  }();
  return table;
}

}  // namespace gpupool::softgpu::runtime
