#pragma once
// Handlers (routes.h) of tokens, quotas and tenants.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> listTokens(const Context& context, const Request& request);
kj::Promise<Answer> createToken(const Context& context, const Request& request);
kj::Promise<Answer> revokeToken(const Context& context, const Request& request);
kj::Promise<Answer> listQuotas(const Context& context, const Request& request);
kj::Promise<Answer> setQuota(const Context& context, const Request& request);
kj::Promise<Answer> listTenants(const Context& context, const Request& request);
kj::Promise<Answer> getTenant(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
