#include "pool-manager/rest/tenants.h"

#include <algorithm>

#include "pool-manager/convert.h"
#include "pool-manager/listing_json.h"
#include "schema/administration.capnp.h"

namespace gpupool::pool::rest {
namespace {

auto administration(const Context& context, const Request& request) {
  return context.service.managerFor(request.who).administrationRequest().send().getAdministration();
}

std::string by(const Request& request) { return "REST, from " + request.peer; }

Json tokenJson(const StoredToken& token) {
  return {{"id", token.id},           {"tenant", token.tenant},     {"name", token.name},
          {"role", name(token.role)}, {"createdS", token.createdS}, {"expiresS", token.expiresS},
          {"lastUsedS", token.usedS}, {"revokedS", token.revokedS}, {"createdBy", token.createdBy}};
}

}  // namespace

kj::Promise<Answer> listTokens(const Context& context, const Request& request) {
  return administration(context, request).tokensRequest().send().then([](auto&& response) -> Answer {
    Json list = Json::array();
    for (auto one : response.getTokens()) list.push_back(tokenJson(read(one)));
    return {200, {{"tokens", std::move(list)}}};
  });
}

kj::Promise<Answer> createToken(const Context& context, const Request& request) {
  TokenWish wish;
  wish.tenant = text(request, "tenant");
  wish.name = text(request, "name");
  if (wish.tenant.empty() || wish.name.empty())
    refuse({400, "bad_field", "'tenant' and 'name' are required"});
  const std::string named = text(request, "role");
  const auto role = roleOf(named.empty() ? name(Role::user) : named);
  if (!role) refuse({400, "bad_field", "'role' is not viewer, user, scheduler, server or operator"});
  const auto tokens = context.service.tokens().list();
  const auto nowS = calendarMs() / 1000;
  if (std::any_of(tokens.begin(), tokens.end(), [&](const StoredToken& one) {
        return one.tenant == wish.tenant && one.name == wish.name && one.valid(nowS);
      }))
    refuse({409, "token_exists", "the tenant has a valid token of this name",
            "if its text is lost, revoke it (GET /v1/tokens has its id), and ask again"});
  auto order = administration(context, request).createTokenRequest();
  order.setTenant(wish.tenant);
  order.setName(wish.name);
  order.setRole(wireRole(*role));
  order.setExpiresInS(request.counts.at("expiresInS"));
  order.setBy(by(request));
  return order.send().then([](auto&& response) -> Answer {
    Json json = tokenJson(read(response.getToken()));
    json["token"] = pool::text(response.getSecret());
    json["certificates"] = Json::array();
    for (auto one : response.getCertificates()) json["certificates"].push_back(pool::text(one));
    return {200, std::move(json)};
  });
}

kj::Promise<Answer> revokeToken(const Context& context, const Request& request) {
  const std::string& id = request.named.at("token");
  if (context.service.tokens().find(id) == nullptr)
    refuse({404, "token_unknown", "there is no such token", "GET /v1/tokens lists those that there are"});
  auto order = administration(context, request).revokeTokenRequest();
  order.setId(id);
  order.setBy(by(request));
  return order.send().then(
      [](auto&& response) -> Answer { return {200, tokenJson(read(response.getToken()))}; });
}

kj::Promise<Answer> listQuotas(const Context& context, const Request& request) {
  return administration(context, request).quotasRequest().send().then([](auto&& response) -> Answer {
    Json list = Json::array();
    for (auto one : response.getQuotas()) list.push_back(toJson(read(one)));
    return {200, {{"quotas", std::move(list)}}};
  });
}

kj::Promise<Answer> setQuota(const Context& context, const Request& request) {
  Quota quota{request.named.at("tenant"), request.counts.at("milliDevices"), request.counts.at("memoryBytes"),
              request.counts.at("deviceSeconds")};
  const std::string per = text(request, "per");
  const auto window = windowOf(per.empty() ? name(QuotaWindow::month) : per);
  if (!window) refuse({400, "bad_field", "'per' is not day, week or month"});
  quota.window = *window;
  quota.protectMs = static_cast<uint32_t>(request.counts.at("protectMs"));
  auto order = administration(context, request).setQuotaRequest();
  write(quota, order.initQuota());
  order.setBy(by(request));
  return order.send().then([quota](auto&&) -> Answer { return {200, toJson(quota)}; });
}

kj::Promise<Answer> listTenants(const Context& context, const Request& request) {
  return administration(context, request).tenantsRequest().send().then([](auto&& response) -> Answer {
    Json list = Json::array();
    for (auto one : response.getTenants()) list.push_back(toJson(read(one)));
    return {200, {{"tenants", std::move(list)}}};
  });
}

// Another tenant's is told of as one that is not there.
kj::Promise<Answer> getTenant(const Context& context, const Request& request) {
  return administration(context, request)
      .tenantsRequest()
      .send()
      .then([tenant = request.named.at("tenant")](auto&& response) -> Answer {
        for (auto one : response.getTenants())
          if (const TenantUse use = read(one); use.quota.quota.tenant == tenant) return {200, toJson(use)};
        refuse({404, "tenant_unknown", "there is no such tenant, or it is not yours",
                "GET /v1/tenants lists those that you see"});
      });
}

}  // namespace gpupool::pool::rest
