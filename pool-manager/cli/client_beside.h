#pragma once
#include "pool-manager/model.h"

namespace gpupool::cli {

// The library that `gpupool run` gives its programs. Unknown where GPUPOOL_LIBRARY_DIR names its folder: then
// the manager learns it from the holder, when a program has opened a session.
pool::WorkerVersion clientBeside();

}  // namespace gpupool::cli
