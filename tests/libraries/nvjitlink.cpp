// nvJitLink: two parts linked at run time, as PTX and as LTO-IR, to machine code of this GPU or to PTX;
// --ptx: only what ends as PTX, for GPUs that have no machine code.
#include <nvJitLink.h>
#include <nvrtc.h>

#include "library.h"

inline std::string statusText(nvrtcResult status) { return nvrtcGetErrorString(status); }
inline std::string statusText(nvJitLinkResult status) { return "nvJitLink error " + std::to_string(status); }

namespace {

const char* const kKernel = R"(
extern __device__ float combine(float a, float b);
extern __constant__ float factor;
extern "C" __global__ void apply(const float* a, const float* b, float* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = factor * combine(a[i], b[i]);
}
)";
const char* const kFunction = R"(
__constant__ float factor = 1.5f;
__device__ float combine(float a, float b) { return a * a + b; }
)";

std::string compile(const char* source, const std::string& architecture, bool lto) {
  nvrtcProgram program;
  TRY(nvrtcCreateProgram(&program, source, "part.cu", 0, nullptr, nullptr));
  const std::string target = "--gpu-architecture=" + architecture;
  const char* options[] = {target.c_str(), "--relocatable-device-code=true", "-dlto"};
  TRY(nvrtcCompileProgram(program, lto ? 3 : 2, options));
  size_t size = 0;
  TRY(lto ? nvrtcGetLTOIRSize(program, &size) : nvrtcGetPTXSize(program, &size));
  std::string image(size, 0);
  TRY(lto ? nvrtcGetLTOIR(program, image.data()) : nvrtcGetPTX(program, image.data()));
  TRY(nvrtcDestroyProgram(&program));
  return image;
}

struct Link {
  const char* name;
  bool lto, ptx;
};

std::string link(const Link& how, const std::string& number) {
  const nvJitLinkInputType type = how.lto ? NVJITLINK_INPUT_LTOIR : NVJITLINK_INPUT_PTX;
  const std::string target = "-arch=sm_" + number;
  std::vector<const char*> options = {target.c_str()};
  if (how.lto) options.push_back("-lto");
  if (how.ptx) options.push_back("-ptx");
  nvJitLinkHandle handle;
  TRY(nvJitLinkCreate(&handle, static_cast<uint32_t>(options.size()), options.data()));
  for (const char* source : {kKernel, kFunction}) {
    const std::string part = compile(source, "compute_" + number, how.lto);
    TRY(nvJitLinkAddData(handle, type, part.data(), part.size(), "part"));
  }
  TRY(nvJitLinkComplete(handle));
  size_t size = 0;
  TRY(how.ptx ? nvJitLinkGetLinkedPtxSize(handle, &size) : nvJitLinkGetLinkedCubinSize(handle, &size));
  std::string image(size, 0);
  TRY(how.ptx ? nvJitLinkGetLinkedPtx(handle, image.data()) : nvJitLinkGetLinkedCubin(handle, image.data()));
  TRY(nvJitLinkDestroy(&handle));
  return image;
}

void run(const Link& how, const std::string& number) {
  const std::string image = link(how, number);
  CUmodule module;
  CUfunction apply;
  CUdeviceptr factor;
  size_t bytes = 0;
  TRY(cuModuleLoadData(&module, image.data()));
  TRY(cuModuleGetFunction(&apply, module, "apply"));
  // Link-time optimization may fold the constant away; the result shows its value.
  const bool constant = cuModuleGetGlobal(&factor, &bytes, module, "factor") == CUDA_SUCCESS;
  check::say("%s: the constant %s", how.name, constant ? "has an address" : "is folded");
  int count = 5000;
  const auto a = library::numbers<float>(count, 1), b = library::numbers<float>(count, 2);
  const library::Buffer<float> deviceA(a), deviceB(b), out(count, 0xff);
  const float *aPointer = deviceA, *bPointer = deviceB;
  float* outPointer = out;
  void* parameters[] = {&aPointer, &bPointer, &outPointer, &count};
  TRY(cuLaunchKernel(apply, 40, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr));
  library::result(
      how.name, out.read(), 1e-6, [&](size_t at) { return 1.5 * (double(a[at]) * a[at] + b[at]); }, 5000);
  TRY(cuModuleUnload(module));
}

std::string thisArchitecture() {
  int major = 0, minor = 0;
  TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  return std::to_string(major) + std::to_string(minor);
}

}  // namespace

int main(int argc, char** argv) {
  const Link all[] = {{"LTO-IR to PTX", true, true},
                      {"PTX to machine code", false, false},
                      {"LTO-IR to machine code", true, false}};
  library::operation("context", [] { TRY(cudaFree(nullptr)); });
  for (const Link& how : all) {
    if (!how.ptx && check::flag(argc, argv, "--ptx")) continue;
    library::operation(how.name, [&] { run(how, how.ptx ? "75" : thisArchitecture()); });
  }
  return library::finish();
}
