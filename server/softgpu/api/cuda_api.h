#pragma once
// cuda.h with every symbol under its own name (no _v2 macros) and exported. Only files below api/ include it.
#define __CUDA_API_VERSION_INTERNAL
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop
