#pragma once
// Tests (GPUPOOL_DISTURB=suspend:SEED at the server): suspends a session in the middle of its work and brings
// it back, before frames that the seed chooses. A program's results must not show it.

#include <cstdint>
#include <functional>

#include "server/worker/session.h"
#include "server/worker/suspender.h"

namespace gpupool::server {

// Before session.run(). ask: asks the server for one suspension and the resumption behind it. The executor
// waits for both, with no frame under way; a suspension that the server or the device refuses is passed over.
void disturb(Session& session, Suspender& suspender, uint64_t seed, std::function<void()> ask);

}  // namespace gpupool::server
