#pragma once
// What a CUDA array's format says of its size. No state, any thread.

#include <cstddef>

#include "schema/cuda.h"

namespace gpupool::schema {

// Bytes of an element with that many channels. 0: a format whose elements do not lie one by one
// (block-compressed ones, video), or one that is not known.
size_t arrayElementBytes(CUarray_format format, unsigned channels);

}  // namespace gpupool::schema
