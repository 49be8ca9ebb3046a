// Runs the instruction cases on an NVIDIA GPU and prints the lines of engine_golden.txt; with a file name,
// also writes all results there. For recording the golden file; no test needs it.
#include <dlfcn.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>

#include "cuda.h"
#include "server/softgpu/tests/engine_cases.h"

using namespace gpupool::softgpu::test;

namespace {

void* library = nullptr;

template <typename Function>
Function* find(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) std::fprintf(stderr, "no %s\n", name);
  return function;
}

}  // namespace

int main(int argc, char** argv) {
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "no NVIDIA driver: %s\n", dlerror()), 1;
  auto* init = find<CUresult(unsigned)>("cuInit");
  auto* retain = find<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain");
  auto* current = find<CUresult(CUcontext)>("cuCtxSetCurrent");
  auto* allocate = find<CUresult(CUdeviceptr*, size_t)>("cuMemAlloc_v2");
  auto* toDevice = find<CUresult(CUdeviceptr, const void*, size_t)>("cuMemcpyHtoD_v2");
  auto* fromDevice = find<CUresult(void*, CUdeviceptr, size_t)>("cuMemcpyDtoH_v2");
  auto* clear = find<CUresult(CUdeviceptr, unsigned char, size_t)>("cuMemsetD8_v2");
  auto* loadModule = find<CUresult(CUmodule*, const void*)>("cuModuleLoadData");
  auto* getFunction = find<CUresult(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction");
  auto* launch = find<decltype(cuLaunchKernel)>("cuLaunchKernel");
  CUcontext context = nullptr;
  CUdeviceptr in = 0;
  CUdeviceptr out = 0;
  if (init(0) != CUDA_SUCCESS || retain(&context, 0) != CUDA_SUCCESS || current(context) != CUDA_SUCCESS)
    return 1;
  if (allocate(&in, kCaseThreads * sizeof(Input)) != CUDA_SUCCESS ||
      allocate(&out, size_t{kCaseThreads} * 8) != CUDA_SUCCESS)
    return 1;
  std::ofstream dump;
  if (argc > 1) dump.open(argv[1], std::ios::binary);
  for (const InstructionCase& one : instructionCases()) {
    std::vector<uint64_t> results(kCaseThreads);
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    void* arguments[] = {&in, &out};
    CUresult result = loadModule(&module, one.ptx.c_str());
    if (result == CUDA_SUCCESS) result = getFunction(&function, module, "test");
    if (result == CUDA_SUCCESS) result = toDevice(in, one.inputs.data(), one.inputs.size() * sizeof(Input));
    if (result == CUDA_SUCCESS) result = clear(out, 0, size_t{kCaseThreads} * 8);
    if (result == CUDA_SUCCESS)
      result = launch(function, 1, 1, 1, kCaseThreads, 1, 1, 0, nullptr, arguments, nullptr);
    if (result == CUDA_SUCCESS) result = fromDevice(results.data(), out, results.size() * 8);
    if (result != CUDA_SUCCESS) {
      std::printf("# error %d: %s\n", static_cast<int>(result), one.name.c_str());
      continue;
    }
    std::printf("%016" PRIx64 " %s\n", hashResults(one, results), one.name.c_str());
    if (dump)
      dump.write(reinterpret_cast<const char*>(results.data()),
                 static_cast<std::streamsize>(results.size() * 8));
  }
  return 0;
}
