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

std::span<const std::byte> Login::begin(const std::string& tenant, std::span<const std::byte> clientNonce) {
  if (proven()) refuseLogin("this connection has proven a token already");
  if (!failures_.allowed(peer_, FailureLimit::Clock::now()))
    refuseLogin("the manager received too many wrong tokens from " + peer_ + "; wait a minute");
  if (clientNonce.size() != schema::kNonceBytes || tenant.size() > kMostTenantBytes)
    refuseLogin("malformed login request");
  begun_ = true;
  asked_ = tenant;
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
  const auto known = tokens_.find(asked_);
  std::string token(32, '\0');  // of nobody: an unknown tenant's proof is wrong like any other
  randomBytes(std::as_writable_bytes(std::span(token)));
  if (known != tokens_.end()) token = known->second;
  const schema::LoginFacts facts{asked_, clientNonce_, serverNonce_};
  if (!equalConstantTime(proof, schema::tokenProof(token, schema::kRoleClient, facts))) {
    failures_.failed(peer_, FailureLimit::Clock::now());
    const std::string name = printable(asked_, kMostTenantBytes);
    GPUPOOL_WARNING("%s used a wrong token of tenant '%s'", peer_.c_str(), name.c_str());
    refuseLogin("the manager refuses the token of tenant '" + name +
                "': it has another one for this tenant, or none; check the token file");
  }
  tenant_ = asked_;
  unproven_.reset();
  return schema::tokenProof(token, schema::kRoleManager, facts);
}

}  // namespace gpupool::pool
