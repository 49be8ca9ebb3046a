// A program that frees what it has in static destructors and exit handlers, after the thread-local objects of
// the main thread are gone. Prints "clean" if every call then still answers as before.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>

namespace {

int failures = 0;

void expect(CUresult result, CUresult wanted, const char* what) {
  if (result == wanted) return;
  std::printf("%s gave %d\n", what, result);
  ++failures;
}

void atEnd() {
  CUdeviceptr p = 0;
  CUcontext current = nullptr;
  expect(cuCtxGetCurrent(&current), CUDA_SUCCESS, "current");
  expect(current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT, CUDA_SUCCESS, "the context");
  expect(cuMemAlloc(&p, 1 << 20), CUDA_SUCCESS, "alloc");
  expect(cuMemsetD8Async(p, 1, 1 << 20, CU_STREAM_PER_THREAD), CUDA_SUCCESS, "set");
  expect(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_SUCCESS, "synchronize");
  expect(cuMemFree(p), CUDA_SUCCESS, "free");
  expect(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS, "release");
  std::printf("%s\n", failures ? "failed" : "clean");
  std::fflush(stdout);
  std::_Exit(failures ? 1 : 0);
}

}  // namespace

int main() {
  std::atexit(atEnd);  // before the library makes anything: runs after its own handlers
  CUcontext context = nullptr;
  expect(cuInit(0), CUDA_SUCCESS, "init");
  expect(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS, "retain");
  expect(cuCtxSetCurrent(context), CUDA_SUCCESS, "set current");
  expect(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_SUCCESS, "thread's stream");
  return 0;
}
