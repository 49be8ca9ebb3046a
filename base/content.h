#pragma once
// A digest that names a content: code images of hundreds of megabytes are named at every start of a process,
// so the hash must be cheap and still resist collisions (programs of one tenant share a cache and need not
// trust one another). Up to kPart bytes it is their SHA-256; beyond, the SHA-256 of the parts' SHA-256, so
// that several threads can share the work. Two contents of one length have one digest only if they are the
// same.

#include <memory>

#include "base/hmac.h"

namespace gpupool {

inline constexpr size_t kContentPart = size_t{1} << 20;

// Of large contents on up to four threads of its own, with all signals blocked. Any thread.
Digest contentDigest(std::span<const std::byte> bytes);

// The same of bytes that arrive in pieces. One thread at a time.
class ContentHash {
 public:
  void update(std::span<const std::byte> bytes);
  Digest finish();  // once

 private:
  Sha256 part_, parts_;
  size_t filled_ = 0;  // bytes of the part under way
  bool many_ = false;  // a part was finished
};

}  // namespace gpupool
