// Two PTX texts linked at run time by the driver: functions and variables across them, logs, and what a bad
// or incomplete text gives.
#include "driver_check.h"

static const char* const kMain = R"(
.version 7.0
.target sm_70
.address_size 64
.extern .func (.param .b32 result) combine (.param .b32 a, .param .b32 b);
.extern .global .align 4 .u32 shared_count;
.visible .entry apply(.param .u64 values)
{
  .reg .b32 %r<6>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [values];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.u32 %r2, [%rd4];
  {
    .param .b32 a;
    .param .b32 b;
    .param .b32 result;
    st.param.b32 [a], %r2;
    st.param.b32 [b], %r1;
    call.uni (result), combine, (a, b);
    ld.param.b32 %r3, [result];
  }
  st.global.u32 [%rd4], %r3;
  mov.u64 %rd1, shared_count;
  atom.global.add.u32 %r4, [%rd1], 1;
  ret;
}
)";

static const char* const kLibrary = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 shared_count = 10;
.global .align 4 .u32 private_factor = 3;
.visible .func (.param .b32 result) combine (.param .b32 a, .param .b32 b)
{
  .reg .b32 %r<6>;
  ld.param.b32 %r1, [a];
  ld.param.b32 %r2, [b];
  ld.global.u32 %r3, [private_factor];
  mad.lo.s32 %r4, %r1, %r3, %r2;
  st.param.b32 [result], %r4;
  ret;
}
)";

struct Logs {
  char info[4096] = {}, error[4096] = {};
  CUjit_option options[5] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
                             CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_LOG_VERBOSE};
  void* values[5] = {info, reinterpret_cast<void*>(sizeof info), error, reinterpret_cast<void*>(sizeof error),
                     reinterpret_cast<void*>(1)};
};

static CUresult add(CUlinkState state, const char* text, const char* name) {
  return cuLinkAddData(state, CU_JIT_INPUT_PTX, const_cast<char*>(text), std::strlen(text) + 1, name, 0,
                       nullptr, nullptr);
}

int main() {
  DRIVER(cuInit(0));
  CUdevice device;
  CUcontext context;
  DRIVER(cuDeviceGet(&device, 0));
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));

  Logs logs;
  CUlinkState state;
  DRIVER(cuLinkCreate(5, logs.options, logs.values, &state));
  DRIVER(add(state, kMain, "main.ptx"));
  DRIVER(add(state, kLibrary, "library.ptx"));
  void* image = nullptr;
  size_t bytes = 0;
  DRIVER(cuLinkComplete(state, &image, &bytes));
  REQUIRE(image != nullptr && bytes > 0);
  CUmodule module;
  DRIVER(cuModuleLoadData(&module, image));
  DRIVER(cuLinkDestroy(state));

  CUfunction apply;
  CUdeviceptr values, shared;
  DRIVER(cuModuleGetFunction(&apply, module, "apply"));
  DRIVER(cuModuleGetGlobal(&shared, &bytes, module, "shared_count"));
  REQUIRE(bytes == 4);
  std::vector<int> numbers(100), expected;
  for (int i = 0; i < 100; ++i) {
    numbers[i] = i * i;
    expected.push_back(i * i * 3 + i);
  }
  DRIVER(cuMemAlloc(&values, 400));
  DRIVER(cuMemcpyHtoD(values, numbers.data(), 400));
  void* arguments[] = {&values};
  DRIVER(cuLaunchKernel(apply, 1, 1, 1, 100, 1, 1, 0, nullptr, arguments, nullptr));
  DRIVER(cuMemcpyDtoH(numbers.data(), values, 400));
  check::same("linked", numbers, expected);
  int count = 0;
  DRIVER(cuMemcpyDtoH(&count, shared, sizeof count));
  check::say("shared_count: %d", count);
  REQUIRE(count == 110);
  DRIVER_GIVES(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&apply, module, "combine_nothing"));
  DRIVER(cuModuleUnload(module));
  DRIVER(cuMemFree(values));

  // A text with an error: the error log says something. A missing definition: found when linking is
  // completed.
  Logs bad;
  DRIVER(cuLinkCreate(5, bad.options, bad.values, &state));
  DRIVER_GIVES(CUDA_ERROR_INVALID_PTX,
               add(state, ".version 7.0\n.target sm_70\n.bogus directive\n", "bad.ptx"));
  REQUIRE(bad.error[0] != 0);
  DRIVER(cuLinkDestroy(state));
  Logs missing;
  DRIVER(cuLinkCreate(5, missing.options, missing.values, &state));
  CUresult status = add(state, kMain, "main.ptx");
  if (status == CUDA_SUCCESS) status = cuLinkComplete(state, &image, &bytes);
  check::say("a function is missing: %s", status == CUDA_SUCCESS ? "linked" : "refused");
  REQUIRE(status != CUDA_SUCCESS && std::strstr(missing.error, "combine") != nullptr);
  DRIVER(cuLinkDestroy(state));

  Logs syntax;
  CUmodule none = nullptr;
  DRIVER_GIVES(
      CUDA_ERROR_INVALID_PTX,
      cuModuleLoadDataEx(&none, ".version 7.0\n.target sm_70\n.address_size 64\n.entry x() { frob; }\n", 5,
                         syntax.options, syntax.values));
  REQUIRE(syntax.error[0] != 0);
  DRIVER_GIVES(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&none, "neither PTX nor a binary, only words"));
  DRIVER(cuDevicePrimaryCtxRelease(device));
  return check::pass();
}
