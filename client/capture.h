#pragma once
// Captures as the application's side of them: who began one, in which mode, which streams and events belong
// to it, and what it forbids (docs/design.md, "Which calls wait"). The worker begins every capture relaxed,
// so everything a mode forbids is refused here.
//
// A refusal of an unsafe call also invalidates the captures in its way, as natively: their streams then
// answer CUDA_ERROR_STREAM_CAPTURE_INVALIDATED until cuStreamEndCapture. Threads: any; one mutex, never held
// across the wire. Without an active capture every function here is one relaxed load.

#include <memory>

#include "client/streams.h"

namespace gpupool::client {

// What a graph keeps alive: memory its nodes use, user objects. Released when the last graph and executable
// graph that hold it are gone.
struct Hold;
using GraphHold = std::shared_ptr<Hold>;

namespace capture {

CUresult forbidsSlow();
CUresult conflictSlow(Stream& stream);
CUresult contextConflictSlow(CUcontext context);
CUresult legacyConflictSlow(CUcontext context);

}  // namespace capture

// For calls that capture modes forbid (allocation, release, synchronisation, queries): CUDA_SUCCESS, or
// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED for this thread.
inline CUresult captureForbids() {
  return Session::get().capturing() ? capture::forbidsSlow() : CUDA_SUCCESS;
}
// For calls that synchronise or query `ref`: never allowed while it captures, whatever the mode.
inline CUresult captureConflict(const StreamRef& ref) {
  if (!Session::get().capturing()) return CUDA_SUCCESS;
  if (ref.stream->capturing.load()) return capture::conflictSlow(*ref.stream);
  return ref.wire == nullptr ? capture::legacyConflictSlow(ref.context) : CUDA_SUCCESS;
}
// The same for a whole context.
inline CUresult captureConflict(CUcontext context) {
  return Session::get().capturing() ? capture::contextConflictSlow(context) : CUDA_SUCCESS;
}
// CUDA_ERROR_STREAM_CAPTURE_INVALIDATED for work in a stream whose capture is over but not ended.
CUresult captureAccepts(Stream& stream);

// An event was recorded in the capturing `stream`, or is asked about.
void captureRecorded(Event& event, Stream& stream);
CUresult captureEventConflict(Event& event);
// `stream` waited for a captured event: it joins that capture if it is active.
void captureJoined(const StreamRef& ref, Event& event);
// The stream is being destroyed: a capture that began there ends.
void captureDropped(Stream& stream);
// The graph under construction in `stream` keeps `hold`.
void captureHolds(Stream& stream, GraphHold hold);

}  // namespace gpupool::client
