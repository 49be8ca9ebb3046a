#include "pool-manager/administration.h"

#include "base/log.h"
#include "pool-manager/convert.h"
#include "pool-manager/service_calls.h"
#include "pool-manager/stored.h"

namespace gpupool::pool {
namespace {

class Administration final : public schema::Administration::Server {
 public:
  explicit Administration(Caller caller) : caller_(std::move(caller)) {}

 protected:
  kj::Promise<void> createToken(CreateTokenContext context) override {
    const Principal who = caller_.demand(Operation::tokens);
    Service& service = caller_.service();
    if (who.open && !service.tokens().demanded())
      kj::throwFatalException(rpcError(kj::Exception::Type::FAILED,
                                       "this manager demands no tokens yet: its own user makes the first "
                                       "one, on its machine over its Unix "
                                       "socket, or by `gpupool-manager init`"));
    const auto params = context.getParams();
    const std::string by = who.saying(text(params.getBy()));
    const bool first = !service.tokens().demanded();
    if (first) guarded([&] { service.guardTokens(); });
    Stored stored;
    auto made = std::make_shared<MadeToken>();
    guarded([&] {
      const TokenWish wish{text(params.getTenant()), text(params.getName()), readRole(params.getRole()),
                           params.getExpiresInS(), by};
      service.tokens().create(wish, by,
                              [made, done = stored.done()](const MadeToken& token, const std::string& why) {
                                *made = token;
                                done(why);
                              });
    });
    return kj::mv(stored.promise).then([this, context, made, first]() mutable {
      if (first) caller_.service().endOpenConnections();
      GPUPOOL_INFO("token %s is made: tenant %s, %s", made->token.id.c_str(), made->token.tenant.c_str(),
                   name(made->token.role));
      write(made->token, context.getResults().initToken());
      context.getResults().setSecret(made->text);
      const auto certificates = caller_.service().certificates();
      auto known = context.getResults().initCertificates(static_cast<unsigned>(certificates.size()));
      for (unsigned i = 0; i < known.size(); ++i) known.set(i, fingerprintText(certificates[i]));
    });
  }

  kj::Promise<void> tokens(TokensContext context) override {
    caller_.demand(Operation::tokens);
    const auto tokens = caller_.service().tokens().list();
    auto list = context.getResults().initTokens(static_cast<unsigned>(tokens.size()));
    for (unsigned i = 0; i < list.size(); ++i) write(tokens[i], list[i]);
    return kj::READY_NOW;
  }

  kj::Promise<void> revokeToken(RevokeTokenContext context) override {
    const Principal who = caller_.demand(Operation::tokens);
    const std::string id = text(context.getParams().getId());
    Stored stored;
    guarded([&] {
      caller_.service().tokens().revoke(id, who.saying(text(context.getParams().getBy())), stored.done());
    });
    caller_.service().endConnections(id);
    GPUPOOL_INFO("token %s is revoked", id.c_str());
    return kj::mv(stored.promise).then([this, context, id]() mutable {
      if (const StoredToken* token = caller_.service().tokens().find(id))
        write(*token, context.getResults().initToken());
    });
  }

  kj::Promise<void> setQuota(SetQuotaContext context) override {
    const Principal who = caller_.demand(Operation::setQuota);
    const auto params = context.getParams();
    Stored stored;
    guarded([&] {
      caller_.service().pool().setQuota(who, read(params.getQuota()), text(params.getBy()), stored.done());
    });
    return kj::mv(stored.promise);
  }

  kj::Promise<void> quotas(QuotasContext context) override {
    const Principal who = caller_.demand(Operation::seeQuotas);
    const auto uses = caller_.service().pool().quotas(who);
    auto list = context.getResults().initQuotas(static_cast<unsigned>(uses.size()));
    for (unsigned i = 0; i < list.size(); ++i) write(uses[i], list[i]);
    return kj::READY_NOW;
  }

  kj::Promise<void> tenants(TenantsContext context) override {
    const Principal who = caller_.demand(Operation::seeTenants);
    Service& service = caller_.service();
    const auto uses = service.pool().tenants(who, service.tokens().validByTenant(), service.now());
    auto list = context.getResults().initTenants(static_cast<unsigned>(uses.size()));
    for (unsigned i = 0; i < list.size(); ++i) write(uses[i], list[i]);
    return kj::READY_NOW;
  }

 private:
  Caller caller_;
};

}  // namespace

schema::Administration::Client administrationFor(Caller caller) {
  return kj::heap<Administration>(std::move(caller));
}

}  // namespace gpupool::pool
