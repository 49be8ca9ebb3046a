#include "schema/manager_login.h"

#include <stdexcept>
#include <vector>

#include "base/hmac.h"
#include "schema/fault.h"
#include "schema/protocol.h"
#include "schema/token_proof.h"

namespace gpupool::schema {
namespace {

[[noreturn]] void refuse(const std::string& text, FaultKind kind = FaultKind::token) {
  kj::throwFatalException(faultException(kind, text));
}

capnp::Data::Reader asData(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> view(capnp::Data::Reader from) {
  return {reinterpret_cast<const std::byte*>(from.begin()), from.size()};
}

struct Login {
  Manager::Client manager;
  Credentials credentials;
  std::string address;
  std::optional<Fingerprint> certificate;
  std::byte clientNonce[kNonceBytes];
  std::vector<std::byte> serverNonce;

  LoginFacts facts() const { return {credentials.tenant, clientNonce, serverNonce, certificate}; }
};

kj::Promise<void> prove(Login& login) {
  auto request = login.manager.proveRequest();
  request.setProof(asData(clientProof(login.credentials.token, login.facts())));
  return request.send().then([&login](capnp::Response<Manager::ProveResults>&& answer) {
    const auto expected = managerProof(verifierOf(login.credentials.token), login.facts());
    if (!equalConstantTime(view(answer.getProof()), expected))
      refuse("whoever answers at " + login.address + " does not know the token of tenant '" +
             login.credentials.tenant + "': it is not your pool's manager");
  });
}

}  // namespace

kj::Promise<void> logIn(Manager::Client manager, const ManagerLink& link) {
  auto login =
      kj::heap<Login>(Login{kj::mv(manager), link.credentials, link.address, link.certificate, {}, {}});
  Login& kept = *login;
  randomBytes(kept.clientNonce);
  auto request = kept.manager.loginRequest();
  request.setTenant(kept.credentials.tenant);
  request.setToken(tokenId(kept.credentials.token));
  request.setProtocol(poolProtocol());
  request.setOldest(oldestPoolProtocol());
  request.setClientNonce(asData(kept.clientNonce));
  auto done =
      request.send().then([&kept](capnp::Response<Manager::LoginResults>&& answer) -> kj::Promise<void> {
        const ProtocolRange managers = saidProtocols(answer.getProtocol(), answer.getOldest());
        if (commonProtocol(ownProtocols(), managers) == 0)  // an older one does not look itself
          refuse(loginMismatch(managers, ownProtocols()), FaultKind::version);
        const bool given = !kept.credentials.token.empty();
        if (!answer.getNeeded()) {
          // It would also be what an impostor says.
          if (given && !kept.certificate && !kept.address.starts_with("unix:"))
            refuse("the manager at " + kept.address +
                   " requires no token, so it does not prove that it is yours: give it its tokens, or leave "
                   "--token-file "
                   "out");
          return kj::READY_NOW;
        }
        if (!given)
          refuse("the manager at " + kept.address +
                 " requires a token: name the file that holds yours with --token-file");
        const auto nonce = view(answer.getServerNonce());
        if (nonce.size() != kNonceBytes)
          refuse("the manager at " + kept.address + " sent a malformed challenge");
        kept.serverNonce.assign(nonce.begin(), nonce.end());
        return prove(kept);
      });
  auto answered = done.catch_([&kept](kj::Exception&& error) {
    if (error.getType() == kj::Exception::Type::UNIMPLEMENTED)
      refuse("version mismatch: the manager at " + kept.address +
                 " is of an older gpupool; install the same on both",
             FaultKind::version);
    kj::throwFatalException(kj::mv(error));
  });
  return answered.attach(kj::mv(login));
}

std::string loginMismatch(const ProtocolRange& managers, const ProtocolRange& callers) {
  return protocolMismatch("the pool's manager", managers, "its caller", callers);
}

std::string loginRefusal(const kj::Exception& error) {
  const Fault fault = faultOf(error);
  return fault.kind == FaultKind::token || fault.kind == FaultKind::version ? fault.text : "";
}

}  // namespace gpupool::schema
