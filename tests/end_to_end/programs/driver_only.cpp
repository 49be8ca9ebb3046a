// A program of the driver API alone, without the runtime (built with -cudart none): modules and libraries
// from a fat binary and from PTX, launches with separate and with packed parameters, variables of modules.
#include <unistd.h>

#include <string>

#include "driver_check.h"

// A file that lies beside this program.
static std::vector<char> readBeside(const char* name) {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  REQUIRE(length > 0);
  std::string file(path, length);
  file = file.substr(0, file.rfind('/') + 1) + name;
  FILE* stream = std::fopen(file.c_str(), "rb");
  if (stream == nullptr) check::fail("%s is not beside the program", name);
  std::vector<char> bytes;
  for (int byte; (byte = std::fgetc(stream)) != EOF;) bytes.push_back(static_cast<char>(byte));
  std::fclose(stream);
  bytes.push_back(0);
  return bytes;
}

struct Settings {
  int count;
  float factor;
  char mode;
};
constexpr int kCount = 1000;

struct Buffers {
  CUdeviceptr input, output;
  std::vector<float> host = check::randomFloats(kCount, 36, -5, 5);

  Buffers() {
    DRIVER(cuMemAlloc(&input, kCount * sizeof(float)));
    DRIVER(cuMemAlloc(&output, kCount * sizeof(float)));
    DRIVER(cuMemcpyHtoD(input, host.data(), kCount * sizeof(float)));
  }
  void verify(const char* name, float bias, bool withTable) const {
    std::vector<float> got(kCount), expected(kCount);
    DRIVER(cuMemcpyDtoH(got.data(), output, kCount * sizeof(float)));
    for (int i = 0; i < kCount; ++i) {
      expected[i] = std::fmaf(host[i], 2.0f, bias);  // doubling is exact, so fused or not is the same
      if (withTable) expected[i] += static_cast<float>(i % 4 * 10 + 10);
    }
    check::same(name, got, expected);
    DRIVER(cuMemsetD32(output, 0, kCount));
    DRIVER(cuCtxSynchronize());  // a memset does not wait, nor do the streams used here wait for it
  }
};

static void module(const char* name, const void* image, const Buffers& buffers, CUstream stream) {
  CUmodule module;
  CUfunction scale, sum;
  DRIVER(cuModuleLoadData(&module, image));
  DRIVER(cuModuleGetFunction(&scale, module, "scaleAndBias"));
  DRIVER(cuModuleGetFunction(&sum, module, "sumBlock"));
  CUdeviceptr input = buffers.input, output = buffers.output;
  Settings settings = {kCount, 2, 'x'};
  void* arguments[] = {&input, &output, &settings};
  DRIVER(cuLaunchKernel(scale, 8, 1, 1, 128, 1, 1, 0, stream, arguments, nullptr));
  DRIVER(cuStreamSynchronize(stream));
  buffers.verify(name, 1.5f, false);

  // The same with one packed buffer, and the module's variable changed.
  CUdeviceptr bias, table;
  size_t size = 0;
  DRIVER(cuModuleGetGlobal(&bias, &size, module, "bias"));
  REQUIRE(size == 4);
  DRIVER(cuModuleGetGlobal(&table, &size, module, "table"));
  REQUIRE(size == 16);
  const float quarter = 0.25f;
  DRIVER(cuMemcpyHtoD(bias, &quarter, sizeof quarter));
  struct {
    CUdeviceptr input, output;
    Settings settings;
  } packed = {input, output, {kCount, 2, 't'}};
  size_t packedSize = offsetof(decltype(packed), settings) + sizeof(Settings);  // no padding behind
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &packedSize,
                   CU_LAUNCH_PARAM_END};
  DRIVER(cuLaunchKernel(scale, 8, 1, 1, 128, 1, 1, 0, stream, nullptr, extra));
  DRIVER(cuStreamSynchronize(stream));
  buffers.verify("packed parameters", 0.25f, true);

  std::vector<int> numbers(256), result(1);
  int expected = 0;
  for (int i = 0; i < 256; ++i) expected += numbers[i] = i * i;
  DRIVER(cuMemcpyHtoDAsync(buffers.output, numbers.data(), 1024, stream));
  CUdeviceptr last = output + 4 * 300;
  void* sumArguments[] = {&output, &last};
  DRIVER(cuLaunchKernel(sum, 1, 1, 1, 256, 1, 1, 1024, stream, sumArguments, nullptr));
  DRIVER(cuMemcpyDtoHAsync(result.data(), last, 4, stream));
  DRIVER(cuStreamSynchronize(stream));
  REQUIRE(result[0] == expected);
  check::say("dynamic shared memory: %d", expected);

  int value = 0;
  DRIVER(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, sum));
  REQUIRE(value == 1024);
  size_t offset = 0;
  DRIVER(cuFuncGetParamInfo(scale, 2, &offset, &size));
  REQUIRE(offset == 16 && size == sizeof(Settings));
  DRIVER_GIVES(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&scale, module, "absent"));
  DRIVER_GIVES(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal(&bias, &size, module, "absent"));
  DRIVER(cuModuleUnload(module));
}

static void library(const void* image, const Buffers& buffers) {
  CUlibrary library;
  CUkernel kernel;
  CUfunction function;
  DRIVER(cuLibraryLoadData(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0));
  DRIVER(cuLibraryGetKernel(&kernel, library, "scaleAndBias"));
  DRIVER(cuKernelGetFunction(&function, kernel));
  unsigned count = 0;
  DRIVER(cuLibraryGetKernelCount(&count, library));
  REQUIRE(count == 2);
  CUdeviceptr input = buffers.input, output = buffers.output;
  Settings settings = {kCount, 2, 'x'};
  void* arguments[] = {&input, &output, &settings};
  DRIVER(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 8, 1, 1, 128, 1, 1, 0, nullptr, arguments,
                        nullptr));
  buffers.verify("a library's kernel", 1.5f, false);
  DRIVER(cuLaunchKernel(function, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr));
  buffers.verify("its function", 1.5f, false);
  DRIVER(cuLibraryUnload(library));
}

int main() {
  CUdevice device;
  DRIVER_GIVES(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGet(&device, 0));
  DRIVER(cuInit(0));
  int version = 0;
  DRIVER(cuDriverGetVersion(&version));
  REQUIRE(version >= 12000);
  DRIVER(cuDeviceGet(&device, 0));
  char name[100] = {};
  DRIVER(cuDeviceGetName(name, sizeof name, device));
  size_t total = 0;
  DRIVER(cuDeviceTotalMem(&total, device));
  REQUIRE(name[0] != 0 && total > 0);
  CUdeviceptr pointer = 0;
  DRIVER_GIVES(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&pointer, 16));
  CUcontext context;
  DRIVER(cuCtxCreate(&context, nullptr, 0, device));
  CUstream stream;
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUcontext itsContext = nullptr;
  CUgreenCtx green = reinterpret_cast<CUgreenCtx>(1);
  DRIVER(cuStreamGetCtx_v2(stream, &itsContext, &green));
  REQUIRE(itsContext == context && green == nullptr);

  const std::vector<char> binary = readBeside("driver_kernels.fatbin"),
                          text = readBeside("driver_kernels.ptx");
  const Buffers buffers;
  module("fat binary", binary.data(), buffers, stream);
  module("PTX", text.data(), buffers, stream);
  library(binary.data(), buffers);
  DRIVER(cuStreamDestroy(stream));
  DRIVER(cuMemFree(buffers.input));
  DRIVER(cuMemFree(buffers.output));
  DRIVER(cuCtxDestroy(context));
  return check::pass();
}
