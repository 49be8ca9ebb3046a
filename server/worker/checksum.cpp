#include "server/worker/checksum.h"

#include <xxhash.h>

#include <cstring>
#include <new>

namespace gpupool::server {
namespace {

Checksum canonical(const XXH128_hash_t& hash) {
  XXH128_canonical_t bytes;  // the same on every processor
  XXH128_canonicalFromHash(&bytes, hash);
  Checksum checksum;
  static_assert(sizeof bytes == sizeof checksum);
  std::memcpy(checksum.data(), &bytes, sizeof checksum);
  return checksum;
}

}  // namespace

Checksum checksumOf(std::span<const std::byte> bytes) {
  return canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

ChecksumMaker::ChecksumMaker() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(state_.get());
}

void ChecksumMaker::update(std::span<const std::byte> bytes) {
  XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
}

Checksum ChecksumMaker::finish() const { return canonical(XXH3_128bits_digest(state_.get())); }

void ChecksumMaker::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

}  // namespace gpupool::server
