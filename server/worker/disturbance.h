#pragma once
// Tests (GPUPOOL_DISTURB=suspend:SEED, move:SEED, kill:SEED, begin:SEED or server:SEED at the
// server): suspends a session
// in the middle of its work and brings it back, moves it to another worker, or kills its worker, and then its
// server, at frames that the seed chooses. A program's results must not show it.

#include <cstdint>
#include <functional>

#include "server/worker/session.h"
#include "server/worker/suspender.h"

namespace gpupool::server {

// Before session.run(). ask: asks the server for one suspension and the resumption behind it, or for a move.
// The executor waits for a suspension, with no frame under way; a move needs the frames that follow, until
// the client has stopped. What the server or the device refuses is passed over.
// anywhere: a session's first move, behind which it may be another kind of session, comes at any of hundreds
// of frames.
void disturb(Session& session, Suspender& suspender, uint64_t seed, bool moves, bool anywhere,
             std::function<void()> ask);

// Of a protected session: asks for a checkpoint, waits until the server keeps it, serves some more frames and
// ends this process by SIGKILL; in at most two of a session's workers.
void disturbByDeath(Session& session, Suspender& suspender, uint64_t seed, std::function<void()> ask);

// Likewise without any checkpoint: serves some frames, and ends this process by SIGKILL.
void disturbBeginning(Session& session, uint64_t seed);

}  // namespace gpupool::server
