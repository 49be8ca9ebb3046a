#pragma once
// What is known of one piece of code without running it; of symbols.cpp and its two readers.

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "server/fatbin/symbols.h"

namespace gpupool::fatbin {

struct Contents {
  std::vector<Symbol> symbols;
  bool allocates = false;
  bool runtime = false;  // it is NVIDIA's device runtime library, for the calls of cuda* in kernels
};

// Each adds to `contents`. False: damaged, or not what nvcc writes.
bool readCubin(std::span<const std::byte> code, Contents& contents);
bool readPtx(std::string_view text, Contents& contents);

inline constexpr std::string_view kRuntimeMalloc = "__cudaCDP2Malloc";
// Kernels reach the heap by functions of these names, in PTX and machine code alike. The last two are of the
// device runtime library.
inline constexpr std::string_view kHeapFunctions[] = {"malloc", "free", "__cuda_syscall_aligned_malloc",
                                                      "cudaMalloc", "__cudaCDP2Malloc"};

}  // namespace gpupool::fatbin
