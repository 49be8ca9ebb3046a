#pragma once
// The checksum of contents on their way from worker to worker, and in a checkpoint's files: XXH3 of 128 bits
// (xxHash). It tells of bytes that were damaged, at the speed of memory. Against people it is worth nothing,
// and need not be: who can change the bytes can change what stands beside them. Names of code are
// contentDigest (base/content.h), which programs of one tenant share.

#include <array>
#include <cstddef>
#include <memory>
#include <span>

struct XXH3_state_s;

namespace gpupool::server {

using Checksum = std::array<std::byte, 16>;

// Any thread.
Checksum checksumOf(std::span<const std::byte> bytes);

// The same of bytes that are not all there at once, or in one place.
class ChecksumMaker {
 public:
  ChecksumMaker();  // throws std::bad_alloc
  void update(std::span<const std::byte> bytes);
  Checksum finish() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace gpupool::server
