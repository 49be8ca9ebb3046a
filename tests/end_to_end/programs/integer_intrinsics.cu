// Integer intrinsics against plain C on the CPU, with edge values among the random ones.
#include "check.h"

struct Operands {
  uint32_t a, b, c;
  uint64_t x, y;
};
constexpr int kResults = 40;

// Results that need 64 bits take one slot each, as all do.
__global__ void onDevice(const Operands* input, uint64_t* output, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Operands o = input[i];
  const int a = o.a, b = o.b, c = o.c;
  uint64_t* out = output + static_cast<size_t>(i) * kResults;
  int n = 0;
  const auto put = [&](uint64_t value) { out[n++] = value; };
  put(__brev(o.a));
  put(__brevll(o.x));
  put(__clz(o.a));
  put(__clzll(o.x));
  put(__ffs(o.a));
  put(__ffsll(o.x));
  put(__popc(o.a));
  put(__popcll(o.x));
  put(__byte_perm(o.a, o.b, o.c & 0x7777));
  put(__funnelshift_l(o.a, o.b, o.c));
  put(__funnelshift_r(o.a, o.b, o.c));
  put(__funnelshift_lc(o.a, o.b, o.c & 63));
  put(__funnelshift_rc(o.a, o.b, o.c & 63));
  put(static_cast<uint32_t>(__mul24(a, b)));
  put(__umul24(o.a, o.b));
  put(static_cast<uint32_t>(__mulhi(a, b)));
  put(__umulhi(o.a, o.b));
  put(static_cast<uint64_t>(__mul64hi(o.x, o.y)));
  put(__umul64hi(o.x, o.y));
  put(static_cast<uint32_t>(__dp4a(a, b, c)));
  put(__dp4a(o.a, o.b, o.c));
  put(static_cast<uint32_t>(__dp2a_lo(a, b, c)));
  put(static_cast<uint32_t>(__dp2a_hi(a, b, c)));
  put(__sad(a, b, o.c));
  put(__usad(o.a, o.b, o.c));
  put(static_cast<uint32_t>(__hadd(a, b)));
  put(static_cast<uint32_t>(__rhadd(a, b)));
  put(__uhadd(o.a, o.b));
  put(__urhadd(o.a, o.b));
  put(__vadd4(o.a, o.b));
  put(__vabsdiffu4(o.a, o.b));
  put(__vmaxs2(o.a, o.b));
  put(__vcmpgtu4(o.a, o.b));
  put(min(a, b) + static_cast<uint64_t>(max(o.x, o.y)));
  put(o.b ? o.a / o.b + static_cast<uint64_t>(o.a % o.b) * 7 : 1);
  put(o.y ? o.x / o.y + (o.x % o.y) * 7 : 1);
  put(b > 0 ? static_cast<uint32_t>(a / b) : 1);
  put(static_cast<int64_t>(o.x) >> (o.c & 63));
  put(static_cast<uint32_t>(abs(a)) + static_cast<uint64_t>(a < 0 ? -1 : 1));
  put(static_cast<uint64_t>(static_cast<int64_t>(a) * b + static_cast<int64_t>(o.x)));
}

static uint32_t byteOf(uint64_t value, int at) { return value >> (8 * at) & 0xff; }
static int signedByte(uint32_t value, int at) { return static_cast<int8_t>(byteOf(value, at)); }

static uint64_t reversed(uint64_t value, int bits) {
  uint64_t result = 0;
  for (int i = 0; i < bits; ++i) result |= (value >> i & 1) << (bits - 1 - i);
  return result;
}

template <typename Function>
static uint32_t perByte(uint32_t a, uint32_t b, Function function) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (function(byteOf(a, i), byteOf(b, i)) & 0xff) << (8 * i);
  return result;
}

