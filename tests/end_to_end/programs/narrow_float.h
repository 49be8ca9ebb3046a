#pragma once
// Correctly rounded arithmetic for 16-bit floats on the CPU, done in double: a format is a significand of
// `Precision` bits (the implicit one included) and exponents down to `Lowest` for normal numbers.
#include <cfenv>
#include <cmath>
#include <cstdint>

namespace narrow {

enum class Mode { nearest, zero, down, up };

template <int Precision, int Lowest>
struct Format {
  static constexpr int kFraction = Precision - 1;
  static constexpr int kHighest = 1 - Lowest;  // the bias, too
  static constexpr uint16_t kInfinity = static_cast<uint16_t>((2 * kHighest + 1) << kFraction);

  static double decode(uint16_t bits) {
    const int exponent = (bits & 0x7fff) >> kFraction, fraction = bits & ((1 << kFraction) - 1);
    double value;
    if (exponent == 2 * kHighest + 1)
      value = fraction == 0 ? INFINITY : NAN;
    else if (exponent == 0)
      value = std::ldexp(fraction, Lowest - kFraction);
    else
      value = std::ldexp(fraction + (1 << kFraction), exponent - kHighest - kFraction);
    return bits & 0x8000 ? -value : value;
  }

  static uint16_t encode(double value, Mode mode = Mode::nearest) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return 0x7fff;
    const double size = std::fabs(value);
    if (std::isinf(size)) return sign | kInfinity;
    if (size == 0) return sign;
    const bool away = sign ? mode == Mode::down : mode == Mode::up;
    int exponent = std::ilogb(size);
    if (exponent < Lowest) exponent = Lowest;
    const double scaled = std::ldexp(size, kFraction - exponent);  // exact: a power of two
    double whole = std::floor(scaled);
    const double rest = scaled - whole;
    if (mode == Mode::nearest ? rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) == 1) : away && rest > 0)
      whole += 1;
    const double rounded = std::ldexp(whole, exponent - kFraction);
    if (rounded >= std::ldexp(1.0, kHighest + 1))
      return sign | (mode == Mode::nearest || away ? kInfinity : kInfinity - 1);
    if (rounded == 0) return sign;
    if (rounded < std::ldexp(1.0, Lowest)) return sign | static_cast<uint16_t>(whole);
    exponent = std::ilogb(rounded);
    const auto significand = static_cast<uint16_t>(std::ldexp(rounded, kFraction - exponent));
    return sign |
           static_cast<uint16_t>(((exponent + kHighest) << kFraction) + (significand - (1 << kFraction)));
  }

  // a * b + c with one rounding. The product is exact in double; the sum is rounded to odd there, so that the
  // second rounding decides as if it had seen the exact value.
  static uint16_t fma(uint16_t a, uint16_t b, uint16_t c) {
    const double product = decode(a) * decode(b), addend = decode(c);
    double sum = product + addend;
    if (std::isfinite(sum)) {
      const double part = sum - product;
      const double error = (product - (sum - part)) + (addend - part);
      int64_t bits;
      static_assert(sizeof bits == sizeof sum);
      __builtin_memcpy(&bits, &sum, sizeof bits);
      if (error != 0 && bits % 2 == 0) sum = std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
    }
    return encode(sum);
  }
};

using Half = Format<11, -14>;
using Brain = Format<8, -126>;

template <typename Format>
bool isNan(uint16_t bits) {
  return (bits & 0x7fff) > Format::kInfinity;
}

template <typename Format>
bool equal(uint16_t a, uint16_t b) {
  return a == b || (isNan<Format>(a) && isNan<Format>(b));
}

}  // namespace narrow
