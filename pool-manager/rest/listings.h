#pragma once
// Handlers (routes.h) of what only shows the pool: as `gpupool devices|servers|leases --json` show it to the
// same principal.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> health(const Context& context, const Request& request);
kj::Promise<Answer> listDevices(const Context& context, const Request& request);
kj::Promise<Answer> listServers(const Context& context, const Request& request);
kj::Promise<Answer> listLeases(const Context& context, const Request& request);
kj::Promise<Answer> getLease(const Context& context, const Request& request);
kj::Promise<Answer> events(const Context& context, const Request& request);

// The lease that the path names. Throws a Problem if that is no lease's id.
Id leaseId(const Request& request);
// The same, of a lease that is there and that whoever asks may change.
Id ownLease(const Context& context, const Request& request);
// Why a lease that is not there is not.
[[noreturn]] void refuseUnknown(const Context& context, const Id& id);

}  // namespace gpupool::pool::rest
