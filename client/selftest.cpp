#include "client/selftest.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace gpupool::client::selftest {
namespace {

// RFC 1319, section 3.2: a permutation constructed from the digits of pi.
constexpr uint8_t kPi[256] = {
    41,  46,  67,  201, 162, 216, 124, 1,   61,  54,  84,  161, 236, 240, 6,   19,  98,  167, 5,   243,
    192, 199, 115, 140, 152, 147, 43,  217, 188, 76,  130, 202, 30,  155, 87,  60,  253, 212, 224, 22,
    103, 66,  111, 24,  138, 23,  229, 18,  190, 78,  196, 214, 218, 158, 222, 73,  160, 251, 245, 142,
    187, 47,  238, 122, 169, 104, 121, 145, 21,  178, 7,   63,  148, 194, 16,  137, 11,  34,  95,  33,
    128, 127, 93,  154, 90,  144, 50,  39,  53,  62,  204, 231, 191, 247, 151, 3,   255, 25,  48,  179,
    72,  165, 181, 209, 215, 94,  146, 42,  172, 86,  170, 198, 79,  184, 56,  210, 150, 164, 125, 182,
    118, 252, 107, 226, 156, 116, 4,   241, 69,  157, 112, 89,  100, 113, 135, 32,  134, 91,  207, 101,
    230, 45,  168, 2,   27,  96,  37,  173, 174, 176, 185, 246, 28,  70,  97,  105, 52,  64,  126, 15,
    85,  71,  163, 35,  221, 81,  175, 58,  195, 92,  249, 206, 186, 197, 234, 38,  44,  83,  13,  110,
    133, 40,  132, 9,   211, 223, 205, 244, 65,  129, 77,  82,  106, 220, 55,  200, 108, 193, 171, 250,
    36,  225, 123, 8,   12,  189, 177, 74,  120, 136, 149, 139, 227, 99,  232, 109, 233, 203, 213, 254,
    59,  0,   29,  57,  242, 239, 183, 14,  102, 88,  208, 228, 166, 119, 114, 248, 235, 117, 75,  10,
    49,  68,  80,  180, 143, 237, 31,  26,  219, 153, 141, 51,  159, 17,  131, 20};

constexpr uint8_t kKey[16] = {0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52,
                              0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F};

// RFC 1319, sections 3.3 and 3.4, one 16-byte block: the 48-byte state and the running checksum.
struct Md2State {
  uint8_t x[48] = {};
  uint8_t checksum[16] = {};

  void block(const uint8_t* data) {
    uint8_t last = checksum[15];
    for (int i = 0; i < 16; ++i) last = checksum[i] ^= kPi[data[i] ^ last];
    mix(data);
  }
  void mix(const uint8_t* data) {
    for (int i = 0; i < 16; ++i) {
      x[16 + i] = data[i];
      x[32 + i] = data[i] ^ x[i];
    }
    uint8_t t = 0;
    for (int round = 0; round < 18; ++round) {
      for (uint8_t& byte : x) t = byte ^= kPi[t];
      t = static_cast<uint8_t>(t + round);
    }
  }
};

template <typename T>
void append(std::vector<uint8_t>& message, const T& value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
  message.insert(message.end(), bytes, bytes + sizeof value);
}

}  // namespace

Hash md2(std::span<const uint8_t> message) {
  Md2State state;
  const size_t whole = message.size() / 16 * 16;
  for (size_t i = 0; i < whole; i += 16) state.block(message.data() + i);
  uint8_t last[16];
  const size_t rest = message.size() - whole;
  std::fill(std::begin(last), std::end(last), static_cast<uint8_t>(16 - rest));
  if (rest > 0) std::memcpy(last, message.data() + whole, rest);
  state.block(last);
  uint8_t checksum[16];
  std::memcpy(checksum, state.checksum, sizeof checksum);
  state.mix(checksum);
  Hash hash;
  std::memcpy(hash.data(), state.x, hash.size());
  return hash;
}

// RFC 2104 with a block of 16 bytes, so that the key fills it.
Hash hmacMd2(std::span<const uint8_t, 16> key, std::span<const uint8_t> message) {
  std::vector<uint8_t> inner(16);
  std::transform(key.begin(), key.end(), inner.begin(), [](uint8_t byte) { return byte ^ 0x36; });
  inner.insert(inner.end(), message.begin(), message.end());
  const Hash innerHash = md2(inner);
  std::vector<uint8_t> outer(16);
  std::transform(key.begin(), key.end(), outer.begin(), [](uint8_t byte) { return byte ^ 0x5c; });
  outer.insert(outer.end(), innerHash.begin(), innerHash.end());
  return md2(outer);
}

Hash answer(const Question& question, std::span<const DeviceIdentity> devices) {
  const uint32_t form = question.version % 10;
  if (form < 2) {
    const uint64_t fixed[2] = {form == 0 ? 0x3341181C03CB675Cu : 0x1841181C03CB675Cu, 0x8ED383AA1F4CD1E8};
    Hash hash;
    std::memcpy(hash.data(), fixed, sizeof fixed);
    return hash;
  }
  std::vector<uint8_t> message;
  append(message, question.driverVersion);
  append(message, question.version);
  append(message, question.processId);
  append(message, question.thread);
  append(message, question.cudartInterface);
  append(message, question.integrityCheck);
  append(message, question.integrityFunction);
  append(message, question.seconds);
  for (const auto& device : devices) {
    append(message, device.uuid);
    append(message, device.pciDomain);
    append(message, device.pciBus);
    append(message, device.pciDevice);
  }
  return hmacMd2(kKey, message);
}

}  // namespace gpupool::client::selftest
