#include "base/hmac.h"

#include <sys/random.h>
#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace gpupool {
namespace {

// FIPS 180-4, 4.2.2: fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t loadBig(const std::byte* at) {
  return static_cast<uint32_t>(at[0]) << 24 | static_cast<uint32_t>(at[1]) << 16 |
         static_cast<uint32_t>(at[2]) << 8 | static_cast<uint32_t>(at[3]);
}

void storeBig(std::byte* at, uint32_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(value >> (24 - 8 * i));
}

#if defined(__x86_64__)
// The processor's SHA instructions, about ten times as fast: code images of hundreds of megabytes are named
// by their hash. Registers hold the state as ABEF and CDGH; each step does four rounds and makes four words
// of the schedule.
__attribute__((target("sha,sse4.1"))) void blockByInstruction(uint32_t* state, const std::byte* data) {
  const __m128i bigEndian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const auto load = [](const void* from) __attribute__((target("sha,sse4.1"))) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  };
  const __m128i cdab = _mm_shuffle_epi32(load(state), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(load(state + 4), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  const __m128i abefBefore = abef, cdghBefore = cdgh;
  __m128i w[4];
#pragma GCC unroll 16
  for (int step = 0; step < 16; ++step) {
    __m128i& next = w[step % 4];
    if (step < 4) {
      next = _mm_shuffle_epi8(load(data + ptrdiff_t{16} * step), bigEndian);
    } else {
      const __m128i last = w[(step + 3) % 4];
      const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[(step + 1) % 4]),
                                        _mm_alignr_epi8(last, w[(step + 2) % 4], 4));
      next = _mm_sha256msg2_epu32(sum, last);
    }
    const __m128i keyed = _mm_add_epi32(next, load(kRound + ptrdiff_t{4} * step));
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0e));
  }
  abef = _mm_add_epi32(abef, abefBefore);
  cdgh = _mm_add_epi32(cdgh, cdghBefore);
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool hasInstruction() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_SSE4_1) == 0) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_SHA) != 0;
  }();
  return has;
}
#endif

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {
}

void Sha256::block(const std::byte* data) {
#if defined(__x86_64__)
  if (hasInstruction()) return blockByInstruction(state_, data);
#endif
  using std::rotr;
  uint32_t w[64];
  for (int t = 0; t < 16; ++t) w[t] = loadBig(data + ptrdiff_t{4} * t);
  for (int t = 16; t < 64; ++t) {
    const uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
  uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
  for (int t = 0; t < 64; ++t) {
    const uint32_t s1 = rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const uint32_t s0 = rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t add[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += add[i];
}

void Sha256::update(std::span<const std::byte> bytes) {
  size_t held = total_ % 64;
  total_ += bytes.size();
  while (!bytes.empty()) {
    if (held == 0 && bytes.size() >= 64) {
      block(bytes.data());
      bytes = bytes.subspan(64);
      continue;
    }
    const size_t taken = std::min(bytes.size(), 64 - held);
    std::memcpy(pending_ + held, bytes.data(), taken);
    bytes = bytes.subspan(taken);
    held += taken;
    if (held == 64) {
      block(pending_);
      held = 0;
    }
  }
}

Digest Sha256::finish() {
  const uint64_t bits = total_ * 8;
  const size_t held = total_ % 64;
  std::byte padding[72] = {std::byte{0x80}};
  const size_t length = (held < 56 ? 56 : 120) - held;
  storeBig(padding + length, static_cast<uint32_t>(bits >> 32));
  storeBig(padding + length + 4, static_cast<uint32_t>(bits));
  update({padding, length + 8});
  Digest digest;
  for (int i = 0; i < 8; ++i) storeBig(digest.data() + ptrdiff_t{4} * i, state_[i]);
  return digest;
}

Digest sha256(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

Digest hmacSha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  std::byte inner[64] = {}, outer[64];
  if (key.size() > sizeof inner) {
    const Digest shorter = sha256(key);
    std::memcpy(inner, shorter.data(), shorter.size());
  } else if (!key.empty()) {
    std::memcpy(inner, key.data(), key.size());
  }
  for (size_t i = 0; i < sizeof inner; ++i) {
    outer[i] = inner[i] ^ std::byte{0x5c};
    inner[i] ^= std::byte{0x36};
  }
  Sha256 first;
  first.update(inner);
  first.update(message);
  const Digest digest = first.finish();
  Sha256 second;
  second.update(outer);
  second.update(digest);
  return second.finish();
}

bool equalConstantTime(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  std::byte difference{0};
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

void randomBytes(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) std::abort();
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
}

}  // namespace gpupool
