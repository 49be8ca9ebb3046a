#pragma once
// What a fuzzer's bytes are cut into. Past the end everything is zero or empty.

#include <sanitizer/asan_interface.h>

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

// May all of it be read? If not, what cannot be is, so that AddressSanitizer says what it is.
inline void touch(const void* data, size_t bytes) {
  if (bytes == 0) return;
  if (void* bad = __asan_region_is_poisoned(const_cast<void*>(data), bytes)) {
    [[maybe_unused]] const char read = *static_cast<const volatile char*>(bad);
  }
  const auto* first = static_cast<const volatile char*>(data);
  for (size_t at = 0; at < bytes; at += 4096) [[maybe_unused]]
    const char read = first[at];  // is it there at all?
  [[maybe_unused]] const char last = first[bytes - 1];
}

}  // namespace gpupool::fuzz
