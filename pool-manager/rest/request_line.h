#pragma once
// What a request asks for, of its target and its headers. All throw Problems (exchange.h).

#include <string>

#include "pool-manager/rest/exchange.h"

namespace gpupool::pool::rest {

// Sets path and query, of "/v1/leases?limit=10".
void parseTarget(const std::string& target, Request& request);
// An object; of an empty text an empty one.
Json parseBody(const std::string& text);
// A web page in somebody's browser may not use that person's place: requests that a page of another origin
// makes are refused and, where no token would stop them, those by a name that may have been made to point
// here.
void demandSameOrigin(const std::string& origin, const std::string& host, bool tokens);

}  // namespace gpupool::pool::rest
