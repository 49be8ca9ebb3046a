#pragma once
// The worker programs of other builds that a server keeps beside its own (--workers), for clients of those
// builds. Each is asked what it is.

#include <chrono>
#include <string>
#include <vector>

#include "server/front/worker_program.h"
#include "server/worker_interface.h"

namespace gpupool::server {

// What the executable answers to --identify. Throws std::runtime_error, saying why there is none within
// `bound`; the process is gone then in any case. Any thread.
WorkerIdentity identifyWorker(const std::string& path, std::chrono::milliseconds bound);

struct OtherWorker {
  WorkerProgram program;
  WorkerIdentity identity;
};
// Those in the folder that this server can start, by name; the log says of the others why not. Of programs
// with the same rows the first one, and none with `current`, the rows of the server's own. A folder that is
// not there has none. Takes as long as the programs do; any thread.
std::vector<OtherWorker> findWorkers(const std::string& folder, uint64_t current,
                                     std::chrono::milliseconds bound = std::chrono::seconds(10));

}  // namespace gpupool::server
