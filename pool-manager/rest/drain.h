#pragma once
// The handler (routes.h) that takes a server out of service: cordons it, moves its leases to other servers,
// and says what is left there.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> drainServer(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
