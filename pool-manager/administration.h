#pragma once
// Tokens, quotas and tenants over RPC: Administration of administration.capnp. Runs on the service's loop.

#include <functional>

#include "pool-manager/roles.h"
#include "pool-manager/service.h"
#include "schema/administration.capnp.h"

namespace gpupool::pool {

// Whose calls these are: `demand` throws unless the caller may do that, and says who he is; `service` throws
// once that is gone. Both are called as long as `keep` lives.
struct Caller {
  std::function<Principal(Operation)> demand;
  std::function<Service&()> service;
  capnp::Capability::Client keep;
};
schema::Administration::Client administrationFor(Caller caller);

}  // namespace gpupool::pool
