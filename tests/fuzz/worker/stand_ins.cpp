// In place of server/worker/output.cpp, callbacks.cpp, server/arena_mmap.cpp and server/worker_start.cpp,
// which decode nothing and have to do with the whole process: its standard output, its mmap, host functions
// that are never answered here.
#include "server/arena_mmap.h"
#include "server/worker/callbacks.h"
#include "server/worker/output.h"
#include "server/worker/session.h"
#include "server/worker_process.h"

namespace gpupool::server {

Output::Output() = default;
Output::~Output() = default;
std::string Output::take() { return {}; }
std::string Output::takeErrors() { return {}; }

bool reserveGlobalArena() { return false; }
GlobalArenaUse globalArenaUse() { return {}; }
PlaceGlobals::PlaceGlobals() = default;
PlaceGlobals::~PlaceGlobals() = default;

// No session begins anew here.
CUcontext contextAhead(const Driver&, int) { return nullptr; }

namespace session_callbacks {

void* dataOf(Session&, uint64_t) { return nullptr; }
void run(void*, CUresult) {}
void CUDA_CB hostNode(void*) {}
uint64_t idOf(CUhostFn, void*) { return 0; }

}  // namespace session_callbacks
// No checkpoint is made here.
bool Session::endSpare() { return false; }
bool Session::reclaimSpare() { return false; }

}  // namespace gpupool::server
