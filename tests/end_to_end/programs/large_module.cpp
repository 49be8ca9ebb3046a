// A module of several MiB of text, loaded, run and loaded again. --nonce N makes it another module: what a
// server keeps of modules knows it no more.
#include <string>

#include "driver_check.h"

static const char* const kHead = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 values)
{
  .reg .b32 %r<3>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [values];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd2, %rd3;
  mad.lo.s32 %r2, %r1, 7, 3;
  st.global.u32 [%rd4], %r2;
  ret;
}
)";

static std::string makeText(int nonce) {
  std::string text = kHead;
  check::Random random(static_cast<uint64_t>(nonce));
  while (text.size() < (size_t{6} << 20)) {
    text += "// ";
    for (int i = 0; i < 120; ++i) text += static_cast<char>('a' + random.below(26));
    text += '\n';
  }
  return text;
}

static void run(const char* what, const std::string& text) {
  CUmodule module;
  CUfunction fill;
  CUdeviceptr values;
  DRIVER(cuModuleLoadData(&module, text.c_str()));
  DRIVER(cuModuleGetFunction(&fill, module, "fill"));
  DRIVER(cuMemAlloc(&values, 64 * sizeof(int)));
  void* parameters[] = {&values};
  DRIVER(cuLaunchKernel(fill, 1, 1, 1, 64, 1, 1, 0, nullptr, parameters, nullptr));
  std::vector<int> got(64), expected(64);
  DRIVER(cuMemcpyDtoH(got.data(), values, got.size() * sizeof(int)));
  for (int i = 0; i < 64; ++i) expected[i] = i * 7 + 3;
  check::same(what, got, expected);
  DRIVER(cuMemFree(values));
  DRIVER(cuModuleUnload(module));
}

int main(int argc, char** argv) {
  CUdevice device;
  CUcontext context;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));
  const std::string text = makeText(check::option(argc, argv, "--nonce", 1));
  run("loaded", text);
  run("loaded again", text);
  DRIVER(cuDevicePrimaryCtxRelease(device));
  return check::pass();
}
