// A host function that asks about kernels and functions nobody asked about before gets an answer or
// CUDA_ERROR_NOT_PERMITTED, and never stands still; afterwards everything works. --in-pool: through gpupool,
// which does not ask the server from a host function, the answer to the first question is the latter.
#include "driver_check.h"

static const char* const kModule = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry known(.param .u64 where) { ret; }
.visible .entry unknown(.param .u64 where) { ret; }
.visible .entry other(.param .u64 where) { ret; }
)";

struct Asked {
  CUfunction known, unknown;
  CUkernel kernel;
  CUresult results[5];
};

static void CUDA_CB ask(void* data) {
  Asked& asked = *static_cast<Asked*>(data);
  int value = 0;
  size_t offset = 0;
  const auto attribute = CU_FUNC_ATTRIBUTE_NUM_REGS;
  asked.results[0] = cuFuncGetAttribute(&value, attribute, asked.unknown);
  asked.results[1] = cuFuncGetAttribute(&value, attribute, asked.known);
  asked.results[2] = cuKernelGetAttribute(&value, attribute, asked.kernel, 0);
  asked.results[3] = cuKernelGetParamInfo(asked.kernel, 0, &offset, nullptr);
  asked.results[4] = cuFuncSetAttribute(asked.known, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 64);
}

int main(int argc, char** argv) {
  DRIVER(cuInit(0));
  CUcontext context;
  DRIVER(cuCtxCreate(&context, nullptr, 0, 0));
  CUmodule module;
  CUlibrary library;
  Asked asked{};
  DRIVER(cuModuleLoadData(&module, kModule));
  DRIVER(cuModuleGetFunction(&asked.known, module, "known"));
  DRIVER(cuModuleGetFunction(&asked.unknown, module, "unknown"));
  DRIVER(cuLibraryLoadData(&library, kModule, nullptr, nullptr, 0, nullptr, nullptr, 0));
  DRIVER(cuLibraryGetKernel(&asked.kernel, library, "other"));
  int registers = 0;
  DRIVER(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, asked.known));
  CUstream stream;
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  for (int round = 0; round < 3; ++round) {
    DRIVER(cuLaunchHostFunc(stream, ask, &asked));
    DRIVER(cuStreamSynchronize(stream));
    for (CUresult result : asked.results)
      REQUIRE(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_PERMITTED);
    if (round == 0 && check::flag(argc, argv, "--in-pool"))
      REQUIRE(asked.results[0] == CUDA_ERROR_NOT_PERMITTED);
    DRIVER(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, asked.unknown));
    DRIVER(cuKernelGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, asked.kernel, 0));
  }
  check::say("answered, or not permitted");
  CUdeviceptr where = 0;
  void* arguments[] = {&where};
  DRIVER(cuLaunchKernel(asked.known, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
  DRIVER(cuLaunchKernel(asked.unknown, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
  DRIVER(cuLaunchKernel(reinterpret_cast<CUfunction>(asked.kernel), 1, 1, 1, 1, 1, 1, 0, stream, arguments,
                        nullptr));
  DRIVER(cuStreamSynchronize(stream));
  DRIVER(cuCtxDestroy(context));
  return check::pass();
}
