#include "pool-manager/login.h"

#include "base/log.h"
#include "pool-manager/model.h"
#include "pool-manager/rpc.h"
#include "schema/token_proof.h"

namespace gpupool::pool {

void refuseLogin(const std::string& text, schema::FaultKind kind) {
  // schema/manager_login.cpp takes the mark off again.
  kj::throwFatalException(schema::faultException(kind, text));
}

std::span<const std::byte> Login::begin(const std::string& tenant, std::span<const std::byte> clientNonce,
                                        const std::string& token) {
  if (proven()) refuseLogin("this connection has proven a token already");
  if (!failures_.allowed(peer_, FailureLimit::Clock::now()))
    refuseLogin("the manager received too many wrong tokens from " + peer_ + "; wait a minute");
  if (clientNonce.size() != schema::kNonceBytes || tenant.size() > kMostTenantBytes ||
      token.size() > kMostTenantBytes)
    refuseLogin("malformed login request");
  begun_ = true;
  askedTenant_ = tenant;
  askedToken_ = token;
  clientNonce_.assign(clientNonce.begin(), clientNonce.end());
  randomBytes(serverNonce_);
  return serverNonce_;
}

Digest Login::prove(std::span<const std::byte> proof) {
  if (!begun_) refuseLogin("a proof was sent without a login before it");
  begun_ = false;
  // Asked again: many connections may have begun before the first of them failed.
  if (!failures_.allowed(peer_, FailureLimit::Clock::now()))
    refuseLogin("the manager received too many wrong tokens from " + peer_ + "; wait a minute");
  const auto known = tokens_.find(askedToken_, askedTenant_);
  schema::TokenVerifier verifier;  // of nobody: an unknown token's proof is wrong like any other
  randomBytes(verifier.stored);
  if (known) verifier = known->verifier;
  const schema::LoginFacts facts{askedTenant_, clientNonce_, serverNonce_, certificate_};
  const std::string name = printable(askedTenant_, kMostTenantBytes);
  if (!schema::isClientProof(proof, verifier, facts)) {
    failures_.failed(peer_, FailureLimit::Clock::now());
    GPUPOOL_WARNING("%s used a wrong token of tenant '%s'", peer_.c_str(), name.c_str());
    refuseLogin("the manager refuses the token of tenant '" + name +
                "': it has another one for this tenant, or none; check the token file" +
                (certificate_ ? " (or somebody between you and the manager ends the TLS)" : ""));
  }
  // What follows is told only to who knows the token.
  if (known->who.tenant != askedTenant_)
    refuseLogin("this token is tenant '" + known->who.tenant + "'s, and not '" + name +
                "'s: put that name before it in the token file");
  if (const std::string why = tokens_.endOf(known->who); !why.empty())
    refuseLogin("the manager refuses the token of tenant '" + name + "': " + why +
                "; ask an operator for another one");
  who_ = known->who;
  tokens_.used(*who_);
  unproven_.reset();
  return schema::managerProof(verifier, facts);
}

}  // namespace gpupool::pool
