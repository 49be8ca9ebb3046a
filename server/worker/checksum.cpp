#include "server/worker/checksum.h"

#include <xxhash.h>

#include <cstring>

namespace gpupool::server {

Checksum checksumOf(std::span<const std::byte> bytes) {
  XXH128_canonical_t canonical;  // the same on every processor
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  Checksum checksum;
  static_assert(sizeof canonical == sizeof checksum);
  std::memcpy(checksum.data(), &canonical, sizeof checksum);
  return checksum;
}

}  // namespace gpupool::server
