#pragma once
// A server's RDMA devices, for `gpupool servers -v`.

#include "pool-manager/cli/manager_query.h"

namespace gpupool::cli {

void printFabric(const ListedServer& server);

}  // namespace gpupool::cli
