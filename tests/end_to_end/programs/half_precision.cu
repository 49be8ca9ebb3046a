// Half precision, bit for bit: every conversion to float, conversions from float in four rounding modes,
// arithmetic on scalars and pairs, comparisons.
#include <cuda_fp16.h>

#include "check.h"
#include "narrow_float.h"

using narrow::Half;

__global__ void toFloat(float* output) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  output[i] = __half2float(__ushort_as_half(i));
}

__global__ void fromFloat(const float* input, ushort4* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  output[i] =
      make_ushort4(__half_as_ushort(__float2half_rn(input[i])), __half_as_ushort(__float2half_rz(input[i])),
                   __half_as_ushort(__float2half_rd(input[i])), __half_as_ushort(__float2half_ru(input[i])));
}

constexpr int kResults = 12;
__global__ void arithmetic(const ushort4* input, unsigned short* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const __half a = __ushort_as_half(input[i].x), b = __ushort_as_half(input[i].y),
               c = __ushort_as_half(input[i].z);
  unsigned short* out = output + i * kResults;
  out[0] = __half_as_ushort(__hadd(a, b));
  out[1] = __half_as_ushort(__hsub(a, b));
  out[2] = __half_as_ushort(__hmul(a, b));
  out[3] = __half_as_ushort(__hfma(a, b, c));
  out[4] = __half_as_ushort(hsqrt(__habs(a)));
  out[5] = __half_as_ushort(__hdiv(a, b));
  out[6] = __half_as_ushort(__hneg(a));
  out[7] = __hlt(a, b) | __hle(a, b) << 1 | __heq(a, b) << 2 | __hne(a, b) << 3 | __hgtu(a, b) << 4 |
           __hisnan(a) << 5;
  const __half2 pair = __hfma2(__halves2half2(a, b), __halves2half2(b, c), __halves2half2(c, a));
  out[8] = __half_as_ushort(__low2half(pair));
  out[9] = __half_as_ushort(__high2half(pair));
  out[10] = __half_as_ushort(__int2half_rn(static_cast<short>(input[i].w) * 3));
  out[11] = __half_as_ushort(hfloor(a));
}

static std::vector<ushort4> operands(int count) {
  const unsigned short special[] = {0,      0x8000, 1,      0x8001, 0x3ff,  0x400, 0x3c00,
                                    0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00};
  check::Random random(30);
  const auto pick = [&](unsigned short near) -> unsigned short {
    const unsigned kind = random.below(10);
    if (kind == 0) return special[random.below(13)];
    if (kind < 5) return (near & 0xfc00) ^ random.below(1 << 12);  // an exponent close by, either sign
    return random.below(65536);
  };
  std::vector<ushort4> values(count);
  for (ushort4& value : values) {
    value.x = random.below(65536);
    value.y = pick(value.x);
    value.z = pick(value.x);
    value.w = random.below(65536);
  }
  return values;
}

static unsigned short comparisons(double a, double b) {
  return (a < b) | (a <= b) << 1 | (a == b) << 2 | (a < b || a > b) << 3 | !(a <= b) << 4 |
         std::isnan(a) << 5;
}

static void compare(const char* what, int i, unsigned short got, unsigned short expected, const ushort4& in) {
  if (!narrow::equal<Half>(got, expected))
    check::fail("%s of case %d (%04x %04x %04x) is %04x, expected %04x", what, i, in.x, in.y, in.z, got,
                expected);
}

int main(int argc, char** argv) {
  check::Device<float> floats(65536);
  toFloat<<<256, 256>>>(floats);
  const std::vector<float> all = floats.read();
  for (int i = 0; i < 65536; ++i) {
    const double expected = Half::decode(i);
    if (!(all[i] == expected && std::signbit(all[i]) == std::signbit(expected)) &&
        !(all[i] != all[i] && expected != expected))
      check::fail("half %04x as float is %g", i, all[i]);
  }
  check::say("to float: 65536 values are exact");

  const int count = check::option(argc, argv, "--size", 40000);
  check::Random random(31);
  std::vector<float> sources(count);
  for (int i = 0; i < count; ++i) {
    const float base = static_cast<float>(Half::decode(random.below(65536)));
    const float other = static_cast<float>(Half::decode(random.below(65536)));
    sources[i] = i % 3 == 0 ? base + other * 0.001f : i % 3 == 1 ? base * 1.00048828125f : base * other;
  }
  check::Device<float> input(sources);
  check::Device<ushort4> rounded(count);
  fromFloat<<<(count + 127) / 128, 128>>>(input, rounded, count);
  const std::vector<ushort4> modes = rounded.read();
  for (int i = 0; i < count; ++i) {
    const ushort4 none = {};
    compare("rn", i, modes[i].x, Half::encode(sources[i]), none);
    compare("rz", i, modes[i].y, Half::encode(sources[i], narrow::Mode::zero), none);
    compare("rd", i, modes[i].z, Half::encode(sources[i], narrow::Mode::down), none);
    compare("ru", i, modes[i].w, Half::encode(sources[i], narrow::Mode::up), none);
  }
  check::say("from float, four modes: %d values are exact", count);

  const std::vector<ushort4> values = operands(count);
  check::Device<ushort4> deviceValues(values);
  check::Device<unsigned short> output(count * kResults);
  arithmetic<<<(count + 127) / 128, 128>>>(deviceValues, output, count);
  const std::vector<unsigned short> got = output.read();
  for (int i = 0; i < count; ++i) {
    const ushort4 in = values[i];
    const unsigned short* out = &got[i * kResults];
    const double a = Half::decode(in.x), b = Half::decode(in.y);
    compare("add", i, out[0], Half::encode(a + b), in);
    compare("sub", i, out[1], Half::encode(a - b), in);
    compare("mul", i, out[2], Half::encode(a * b), in);
    compare("fma", i, out[3], Half::fma(in.x, in.y, in.z), in);
    compare("sqrt", i, out[4], Half::encode(std::sqrt(std::fabs(a))), in);
    compare("div", i, out[5], Half::encode(a / b), in);
    if (!std::isnan(a)) compare("neg", i, out[6], in.x ^ 0x8000, in);
    REQUIRE(out[7] == comparisons(a, b));
    compare("low fma", i, out[8], Half::fma(in.x, in.y, in.z), in);
    compare("high fma", i, out[9], Half::fma(in.y, in.z, in.x), in);
    compare("from int", i, out[10], Half::encode(static_cast<short>(in.w) * 3), in);
    compare("floor", i, out[11], Half::encode(std::floor(a)), in);
  }
  check::say("arithmetic: %d cases are exact", count);
  return check::pass();
}
