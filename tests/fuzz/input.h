#pragma once
// What a fuzzer's bytes are cut into. Past the end everything is zero or empty.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace gpupool::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const std::byte*>(data), size) {}

  template <class T>
  T value() {
    T v{};
    auto bytes = take(sizeof v);
    if (!bytes.empty()) std::memcpy(&v, bytes.data(), bytes.size());
    return v;
  }
  std::span<const std::byte> take(size_t bytes) {
    auto first = rest_.first(std::min(bytes, rest_.size()));
    rest_ = rest_.subspan(first.size());
    return first;
  }
  // A length of two bytes, then as many.
  std::span<const std::byte> blob() { return take(value<uint16_t>()); }
  std::span<const std::byte> all() { return take(rest_.size()); }
  bool empty() const { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

// Not to be optimised away: AddressSanitizer sees that all of it may be read.
inline void touch(const void* data, size_t bytes) {
  const auto* at = static_cast<const volatile unsigned char*>(data);
  unsigned sum = 0;
  for (size_t i = 0; i < bytes; ++i) sum += at[i];
  static volatile unsigned sink;
  sink = sum;
}

}  // namespace gpupool::fuzz
