#pragma once
// `gpupool-manager init`: a new store, and the pool's first token.

#include "pool-manager/manager_options.h"

namespace gpupool::pool {

// Prints the operator's token as the line of a token file, once. Returns the exit status; throws if there is
// a manager that has the store, or a token in it.
int initStore(const ManagerOptions& options);

}  // namespace gpupool::pool
