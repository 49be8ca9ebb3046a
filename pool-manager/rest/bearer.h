#pragma once
// Who asks, by the token that a request shows (RFC 6750): one that the manager has made, or one of its token
// file. Unlike over RPC the token itself crosses the wire. One thread.

#include <string>

#include "base/rate_limit.h"
#include "pool-manager/tokens.h"

namespace gpupool::pool::rest {

// authorization: the header's text. peer: whose wrong tokens are counted. Throws a Problem (exchange.h).
Principal principalOf(const std::string& authorization, TokenBook& tokens, FailureLimit& failures,
                      const std::string& peer);

}  // namespace gpupool::pool::rest
