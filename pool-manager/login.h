#pragma once
// The login of a connection from the network or from another user: it has to prove a token, and then belongs
// to the token's tenant. The steps are Manager.login and .prove of pool.capnp. One thread; tokens and
// failures outlive it.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fingerprint.h"
#include "base/rate_limit.h"
#include "pool-manager/tokens.h"
#include "schema/fault.h"
#include "schema/handshake.h"

namespace gpupool::pool {

// Throws an RPC error that schema::faultOf knows; `text` is one line for the user.
[[noreturn]] void refuseLogin(const std::string& text, schema::FaultKind kind = schema::FaultKind::token);

class Login {
 public:
  // peer: who is counted for wrong tokens. unproven: released when a token is proven. certificate: that was
  // shown to the peer; none: the connection has no TLS.
  Login(TokenBook& tokens, FailureLimit& failures, std::string peer, std::shared_ptr<void> unproven,
        const std::optional<Fingerprint>& certificate = {})
      : tokens_(tokens),
        failures_(failures),
        peer_(std::move(peer)),
        unproven_(std::move(unproven)),
        certificate_(certificate) {}

  // Both throw as refuseLogin. begin returns the challenge, prove the manager's own proof. token: as
  // TokenBook::find.
  std::span<const std::byte> begin(const std::string& tenant, std::span<const std::byte> clientNonce,
                                   const std::string& token = "");
  Digest prove(std::span<const std::byte> proof);

  bool proven() const { return who_.has_value(); }
  const Principal& who() const { return *who_; }  // that is proven

 private:
  TokenBook& tokens_;
  FailureLimit& failures_;
  std::string peer_;
  std::shared_ptr<void> unproven_;
  std::optional<Fingerprint> certificate_;
  std::string askedTenant_, askedToken_;
  std::optional<Principal> who_;
  std::vector<std::byte> clientNonce_;
  std::byte serverNonce_[schema::kNonceBytes] = {};
  bool begun_ = false;
};

}  // namespace gpupool::pool
