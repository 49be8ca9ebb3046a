#pragma once
// Arithmetic the processor has no single instruction for: directed rounding, halves, 8-bit floats.

#include <cstdint>
#include <string_view>

namespace gpupool::softgpu::runtime {

enum class Rounding : uint32_t { nearest, zero, down, up, away };

// "rn", "rz", "rm", "rp", "rna"; nearest for anything else.
constexpr Rounding roundingNamed(std::string_view name) {
  return name == "rz"    ? Rounding::zero
         : name == "rm"  ? Rounding::down
         : name == "rp"  ? Rounding::up
         : name == "rna" ? Rounding::away
                         : Rounding::nearest;
}

// A binary format with `mantissa` stored bits and `exponent` bits, IEEE specials.
struct SmallFormat {
  unsigned mantissa;
  unsigned exponent;
};
constexpr SmallFormat kHalf{10, 5};
constexpr SmallFormat kBfloat{7, 8};

// Rounds once; NaN becomes the canonical 0x7FFF.
uint32_t toSmall(double value, SmallFormat format, Rounding rounding);
float halfToFloat(uint32_t bits);
// a * b + c rounded once to `format`.
uint32_t fmaSmall(double a, double b, double c, SmallFormat format);
// e4m3 (e5m2 when `wide`): nearest, finite values saturate, NaN stays NaN.
uint32_t toFloat8(float value, uint32_t wide, uint32_t relu);
uint32_t float8ToHalf(uint32_t bits, uint32_t wide);

}  // namespace gpupool::softgpu::runtime
