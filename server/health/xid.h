#pragma once
// Which Xid errors of NVIDIA's driver mean that the GPU, and not a program on it, is broken.
// Source: NVIDIA, "XID Errors" (GPU deployment guides), the column of immediate actions.

#include <cstdint>

namespace gpupool::health {

// What happened, if nothing can be placed on the GPU before it was reset or repaired. Null: the GPU goes on;
// a program caused it (13, 31, 43, 45, 68, 94 ...), or it is a notice.
const char* fatalXid(uint64_t xid);

}  // namespace gpupool::health
