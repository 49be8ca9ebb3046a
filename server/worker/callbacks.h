#pragma once
// Host functions of the client as the driver sees them: a function of ours with {session, id}. The driver
// calls it in stream order on its own thread; it tells the client and waits for the answer.

#include "server/worker/session.h"

namespace gpupool::server::session_callbacks {

// Lives until the session ends: a graph may run it any number of times.
void* make(Session& session, uint64_t callback);
void run(void* data, CUresult status);
void CUDA_CB hostNode(void* data);
// The client's id if `params` is a host function of ours, else 0.
uint64_t idOf(CUhostFn function, void* data);

}  // namespace gpupool::server::session_callbacks
