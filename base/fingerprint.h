#pragma once
// Certificates by their fingerprint, the SHA-256 of the certificate: "sha256:" and 64 hexadecimal digits, or
// as `openssl x509 -noout -fingerprint -sha256` prints them.

#include <optional>
#include <string>

#include "base/hmac.h"

namespace gpupool {

using Fingerprint = Digest;

std::string fingerprintText(const Fingerprint& fingerprint);  // of the first form
std::optional<Fingerprint> parseFingerprint(const std::string& text);

}  // namespace gpupool
