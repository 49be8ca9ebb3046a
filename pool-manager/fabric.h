#pragma once
// Checks a server's report of its fabric.

#include "pool-manager/model.h"
#include "schema/fabric.h"

namespace gpupool::pool {

// Texts are cut and made printable, values this program does not know become "unknown". Throws
// std::invalid_argument, before it has copied more than a report may hold, when something has more entries
// than that. gpus: how many devices the server has; each RDMA device lists its distance to all of them or to
// none.
fabric::Fabric read(schema::Fabric::Reader from, size_t gpus);

}  // namespace gpupool::pool
