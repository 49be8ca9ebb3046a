#pragma once
// The OpenAPI 3.1 document of the REST interface, made of the routes (routes.h).

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> openapi(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
