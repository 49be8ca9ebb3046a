#pragma once
// The bytes by which a token's bearer and the manager prove to each other that they know it (Manager.login
// and .prove in pool.capnp), after SCRAM (RFC 5802). The token itself never crosses the wire, a proof is good
// on its connection only, and the manager needs no token to check one: with what it keeps, a TokenVerifier,
// nobody can log in, and from what crosses the wire nothing can be guessed offline. (Who has read both the
// verifier and a login by the token can log in as its bearer.)
//
//   client key = HMAC(token, "gpupool-client")        kept: stored = SHA-256(client key)
//   facts      = client nonce ‖ server nonce ‖ tenant       manager = HMAC(token, "gpupool-manager")
//                [‖ "\n" ‖ fingerprint]
//   client's proof  = client key XOR HMAC(stored, facts)
//   manager's proof = HMAC(manager, facts)
//
// Fingerprint: of the certificate that the connection's TLS shows, at whichever end; none without TLS. Who is
// between the two with another certificate, or ends the TLS himself, gets proofs that are good for nothing.
//
// Nonces: kNonceBytes each, checked before this is called. A tenant's name is a word, so no field can run
// into another. The client proves first. Tokens are random and long: nothing slows their hashing down.

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/fingerprint.h"
#include "schema/handshake.h"

namespace gpupool::schema {

struct LoginFacts {
  std::string_view tenant;
  std::span<const std::byte> clientNonce, serverNonce;
  std::optional<Fingerprint> certificate;
};

struct TokenVerifier {
  Digest stored{}, manager{};
};

inline std::span<const std::byte> asBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline Digest clientKey(std::string_view token) {
  return hmacSha256(asBytes(token), asBytes("gpupool-client"));
}

inline TokenVerifier verifierOf(std::string_view token) {
  return {sha256(clientKey(token)), hmacSha256(asBytes(token), asBytes("gpupool-manager"))};
}

inline Digest signFacts(const Digest& key, const LoginFacts& facts) {
  std::string input;
  for (auto nonce : {facts.clientNonce, facts.serverNonce})
    input.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  input.append(facts.tenant);
  if (facts.certificate)
    input.append("\n").append(reinterpret_cast<const char*>(facts.certificate->data()),
                              facts.certificate->size());
  return hmacSha256(key, asBytes(input));
}

inline Digest masked(Digest key, const Digest& mask) {
  for (size_t i = 0; i < key.size(); ++i) key[i] ^= mask[i];
  return key;
}

inline Digest clientProof(std::string_view token, const LoginFacts& facts) {
  const Digest key = clientKey(token);
  return masked(key, signFacts(sha256(key), facts));
}

inline bool isClientProof(std::span<const std::byte> proof, const TokenVerifier& verifier,
                          const LoginFacts& facts) {
  Digest key{};
  if (proof.size() != key.size()) return false;
  std::copy(proof.begin(), proof.end(), key.begin());
  return equalConstantTime(sha256(masked(key, signFacts(verifier.stored, facts))), verifier.stored);
}

inline Digest managerProof(const TokenVerifier& verifier, const LoginFacts& facts) {
  return signFacts(verifier.manager, facts);
}

}  // namespace gpupool::schema
