#pragma once
// The web page (pool-manager/web): files inside the manager, answered at `/` and below `/web/`, to GET and
// HEAD, without a token. They say nothing of the pool: the page asks the routes of /v1/ with the token that
// its reader types in.

#include "pool-manager/rest/exchange.h"

namespace gpupool::pool::rest {

// Whether the request's path is one of the page's, whatever its method.
bool isOfWebPage(const Request& request);
// Of such a request. Throws a Problem if it is for another method.
Answer webFile(const Request& request);

}  // namespace gpupool::pool::rest
