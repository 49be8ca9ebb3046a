#pragma once
// Handler (routes.h) of who asks: what a page or a script has to know before it offers anything.

#include "pool-manager/rest/routes.h"

namespace gpupool::pool::rest {

kj::Promise<Answer> showSelf(const Context& context, const Request& request);

}  // namespace gpupool::pool::rest
