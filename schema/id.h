#pragma once
// A 128-bit name, of a lease, a session or an incarnation of a server, as a value. On the wire it is Id128
// (schema/convert.h).

#include <compare>
#include <cstdint>
#include <optional>
#include <string>

namespace gpupool {

struct Id {
  uint64_t high = 0, low = 0;
  auto operator<=>(const Id&) const = default;

  static Id random();
  static std::optional<Id> parse(const std::string& text);  // of text()
  std::string text() const;                                 // 32 hexadecimal digits
};

// As people are shown it: its first 8 digits.
inline std::string shortId(const Id& id) { return id.text().substr(0, 8); }

}  // namespace gpupool
