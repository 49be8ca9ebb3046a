#pragma once
// Copies by what the two ends are. Device memory and arena memory (pinned, managed) have one address on both
// sides; ordinary memory goes through staging slots.

#include "client/memory/ends.h"
#include "client/streams.h"

namespace gpupool::client {

enum class Timing : uint8_t {
  sync,   // as cuMemcpyHtoD: the stream's order, and the caller waits where CUDA waits
  async,  // as cuMemcpyHtoDAsync
};

// One-dimensional; the ends are given as declared by the call, `host` meaning "a host pointer, pinned or
// not".
CUresult copyLinear(const StreamRef& ref, uint64_t to, End toEnd, uint64_t from, End fromEnd, size_t bytes,
                    Timing timing);
// Two- and three-dimensional, arrays included. Memory types may be UNIFIED.
CUresult copyVolume(const StreamRef& ref, CUDA_MEMCPY3D_v2 copy, Timing timing);

}  // namespace gpupool::client
