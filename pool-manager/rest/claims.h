#pragma once
// Handlers (routes.h) of claims (pool-manager/claims.h): what job schedulers need.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> listClaims(const Context& context, const Request& request);
kj::Promise<Answer> createClaim(const Context& context, const Request& request);
kj::Promise<Answer> releaseClaim(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
