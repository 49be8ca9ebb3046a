#pragma once
// The pool's figures in Prometheus' text form 0.0.4, at /metrics. A pass over servers and leases, each once.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> metrics(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
