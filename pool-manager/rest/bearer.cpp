#include "pool-manager/rest/bearer.h"

#include <strings.h>

#include "base/log.h"
#include "pool-manager/rest/exchange.h"

namespace gpupool::pool::rest {

Principal principalOf(const std::string& authorization, TokenBook& tokens, FailureLimit& failures,
                      const std::string& peer) {
  constexpr size_t kScheme = 7;
  const char kHint[] =
      "send the header 'Authorization: Bearer TOKEN', with a token that an operator has made";
  if (authorization.size() <= kScheme || ::strncasecmp(authorization.c_str(), "Bearer ", kScheme) != 0)
    refuse({401, "token_missing", "the manager requires a token", kHint});
  if (!failures.allowed(peer, FailureLimit::Clock::now()))
    refuse({429, "too_many_wrong_tokens", "too many wrong tokens came from this address", "wait a minute"});
  const auto bearers = tokens.bearersOf(authorization.substr(kScheme));
  if (bearers.size() == 1) {
    if (const std::string why = tokens.endOf(bearers[0]); !why.empty())
      refuse({401, "token_ended", why, "ask an operator for another one"});
    tokens.used(bearers[0]);
    return bearers[0];
  }
  failures.failed(peer, FailureLimit::Clock::now());
  GPUPOOL_WARNING("%s used %s token over HTTP", peer.c_str(),
                  bearers.empty() ? "a wrong" : "several tenants'");
  if (!bearers.empty())
    refuse({401, "token_ambiguous", "several tenants have this token", "give each tenant its own"});
  refuse({401, "token_wrong", "the manager does not know this token", kHint});
}

}  // namespace gpupool::pool::rest
