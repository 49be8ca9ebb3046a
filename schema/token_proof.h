#pragma once
// The bytes by which tenant and manager prove to each other that they know the tenant's token (Manager.login
// and .prove in pool.capnp). The token itself never crosses the wire, and a proof is good on its connection
// only.
//
//   proof = HMAC-SHA256(token, role ‖ 0 ‖ client nonce ‖ server nonce ‖ tenant)
//
// role: "gpupool-client" or "gpupool-manager". Nonces: kNonceBytes each, checked before this is called. The
// tenant's name ends the input, so no field can run into another. The client proves first: who only connects
// learns nothing that a token could be guessed from offline.

#include <span>
#include <string>
#include <string_view>

#include "base/hmac.h"
#include "schema/handshake.h"

namespace gpupool::schema {

inline constexpr std::string_view kRoleClient = "gpupool-client", kRoleManager = "gpupool-manager";

struct LoginFacts {
  std::string_view tenant;
  std::span<const std::byte> clientNonce, serverNonce;
};

inline Digest tokenProof(std::string_view token, std::string_view role, const LoginFacts& facts) {
  std::string input(role);
  input.push_back('\0');
  for (auto nonce : {facts.clientNonce, facts.serverNonce})
    input.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  input.append(facts.tenant);
  return hmacSha256(std::as_bytes(std::span(token)), std::as_bytes(std::span(input)));
}

}  // namespace gpupool::schema
