#pragma once
// A server's RDMA devices for `gpupool servers -v` and `--json`.

#include <nlohmann/json_fwd.hpp>

#include "pool-manager/cli/manager_query.h"

namespace gpupool::cli {

void printFabric(const ListedServer& server);
nlohmann::json fabricJson(const fabric::Fabric& fabric);

}  // namespace gpupool::cli
