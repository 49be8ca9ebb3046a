#pragma once
// The page of the client's machine, and rounding to it.

#include <cstddef>

namespace gpupool::client {

inline constexpr size_t kPage = 4096;

// bytes < SIZE_MAX - unit.
constexpr size_t roundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace gpupool::client
