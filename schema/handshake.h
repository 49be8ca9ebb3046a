#pragma once
// The bytes that holder and server prove to each other when a session is opened (see SessionHello in
// session.capnp).
//
//   proof = HMAC-SHA256(session key of the lease, role ‖ session ‖ epoch ‖ client nonce ‖ server nonce ‖
//   server name)
//
// role: "holder" or "server", 6 bytes. session: high, then low, 8 bytes each, little endian. epoch: 8 bytes,
// little endian. Nonces: 32 bytes each; shorter or longer ones are refused before this is called. The server
// name is ServerInfo.name, as the manager put it into the lease, and ends the input, so no field can run into
// another.

#include <span>
#include <string>
#include <string_view>

#include "base/hmac.h"
#include "schema/id.h"

namespace gpupool::schema {

inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kSessionKeyBytes = 32;
inline constexpr std::string_view kRoleHolder = "holder", kRoleServer = "server";

struct HandshakeFacts {
  Id session;
  uint64_t epoch = 0;
  std::span<const std::byte> clientNonce, serverNonce;
  std::string_view server;
};

inline Digest handshakeProof(std::span<const std::byte> key, std::string_view role,
                             const HandshakeFacts& facts) {
  std::string input(role);
  for (uint64_t number : {facts.session.high, facts.session.low, facts.epoch})
    for (int i = 0; i < 8; ++i) input.push_back(static_cast<char>(number >> (8 * i)));
  for (auto nonce : {facts.clientNonce, facts.serverNonce})
    input.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  input.append(facts.server);
  return hmacSha256(key, std::as_bytes(std::span(input)));
}

}  // namespace gpupool::schema
