#pragma once
// What the pool knows of one tenant, as administration.capnp tells it: for operators, and for the tenant
// itself.

#include <cstdint>
#include <map>
#include <string>

#include "pool-manager/quotas.h"

namespace gpupool::pool {

struct TenantUse {
  QuotaUse quota;                          // the tenant's name; what it may have, and has of that
  uint32_t tokens = 0;                     // that are good now
  std::map<std::string, uint32_t> leases;  // how many are in which state
  uint32_t claims = 0;                     // of these leases
  uint32_t queued = 0;                     // requests in the queue, those to resume too
  double usage = 0;                        // device-seconds, as Usage forgets them
};

}  // namespace gpupool::pool
