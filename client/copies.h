#pragma once
// Copies by what the two ends are. Device memory and arena memory (pinned, managed) have one address on both
// sides; ordinary memory goes through staging slots. Used by the copy calls and by graphs.

#include "client/streams.h"
#include "schema/cuda.h"

namespace gpupool::client {

enum class End : uint8_t { host, arena, device, unknown };
// What [address, + bytes) is. unknown: nothing of ours, but no host memory either is claimed: a device
// address that is none.
End endOf(uint64_t address, size_t bytes);

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
