#include "pool-manager/cli/client_beside.h"

#include <cstdlib>

#include "schema/protocol.h"
#include "schema/rows.h"

namespace gpupool::cli {

// Tool and library are of one package, and so of one build.
pool::WorkerVersion clientBeside() {
  if (std::getenv("GPUPOOL_LIBRARY_DIR") != nullptr) return {};
  return {schema::rowsHash(), schema::release()};
}

}  // namespace gpupool::cli
