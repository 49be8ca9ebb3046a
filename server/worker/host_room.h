#pragma once
// What a session may take of its server's own memory. A client that pins more than there is would not fail
// alone: the kernel would look for somebody to kill.

#include <cstdint>

#include "base/memory_info.h"

namespace gpupool::server {

// Of a server's memory so much stays for everybody else: a sixteenth, at least 256 MiB.
uint64_t hostReserveBytes(uint64_t totalBytes);
// True if `bytes` more leave that reserve; where nothing is told, nothing is decided.
bool leavesRoom(const MemoryInfo& memory, uint64_t bytes);
// The same of this machine, now.
bool hostHasRoom(uint64_t bytes);

// If memory runs out all the same, the kernel takes a worker before the server, the manager or a service of
// somebody else's (proc(5), oom_score_adj).
void preferForOutOfMemory();

}  // namespace gpupool::server
