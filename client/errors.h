#pragma once
// cuGetErrorName and cuGetErrorString, answered from a table of cuda.h's codes. Any thread, at any time, also
// before cuInit and in a forked child. A code that is none: CUDA_ERROR_INVALID_VALUE, and null as the text.

#include <cuda.h>

namespace gpupool::client {

CUresult errorName(CUresult error, const char** text);
CUresult errorString(CUresult error, const char** text);
// The name for log lines; "unknown error code" instead of null.
const char* errorNameOr(CUresult error);

}  // namespace gpupool::client
