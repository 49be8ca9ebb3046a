#pragma once
// cuGetProcAddress: from a base name, a CUDA version and a choice of default stream to one of our exports.
//
// Among the variants of a name the newest with introduction version <= the requested one is taken. Flag 2
// looks at the per-thread variants alone where the name has any (an older version is then "not sufficient",
// measured), and at the ordinary ones otherwise. Variants whose export is not supported do not count, so that
// a runtime sees a missing function and falls back; plain dlsym still finds them.
//
// Answers as measured on driver 580: the _v2 entry succeeds with a null pointer and a status when nothing
// fits; the first entry returns CUDA_ERROR_NOT_FOUND and leaves the pointer alone. A requested version above
// the driver's is CUDA_ERROR_INVALID_VALUE. No state, any thread, also before cuInit and in a forked child.

#include <cuda.h>

namespace gpupool::client {

// What cuDriverGetVersion must report: cudart reads it before cuInit and again inside its self-test.
inline constexpr int kDriverVersion = 13000;

// cuGetProcAddress_v2; status may be null.
CUresult lookup(const char* name, int cudaVersion, cuuint64_t flags, void** address,
                CUdriverProcAddressQueryResult* status);
// cuGetProcAddress of CUDA 11.3.
CUresult lookupOld(const char* name, int cudaVersion, cuuint64_t flags, void** address);

}  // namespace gpupool::client
