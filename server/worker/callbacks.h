#pragma once
// Host functions of the client as the driver sees them: a function of ours whose data is the client's id. The
// driver calls it in stream order on a thread of its own; it tells the client and waits for the answer.
// Nothing is kept for one here, so neither streams nor graphs have anything to give back.

#include "server/worker/session.h"

namespace gpupool::server::session_callbacks {

// What to hand to the driver as the function's data. A worker process serves one session: the last one that
// called this is told.
void* dataOf(Session& session, uint64_t callback);
void run(void* data, CUresult status);
void CUDA_CB hostNode(void* data);
// The client's id if the function is ours, else 0.
uint64_t idOf(CUhostFn function, void* data);

}  // namespace gpupool::server::session_callbacks
