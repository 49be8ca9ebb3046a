#pragma once
// Strings as template arguments, and the compile-time hash that names a call on the wire.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gpupool::schema {

template <size_t N>
struct Name {
  char text[N] = {};
  consteval Name(const char (&literal)[N]) { std::copy_n(literal, N, text); }
  constexpr std::string_view view() const { return {text, N - 1}; }
};
template <size_t N, size_t M>
constexpr bool operator==(const Name<N>& a, const Name<M>& b) {
  return a.view() == b.view();
}

// FNV-1a. 32 bits name a call; 64 bits fingerprint all rows.
constexpr uint32_t fnv32(std::string_view text) {
  uint32_t hash = 2166136261u;
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}
constexpr uint64_t fnv64(std::string_view text, uint64_t hash = 14695981039346656037ull) {
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace gpupool::schema
