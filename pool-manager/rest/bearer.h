#pragma once
// Who asks, by the token that a request shows (RFC 6750): the tokens are those of the manager's token file.
// Unlike over RPC the token itself crosses the wire, and there is no TLS yet. One thread.

#include <string>

#include "base/rate_limit.h"
#include "base/tokens.h"
#include "pool-manager/principal.h"

namespace gpupool::pool::rest {

// The tenant whose token that is. authorization: the header's text. peer: whose wrong tokens are counted.
// Throws a Problem (exchange.h). Takes a time that does not depend on the token, only on how many there are.
Principal principalOf(const std::string& authorization, const Tokens& tokens, FailureLimit& failures,
                      const std::string& peer);

}  // namespace gpupool::pool::rest
