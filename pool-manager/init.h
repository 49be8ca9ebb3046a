#pragma once
// `gpupool-manager init`: a new store, its certificate, and the pool's first token.

#include "pool-manager/manager_options.h"

namespace gpupool::pool {

// Prints the operator's token file, once. Returns the exit status; throws if there is
// a manager that has the store, or a token in it.
int initStore(const ManagerOptions& options);
// `gpupool-manager certificate`: makes the certificate if there is none, and prints its line for token files.
int printCertificate(const ManagerOptions& options);

}  // namespace gpupool::pool
