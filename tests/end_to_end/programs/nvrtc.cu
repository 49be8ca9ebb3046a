// Kernels compiled at run time by NVRTC: a C function, a template by its lowered name, a constant, and an
// error.
#include <nvrtc.h>

#include <string>

#include "driver_check.h"

static const char* const kSource = R"(
template <typename T, int Step>
__global__ void ramp(T* values, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = static_cast<T>(i * Step) + static_cast<T>(OFFSET);
}
__constant__ float factor;
extern "C" __global__ void scale(float* values, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] *= factor;
}
)";

static void ok(nvrtcResult status, const char* what) {
  if (status != NVRTC_SUCCESS) check::fail("%s: %s", what, nvrtcGetErrorString(status));
}

int main() {
  CUDA(cudaFree(nullptr));  // makes the primary context current
  nvrtcProgram program;
  ok(nvrtcCreateProgram(&program, kSource, "kernels.cu", 0, nullptr, nullptr), "create");
  ok(nvrtcAddNameExpression(program, "ramp<float, 3>"), "name");
  const char* options[] = {"--gpu-architecture=compute_75", "-DOFFSET=0.5", "--std=c++17"};
  if (nvrtcCompileProgram(program, 3, options) != NVRTC_SUCCESS) {
    size_t size = 0;
    nvrtcGetProgramLogSize(program, &size);
    std::string log(size, 0);
    nvrtcGetProgramLog(program, log.data());
    check::fail("compile: %s", log.c_str());
  }
  const char* lowered = nullptr;
  ok(nvrtcGetLoweredName(program, "ramp<float, 3>", &lowered), "lowered name");
  size_t size = 0;
  ok(nvrtcGetPTXSize(program, &size), "size");
  std::string ptx(size, 0);
  ok(nvrtcGetPTX(program, ptx.data()), "ptx");

  CUmodule module;
  CUfunction ramp, scale;
  DRIVER(cuModuleLoadDataEx(&module, ptx.c_str(), 0, nullptr, nullptr));
  DRIVER(cuModuleGetFunction(&ramp, module, lowered));
  DRIVER(cuModuleGetFunction(&scale, module, "scale"));
  CUdeviceptr factor;
  DRIVER(cuModuleGetGlobal(&factor, &size, module, "factor"));
  REQUIRE(size == sizeof(float));
  const float two = 2;
  DRIVER(cuMemcpyHtoD(factor, &two, sizeof two));
  ok(nvrtcDestroyProgram(&program), "destroy");

  int count = 1000;
  check::Device<float> values(count);
  float* pointer = values;
  void* arguments[] = {&pointer, &count};
  DRIVER(cuLaunchKernel(ramp, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
  DRIVER(cuLaunchKernel(scale, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
  std::vector<float> expected;
  for (int i = 0; i < count; ++i) expected.push_back((i * 3 + 0.5f) * 2);
  check::same("compiled at run time", values.read(), expected);
  DRIVER(cuModuleUnload(module));

  ok(nvrtcCreateProgram(&program, "__global__ void wrong() { undeclared(); }", "wrong.cu", 0, nullptr,
                        nullptr),
     "create");
  const nvrtcResult status = nvrtcCompileProgram(program, 0, nullptr);
  check::say("a wrong source: %s", nvrtcGetErrorString(status));
  REQUIRE(status == NVRTC_ERROR_COMPILATION);
  ok(nvrtcDestroyProgram(&program), "destroy");

  // The same through the runtime's libraries.
  ok(nvrtcCreateProgram(&program, "extern \"C\" __global__ void seven(int* x) { *x = 7; }", "seven.cu", 0,
                        nullptr, nullptr),
     "create");
  ok(nvrtcCompileProgram(program, 1, options), "compile");
  ok(nvrtcGetPTXSize(program, &size), "size");
  ptx.assign(size, 0);
  ok(nvrtcGetPTX(program, ptx.data()), "ptx");
  cudaLibrary_t library;
  cudaKernel_t kernel;
  CUDA(cudaLibraryLoadData(&library, ptx.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  CUDA(cudaLibraryGetKernel(&kernel, library, "seven"));
  check::Device<int> result(1);
  int* resultPointer = result;
  void* one[] = {&resultPointer};
  CUDA(cudaLaunchKernel(reinterpret_cast<void*>(kernel), dim3(1), dim3(1), one, 0, 0));
  REQUIRE(result.read()[0] == 7);
  check::say("a library's kernel wrote 7");
  CUDA(cudaLibraryUnload(library));
  return check::pass();
}
