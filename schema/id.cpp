#include "schema/id.h"

#include <cstdio>
#include <span>

#include "base/hmac.h"

namespace gpupool {

Id Id::random() {
  Id id;
  randomBytes(std::as_writable_bytes(std::span(&id, 1)));
  return id;
}

std::optional<Id> Id::parse(const std::string& text) {
  if (text.size() != 32 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return std::nullopt;
  return Id{std::stoull(text.substr(0, 16), nullptr, 16), std::stoull(text.substr(16), nullptr, 16)};
}

std::string Id::text() const {
  char hex[33];
  std::snprintf(hex, sizeof hex, "%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
  return hex;
}

}  // namespace gpupool
