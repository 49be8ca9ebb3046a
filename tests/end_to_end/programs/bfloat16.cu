// bfloat16, bit for bit, with the instructions that sm_80 and later have (built with -arch=sm_80).
#include <cuda_bf16.h>

#include "check.h"
#include "narrow_float.h"

using narrow::Brain;

__global__ void conversions(const float* input, ushort4* output, float* back, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  output[i] = make_ushort4(__bfloat16_as_ushort(__float2bfloat16_rn(input[i])),
                           __bfloat16_as_ushort(__float2bfloat16_rz(input[i])),
                           __bfloat16_as_ushort(__float2bfloat16_rd(input[i])),
                           __bfloat16_as_ushort(__float2bfloat16_ru(input[i])));
  back[i] = __bfloat162float(__ushort_as_bfloat16(output[i].x));
}

constexpr int kResults = 9;
__global__ void arithmetic(const ushort4* input, unsigned short* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const __nv_bfloat16 a = __ushort_as_bfloat16(input[i].x), b = __ushort_as_bfloat16(input[i].y),
                      c = __ushort_as_bfloat16(input[i].z);
  unsigned short* out = output + i * kResults;
  out[0] = __bfloat16_as_ushort(__hadd(a, b));
  out[1] = __bfloat16_as_ushort(__hsub(a, b));
  out[2] = __bfloat16_as_ushort(__hmul(a, b));
  out[3] = __bfloat16_as_ushort(__hfma(a, b, c));
  out[4] = __bfloat16_as_ushort(__habs(a));
  out[5] = __bfloat16_as_ushort(__hmax(a, b));
  const __nv_bfloat162 pair =
      __hfma2(__halves2bfloat162(a, b), __halves2bfloat162(b, c), __halves2bfloat162(c, a));
  out[6] = __bfloat16_as_ushort(__low2bfloat16(pair));
  out[7] = __bfloat16_as_ushort(__high2bfloat16(pair));
  out[8] = __hlt(a, b) | __hge(a, b) << 1 | __heq(a, b) << 2 | __hisnan(b) << 3;
}

static void compare(const char* what, int i, unsigned short got, unsigned short expected, const ushort4& in) {
  if (!narrow::equal<Brain>(got, expected))
    check::fail("%s of case %d (%04x %04x %04x) is %04x, expected %04x", what, i, in.x, in.y, in.z, got,
                expected);
}

static float asFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 40000);
  check::Random random(32);
  std::vector<float> sources(count);
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = random.next();
    sources[i] = asFloat(i % 4 == 0 ? (bits & 0xffff0000) | 0x8000 : i % 4 == 1 ? bits & 0xffff8000 : bits);
  }
  const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3.4028235e38f, -3.4028235e38f, 1e-45f};
  std::copy(special, special + 8, sources.begin());
  check::Device<float> input(sources), back(count);
  check::Device<ushort4> rounded(count);
  conversions<<<(count + 127) / 128, 128>>>(input, rounded, back, count);
  const std::vector<ushort4> modes = rounded.read();
  const std::vector<float> widened = back.read();
  for (int i = 0; i < count; ++i) {
    const ushort4 none = {};
    compare("rn", i, modes[i].x, Brain::encode(sources[i]), none);
    compare("rz", i, modes[i].y, Brain::encode(sources[i], narrow::Mode::zero), none);
    compare("rd", i, modes[i].z, Brain::encode(sources[i], narrow::Mode::down), none);
    compare("ru", i, modes[i].w, Brain::encode(sources[i], narrow::Mode::up), none);
    const double wide = Brain::decode(modes[i].x);
    if (!(widened[i] == wide) && !(widened[i] != widened[i] && wide != wide))
      check::fail("case %d widens wrong", i);
  }
  check::say("from float, four modes: %d values are exact", count);

  std::vector<ushort4> values(count);
  for (ushort4& value : values) {
    value.x = random.below(65536);
    value.y = random.below(3) ? (value.x & 0xff80) ^ (random.below(1 << 11) & 0x87ff) : random.below(65536);
    value.z = random.below(3) ? (value.y & 0xff80) ^ random.below(1 << 10) : random.below(65536);
    value.w = 0;
  }
  check::Device<ushort4> deviceValues(values);
  check::Device<unsigned short> output(count * kResults);
  arithmetic<<<(count + 127) / 128, 128>>>(deviceValues, output, count);
  CUDA(cudaGetLastError());
  const std::vector<unsigned short> got = output.read();
  for (int i = 0; i < count; ++i) {
    const ushort4 in = values[i];
    const unsigned short* out = &got[i * kResults];
    const double a = Brain::decode(in.x), b = Brain::decode(in.y);
    compare("add", i, out[0], Brain::encode(a + b), in);
    compare("sub", i, out[1], Brain::encode(a - b), in);
    compare("mul", i, out[2], Brain::encode(a * b), in);
    compare("fma", i, out[3], Brain::fma(in.x, in.y, in.z), in);
    compare("abs", i, out[4], in.x & 0x7fff, in);
    const double most = std::isnan(a) ? b : std::isnan(b) ? a : a > b ? a : b;
    if (a != b) compare("max", i, out[5], Brain::encode(most), in);
    compare("low fma", i, out[6], Brain::fma(in.x, in.y, in.z), in);
    compare("high fma", i, out[7], Brain::fma(in.y, in.z, in.x), in);
    REQUIRE(out[8] == ((a < b) | (a >= b) << 1 | (a == b) << 2 | std::isnan(b) << 3));
  }
  check::say("arithmetic: %d cases are exact", count);
  return check::pass();
}
