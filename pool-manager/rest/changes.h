#pragma once
// Handlers (routes.h) of what changes the pool. Each may be repeated: what is so already is answered as if it
// had just been done. What takes longer than a proxy waits is answered with status 202, and goes on.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> releaseLease(const Context& context, const Request& request);
kj::Promise<Answer> suspendLease(const Context& context, const Request& request);
kj::Promise<Answer> resumeLease(const Context& context, const Request& request);
kj::Promise<Answer> holdLease(const Context& context, const Request& request);
kj::Promise<Answer> restoreLease(const Context& context, const Request& request);
kj::Promise<Answer> checkpointLease(const Context& context, const Request& request);
kj::Promise<Answer> migrateLease(const Context& context, const Request& request);
kj::Promise<Answer> cordonServer(const Context& context, const Request& request);
kj::Promise<Answer> drainServer(const Context& context, const Request& request);
kj::Promise<Answer> uncordonServer(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
