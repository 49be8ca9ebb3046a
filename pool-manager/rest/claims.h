#pragma once
// Handlers (routes.h) of claims (pool-manager/claims.h): what job schedulers need.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

// What the route's fields ask for; job: empty: no claim.
LeaseRequest leaseWish(const Request& request, const std::string& job);
// A claim as it is listed, with what only the list has.
kj::Promise<Answer> describeClaim(const Context& context, const Request& request, const Id& id);

kj::Promise<Answer> listClaims(const Context& context, const Request& request);
kj::Promise<Answer> createClaim(const Context& context, const Request& request);
kj::Promise<Answer> releaseClaim(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
