#pragma once
// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), and random bytes from the kernel: all the cryptography
// that the session handshake needs: clients and workers link no TLS library for 32 bytes. Any thread; no
// allocation.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace gpupool {

using Digest = std::array<std::byte, 32>;

class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  Digest finish();  // once

 private:
  void block(const std::byte* data);
  uint32_t state_[8];
  std::byte pending_[64];
  uint64_t total_ = 0;  // bytes so far
};

Digest sha256(std::span<const std::byte> bytes);
Digest hmacSha256(std::span<const std::byte> key, std::span<const std::byte> message);

// Compares in a time that does not depend on where the difference is. Different sizes are unequal.
bool equalConstantTime(std::span<const std::byte> a, std::span<const std::byte> b);

// Fills from getrandom(2), waiting for the kernel's pool where it is not ready yet. Aborts if the kernel
// refuses: there is nothing to continue with.
void randomBytes(std::span<std::byte> bytes);

}  // namespace gpupool
