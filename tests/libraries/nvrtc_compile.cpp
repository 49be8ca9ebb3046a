// NVRTC: kernels compiled to PTX, and to machine code of this GPU; --ptx: PTX alone, for GPUs that have no
// machine code.
#include <nvrtc.h>

#include "library.h"

inline std::string statusText(nvrtcResult status) { return nvrtcGetErrorString(status); }

namespace {

const char* const kSource = R"(
template <typename T> __device__ T square(T x) { return x * x; }
// Sums of 256 squares each, by shuffles and shared memory.
extern "C" __global__ void sums(const float* values, float* out) {
  __shared__ float parts[8];
  float sum = square(values[blockIdx.x * 256 + threadIdx.x]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; ++i) sum += parts[i];
    out[blockIdx.x] = sum;
  }
}
extern "C" __global__ void functions(const float* values, double* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = sin((double)values[i]) + FACTOR * sqrt(fabs((double)values[i]));
}
)";

constexpr int kCount = 256 * 40;

std::string compile(const std::string& architecture, bool cubin) {
  nvrtcProgram program;
  TRY(nvrtcCreateProgram(&program, kSource, "kernels.cu", 0, nullptr, nullptr));
  const std::string target = "--gpu-architecture=" + architecture;
  const char* options[] = {target.c_str(), "-DFACTOR=0.25", "--std=c++17"};
  if (nvrtcCompileProgram(program, 3, options) != NVRTC_SUCCESS) {
    size_t size = 0;
    TRY(nvrtcGetProgramLogSize(program, &size));
    std::string log(size, 0);
    TRY(nvrtcGetProgramLog(program, log.data()));
    throw library::Failure{log};
  }
  size_t size = 0;
  TRY(cubin ? nvrtcGetCUBINSize(program, &size) : nvrtcGetPTXSize(program, &size));
  std::string image(size, 0);
  TRY(cubin ? nvrtcGetCUBIN(program, image.data()) : nvrtcGetPTX(program, image.data()));
  TRY(nvrtcDestroyProgram(&program));
  return image;
}

void run(const std::string& name, const std::string& image) {
  CUmodule module;
  CUfunction sums, functions;
  TRY(cuModuleLoadData(&module, image.data()));
  TRY(cuModuleGetFunction(&sums, module, "sums"));
  TRY(cuModuleGetFunction(&functions, module, "functions"));
  const auto values = library::numbers<float>(kCount, 1);
  const library::Buffer<float> in(values), out(kCount / 256, 0xff);
  const library::Buffer<double> results(kCount, 0xff);
  const float* inPointer = in;
  float* outPointer = out;
  double* resultsPointer = results;
  int count = kCount;
  void* first[] = {&inPointer, &outPointer};
  void* second[] = {&inPointer, &resultsPointer, &count};
  TRY(cuLaunchKernel(sums, kCount / 256, 1, 1, 256, 1, 1, 0, nullptr, first, nullptr));
  TRY(cuLaunchKernel(functions, kCount / 128, 1, 1, 128, 1, 1, 0, nullptr, second, nullptr));
  library::result((name + " sums").c_str(), out.read(), 1e-5, [&](size_t at) {
    double sum = 0;
    for (size_t i = at * 256; i < (at + 1) * 256; ++i) sum += double(values[i]) * values[i];
    return sum;
  });
  library::result((name + " functions").c_str(), results.read(), 1e-14, [&](size_t at) {
    return std::sin(double(values[at])) + 0.25 * std::sqrt(std::fabs(double(values[at])));
  });
  TRY(cuModuleUnload(module));
}

std::string machineCode() {
  int major = 0, minor = 0;
  TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

}  // namespace

int main(int argc, char** argv) {
  library::operation("context", [] { TRY(cudaFree(nullptr)); });
  library::operation("PTX", [] { run("PTX", compile("compute_75", false)); });
  if (!check::flag(argc, argv, "--ptx")) {
    library::operation("machine code", [] { run("machine code", compile(machineCode(), true)); });
    library::operation("PTX of this architecture", [] {
      run("PTX of this architecture", compile("compute_" + machineCode().substr(3), false));
    });
  }
  return library::finish();
}
