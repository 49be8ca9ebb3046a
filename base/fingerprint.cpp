#include "base/fingerprint.h"

#include <cctype>
#include <string_view>

namespace gpupool {
namespace {

constexpr std::string_view kDigits = "0123456789abcdef",
                           kHead = "sha256:", kOpensslHead = "sha256 Fingerprint=";

}  // namespace

std::string fingerprintText(const Fingerprint& fingerprint) {
  std::string text(kHead);
  for (const std::byte one : fingerprint)
    for (const unsigned shift : {4U, 0U}) text += kDigits[std::to_integer<unsigned>(one >> shift) & 15U];
  return text;
}

std::optional<Fingerprint> parseFingerprint(const std::string& text) {
  const size_t head = text.starts_with(kHead)          ? kHead.size()
                      : text.starts_with(kOpensslHead) ? kOpensslHead.size()
                                                       : 0;
  if (head == 0) return std::nullopt;
  Fingerprint found{};
  size_t digits = 0;
  for (const char c : text.substr(head)) {
    if (c == ':') continue;
    const size_t value = kDigits.find(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
    if (value == std::string_view::npos || digits == 2 * found.size()) return std::nullopt;
    found[digits / 2] = found[digits / 2] << 4 | static_cast<std::byte>(value);
    ++digits;
  }
  return digits == 2 * found.size() ? std::optional(found) : std::nullopt;
}

}  // namespace gpupool
