#include "pool-manager/rest/bearer.h"

#include <strings.h>

#include "base/hmac.h"
#include "base/log.h"
#include "pool-manager/rest/exchange.h"

namespace gpupool::pool::rest {
namespace {

// Digests of one size are compared, by a key that nobody knows.
Digest digestOf(const std::string& token) {
  static const Digest key = [] {
    Digest random;
    randomBytes(random);
    return random;
  }();
  return hmacSha256(key, std::as_bytes(std::span(token)));
}

}  // namespace

Principal principalOf(const std::string& authorization, const Tokens& tokens, FailureLimit& failures,
                      const std::string& peer) {
  constexpr size_t kScheme = 7;
  const char kHint[] =
      "send the header 'Authorization: Bearer TOKEN', with a token of the manager's token file";
  if (authorization.size() <= kScheme || ::strncasecmp(authorization.c_str(), "Bearer ", kScheme) != 0)
    refuse({401, "token_missing", "the manager requires a token", kHint});
  if (!failures.allowed(peer, FailureLimit::Clock::now()))
    refuse({429, "too_many_wrong_tokens", "too many wrong tokens came from this address", "wait a minute"});
  const Digest shown = digestOf(authorization.substr(kScheme));
  std::string tenant;
  unsigned found = 0;
  for (const auto& [name, token] : tokens)
    if (equalConstantTime(shown, digestOf(token))) tenant = name, ++found;
  if (found == 1) return {tenant == kServersTenant ? Principal::Role::server : Principal::Role::user, tenant};
  failures.failed(peer, FailureLimit::Clock::now());
  GPUPOOL_WARNING("%s used %s token over HTTP", peer.c_str(), found == 0 ? "a wrong" : "several tenants'");
  if (found > 1)
    refuse({401, "token_ambiguous", "several tenants have this token", "give each tenant its own"});
  refuse({401, "token_wrong", "the manager does not know this token", kHint});
}

}  // namespace gpupool::pool::rest
