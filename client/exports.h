#pragma once
// The library's own export list, as the lookup by name sees it. Defined by client/exports.cpp.

#include <span>

namespace gpupool::client {

struct Export {
  const char* name;
  void* address;
  bool supported;  // false: logs its name once and returns CUDA_ERROR_NOT_SUPPORTED
};

// Sorted by name in byte order, immutable, alive for ever. Any thread, also before cuInit.
std::span<const Export> exports();

}  // namespace gpupool::client
