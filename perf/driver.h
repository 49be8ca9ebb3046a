#pragma once
// The CUDA driver API, loaded at run time: the measuring program is linked against nothing of NVIDIA's, and
// whichever libcuda.so.1 the loader finds (the machine's own, the software GPU, gpupool's) is what it
// measures. Names: cuda.h renames functions to their versions (cuMemAlloc is cuMemAlloc_v2), and so do these
// members. Threads: one.

#include <cuda.h>
#include <cudaProfiler.h>

// clang-format off
#define GPUPOOL_PERF_CALLS(X)                                                                                \
  X(cuInit) X(cuGetErrorName) X(cuDriverGetVersion) X(cuDeviceGet) X(cuDeviceGetName)                        \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxSetCurrent) X(cuCtxSynchronize)            \
  X(cuModuleLoadData) X(cuModuleUnload) X(cuModuleGetFunction) X(cuLaunchKernel)                             \
  X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamQuery) X(cuStreamBeginCapture) X(cuStreamEndCapture)\
  X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime)\
  X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemHostRegister) X(cuMemHostUnregister)                                              \
  X(cuMemcpyHtoD) X(cuMemcpyDtoH) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemsetD32Async)\
  X(cuGraphInstantiate) X(cuGraphLaunch) X(cuGraphExecDestroy) X(cuGraphDestroy)                             \
  X(cuProfilerStart) X(cuProfilerStop)
// clang-format on

namespace gpupool::perf {

struct Driver {
#define GPUPOOL_PERF_MEMBER(name) decltype(&::name) name = nullptr;
  GPUPOOL_PERF_CALLS(GPUPOOL_PERF_MEMBER)
#undef GPUPOOL_PERF_MEMBER
};

// Loads the library at the first use. Throws std::runtime_error if it, or a function, is missing.
const Driver& cuda();

// Throws std::runtime_error naming the error and the line, unless `status` is success.
void ok(CUresult status, const char* file = __builtin_FILE(), int line = __builtin_LINE());

}  // namespace gpupool::perf
