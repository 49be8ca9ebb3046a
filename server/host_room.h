#pragma once
// Limits what a session may take of its server's own memory. If a client pinned more than there is, the
// kernel's out-of-memory killer could choose any process.

#include <cstdint>

#include "base/memory_info.h"

namespace gpupool::server {

// The part of a server's memory that stays free for everything else: a sixteenth, at least 256 MiB.
uint64_t hostReserveBytes(uint64_t totalBytes);
// True if `bytes` more leave that reserve, or if the amount of memory is unknown.
bool leavesRoom(const MemoryInfo& memory, uint64_t bytes);
// The same of this machine, now.
bool hostHasRoom(uint64_t bytes);

// If memory runs out nevertheless, the kernel kills a worker before the server, the manager or any other
// service (proc(5), oom_score_adj).
void preferForOutOfMemory();

}  // namespace gpupool::server
