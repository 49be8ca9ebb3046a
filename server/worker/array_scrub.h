#pragma once
// Clears fresh arrays: the driver hands out memory with the bytes of whoever had it last, and that may have
// been another tenant. No state; the calling thread's context is the array's.

#include "server/driver.h"

namespace gpupool::server {

// CUDA_ERROR_NOT_SUPPORTED: an array of this format cannot be cleared, and so must not be handed out.
CUresult clearArray(const Driver& driver, CUarray array);
// All levels.
CUresult clearMipmap(const Driver& driver, CUmipmappedArray mipmap, unsigned levels);

}  // namespace gpupool::server