static std::vector<uint64_t> onHost(const Operands& o) {
  const int32_t a = o.a, b = o.b;
  const int64_t wideA = a, wideB = b;
  const uint64_t joined = static_cast<uint64_t>(o.b) << 32 | o.a, bytes = joined;
  const unsigned shift = o.c & 31, clamped = (o.c & 63) > 32 ? 32 : o.c & 63;
  uint32_t permuted = 0;
  int32_t dotSigned = o.c, lower = o.c, upper = o.c;
  uint32_t dot = o.c;
  for (int i = 0; i < 4; ++i) {
    permuted |= byteOf(bytes, o.c >> (4 * i) & 7) << (8 * i);
    dotSigned = static_cast<uint32_t>(dotSigned) + signedByte(o.a, i) * signedByte(o.b, i);
    dot += byteOf(o.a, i) * byteOf(o.b, i);
  }
  for (int i = 0; i < 2; ++i) {
    const int half = static_cast<int16_t>(o.a >> (16 * i));
    lower = static_cast<uint32_t>(lower) + half * signedByte(o.b, i);
    upper = static_cast<uint32_t>(upper) + half * signedByte(o.b, i + 2);
  }
  const int64_t signed24A = static_cast<int32_t>(o.a << 8) >> 8,
                signed24B = static_cast<int32_t>(o.b << 8) >> 8;
  uint32_t maximum = 0;
  for (int i = 0; i < 2; ++i) {
    const int16_t first = o.a >> (16 * i), second = o.b >> (16 * i);
    maximum |= static_cast<uint32_t>(static_cast<uint16_t>(first > second ? first : second)) << (16 * i);
  }
  const auto u32 = [](int64_t value) { return static_cast<uint64_t>(static_cast<uint32_t>(value)); };
  return {reversed(o.a, 32),
          reversed(o.x, 64),
          o.a ? static_cast<uint64_t>(__builtin_clz(o.a)) : 32,
          o.x ? static_cast<uint64_t>(__builtin_clzll(o.x)) : 64,
          static_cast<uint64_t>(__builtin_ffs(a)),
          static_cast<uint64_t>(__builtin_ffsll(static_cast<int64_t>(o.x))),
          static_cast<uint64_t>(__builtin_popcount(o.a)),
          static_cast<uint64_t>(__builtin_popcountll(o.x)),
          permuted,
          u32((joined << shift) >> 32),
          u32(joined >> shift),
          u32(clamped == 32 ? o.a : (joined << clamped) >> 32),
          u32(joined >> clamped),
          u32(signed24A * signed24B),
          u32(static_cast<uint64_t>(o.a & 0xffffff) * (o.b & 0xffffff)),
          u32(wideA * wideB >> 32),
          u32(static_cast<uint64_t>(o.a) * o.b >> 32),
          static_cast<uint64_t>(
              static_cast<__int128>(static_cast<int64_t>(o.x)) * static_cast<int64_t>(o.y) >> 64),
          static_cast<uint64_t>(static_cast<unsigned __int128>(o.x) * o.y >> 64),
          u32(dotSigned),
          dot,
          u32(lower),
          u32(upper),
          u32(static_cast<int64_t>(o.c) + std::llabs(wideA - wideB)),
          u32(static_cast<int64_t>(o.c) + std::llabs(static_cast<int64_t>(o.a) - static_cast<int64_t>(o.b))),
          u32((wideA + wideB) >> 1),
          u32((wideA + wideB + 1) >> 1),
          (static_cast<uint64_t>(o.a) + o.b) >> 1,
          (static_cast<uint64_t>(o.a) + o.b + 1) >> 1,
          perByte(o.a, o.b, [](uint32_t p, uint32_t q) { return p + q; }),
          perByte(o.a, o.b, [](uint32_t p, uint32_t q) { return p > q ? p - q : q - p; }),
          maximum,
          perByte(o.a, o.b, [](uint32_t p, uint32_t q) { return p > q ? 0xffu : 0u; }),
          static_cast<uint64_t>(static_cast<int64_t>(a < b ? a : b)) + (o.x > o.y ? o.x : o.y),
          o.b ? o.a / o.b + static_cast<uint64_t>(o.a % o.b) * 7 : 1,
          o.y ? o.x / o.y + (o.x % o.y) * 7 : 1,
          b > 0 ? u32(a / b) : 1,
          static_cast<uint64_t>(static_cast<int64_t>(o.x) >> (o.c & 63)),
          u32(a < 0 ? 0u - o.a : o.a) + (a < 0 ? ~0ull : 1),
          static_cast<uint64_t>(wideA * wideB) + o.x};
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 5000);
  const uint64_t edges[] = {
      0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff, 0x8000000000000000, ~0ull};
  check::Random random(33);
  const auto pick = [&]() -> uint64_t {
    if (random.below(5) == 0) return edges[random.below(8)];
    return (static_cast<uint64_t>(random.next()) << 32 | random.next()) >> random.below(64);
  };
  std::vector<Operands> operands(count);
  for (Operands& o : operands)
    o = {static_cast<uint32_t>(pick()), static_cast<uint32_t>(pick()), static_cast<uint32_t>(pick()), pick(),
         pick()};
  check::Device<Operands> input(operands);
  check::Device<uint64_t> output(static_cast<size_t>(count) * kResults);
  onDevice<<<(count + 127) / 128, 128>>>(input, output, count);
  CUDA(cudaGetLastError());
  const std::vector<uint64_t> got = output.read();
  for (int i = 0; i < count; ++i) {
    const std::vector<uint64_t> expected = onHost(operands[i]);
    REQUIRE(expected.size() == kResults);
    for (int k = 0; k < kResults; ++k)
      if (got[static_cast<size_t>(i) * kResults + k] != expected[k])
        check::fail("result %d of case %d (a %x b %x c %x x %llx y %llx) is %llx, expected %llx", k, i,
                    operands[i].a, operands[i].b, operands[i].c,
                    static_cast<unsigned long long>(operands[i].x),
                    static_cast<unsigned long long>(operands[i].y),
                    static_cast<unsigned long long>(got[static_cast<size_t>(i) * kResults + k]),
                    static_cast<unsigned long long>(expected[k]));
  }
  check::say("%d results of %d cases are exact", kResults, count);
  check::say("digest %016llx", static_cast<unsigned long long>(check::digest(got.data(), got.size() * 8)));
  return check::pass();
}
