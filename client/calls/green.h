#pragma once
// Green contexts: parts of a device's multiprocessors. A green context has no context of its own in the
// worker, only streams: its CUcontext (cuCtxFromGreenCtx) stands for the primary context, in all but the
// streams of who has it current. Its default stream is a stream that waits for no other one; streams that
// wait for it do not exist (cuStreamCreate without CU_STREAM_NON_BLOCKING is refused there).
//
// Threads: any.

#include "client/streams.h"

namespace gpupool::client {

// Behind a CUgreenCtx. Never freed, as contexts are not: a dead handle stays recognisable.
struct GreenContext {
  explicit GreenContext(CUdevice device) : device(device) {}
  const CUdevice device;
  Context* context = nullptr;           // what cuCtxFromGreenCtx gives: its life and its id are there
  std::atomic<bool> retains{false};     // the primary context
  std::atomic<CUstream> gate{nullptr};  // new streams come behind it (calls/context_events.h)
};

// A stream of the green context. CUDA_ERROR_CONTEXT_IS_DESTROYED, ..._INVALID_CONTEXT: it is gone, or none.
CUresult makeGreenStream(CUgreenCtx green, unsigned flags, int priority, CUstream& out);
// What cuCtxFromGreenCtx gives for it, dead or alive; null: it is none.
CUcontext contextOf(CUgreenCtx green);
// The green context of that handle. CUDA_ERROR_INVALID_CONTEXT: there is none, and `out` is null;
// CUDA_ERROR_CONTEXT_IS_DESTROYED: it is gone.
CUresult findGreen(CUgreenCtx handle, GreenContext*& out);
// Those of the device end: its primary context does.
void endGreenContexts(CUdevice device);

}  // namespace gpupool::client
