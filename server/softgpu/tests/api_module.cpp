// Modules, libraries, fatbins, linking, launches and their errors.
#include <lz4.h>
#include <zstd.h>

#include <algorithm>

#include "api_support.h"

using namespace apitest;

namespace {

// A bare fatbin with one entry, as nvcc writes it: 64 bytes, and a record of no options.
std::vector<char> fatbin(const std::string& payload, uint16_t kind, uint32_t arch, uint64_t flags,
                         uint32_t stored, uint64_t plain) {
  size_t padded = (payload.size() + 7) / 8 * 8;
  std::vector<char> out(16 + 80 + padded);
  auto put = [&](size_t at, auto value) { std::memcpy(&out[at], &value, sizeof value); };
  put(0, uint32_t(0xba55ed50));
  put(4, uint16_t(1));
  put(6, uint16_t(16));
  put(8, uint64_t(80 + padded));
  put(16, kind);
  put(18, uint16_t(0x0101));
  put(20, uint32_t(80));
  put(24, uint32_t(padded));
  put(32, stored);
  put(36, uint32_t(64));
  put(42, uint16_t(9));
  put(44, arch);
  put(56, uint64_t(0x11 | flags));
  put(72, plain);
  put(80, uint32_t(72));
  std::memcpy(&out[96], payload.data(), payload.size());
  return out;
}

std::string ptx() { return std::string(kKernels, std::strlen(kKernels) + 1); }

struct Wrapper {
  uint32_t magic = 0x466243b1, version;
  const void* data;
  const void* aux;
};

int runAdd(CUmodule module) {
  CUfunction f = nullptr;
  OK(cuModuleGetFunction(&f, module, "addTo"));
  Buffer<int> b(1);
  OK(launch(f, 32, 0, nullptr, b.address, 2));
  return b.get()[0];
}

int loadAndRun(const void* image) {
  CUmodule module = nullptr;
  OK(cuModuleLoadData(&module, image));
  int sum = runAdd(module);
  OK(cuModuleUnload(module));
  return sum;
}

}  // namespace

TEST_CASE("vectorAdd") {
  Session session;
  constexpr int n = 1000;
  Buffer<float> a(n), b(n), c(n);
  std::vector<float> x(n), y(n);
  for (int i = 0; i < n; ++i) {
    x[size_t(i)] = float(i);
    y[size_t(i)] = 2.5f;
  }
  a.set(x);
  b.set(y);
  int count = n;
  void* parameters[] = {&a.address, &b.address, &c.address, &count};
  OK(cuLaunchKernel(session.function("vectorAdd"), 4, 1, 1, 256, 1, 1, 0, nullptr, parameters, nullptr));
  CHECK(c.get()[999] == 1001.5f);
}

TEST_CASE("parameters: layout queries, packed buffers") {
  Session session;
  CUfunction f = session.function("mixed");
  size_t offset = 0, size = 0;
  OK(cuFuncGetParamInfo(f, 2, &offset, &size));
  CHECK(offset == 16);
  CHECK(size == 24);
  GIVES(CUDA_ERROR_INVALID_VALUE, cuFuncGetParamInfo(f, 4, &offset, &size));
  struct Mixed {
    char c;
    double d;
    short s[3];
  };
  struct {
    CUdeviceptr out;
    char a;
    Mixed m;
    short b;
  } packed{0, 1, {2, 0.5, {0, 0, 30}}, 400};
  Buffer<double> out(1);
  packed.out = out.address;
  size_t bytes = 42;  // not sizeof: more than the parameters is refused
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  OK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra));
  CHECK(out.get()[0] == 433.5);
  bytes = 43;
  GIVES(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra));
  bytes = 0;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra));
  OK(launch(f, 1, 0, nullptr, packed.out, packed.a, packed.m, short(1)));
  CHECK(out.get()[0] == 34.5);
}

TEST_CASE("globals, constants, managed variables, names") {
  Session session;
  CUdeviceptr p = 0;
  size_t bytes = 0;
  OK(cuModuleGetGlobal(&p, &bytes, session.module, "counter"));
  CHECK(bytes == 4);
  int value = 0;
  OK(cuMemcpyDtoH(&value, p, 4));
  CHECK(value == 5);
  OK(launch(session.function("bump"), 4, 0, nullptr));
  OK(cuMemcpyDtoH(&value, p, 4));
  CHECK(value == 15);
  GIVES(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal(&p, &bytes, session.module, "nothing"));
  CUfunction f = nullptr;
  GIVES(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&f, session.module, "nothing"));
  f = session.function("addTo");
  CHECK(f == session.function("addTo"));
  const char* text = nullptr;
  OK(cuFuncGetName(&text, f));
  CHECK(std::string(text) == "addTo");
  unsigned count = 0;
  OK(cuModuleGetFunctionCount(&count, session.module));
  std::vector<CUfunction> all(count);
  OK(cuModuleEnumerateFunctions(all.data(), count, session.module));
  CHECK(std::count(all.begin(), all.end(), f) == 1);
}

TEST_CASE("images: fatbins stored and compressed, wrappers, text") {
  Session session;
  std::string text = ptx();
  auto stored = fatbin(text, 1, 75, 0, 0, 0);
  CHECK(loadAndRun(stored.data()) == 64);

  std::string lz4(size_t(LZ4_compressBound(int(text.size()))), 0);
  lz4.resize(size_t(LZ4_compress_default(text.data(), lz4.data(), int(text.size()), int(lz4.size()))));
  auto packed = fatbin(lz4, 1, 80, 0x2000, uint32_t(lz4.size()), text.size());
  CHECK(loadAndRun(packed.data()) == 64);

  std::string zstd(ZSTD_compressBound(text.size()), 0);
  zstd.resize(ZSTD_compress(zstd.data(), zstd.size(), text.data(), text.size(), 3));
  auto framed = fatbin(zstd, 1, 90, 0x8000, uint32_t(zstd.size()), text.size());
  Wrapper wrapper{0x466243b1, 1, framed.data(), nullptr};
  CHECK(loadAndRun(&wrapper) == 64);
  CHECK(loadAndRun(("\n   \t" + text).c_str()) == 64);
}

TEST_CASE("images that cannot run say why") {
  Session session;
  CUmodule module = nullptr;
  auto newer = fatbin(ptx(), 1, 100, 0, 0, 0);
  GIVES(CUDA_ERROR_NO_BINARY_FOR_GPU, cuModuleLoadData(&module, newer.data()));
  char log[2048] = {};
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
  const char* broken =
      ".version 7.5\n.target sm_75\n.address_size 64\n.visible .entry f() { bogus.op %r1; ret; }\n";
  GIVES(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx(&module, broken, 2, options, values));
  CHECK(std::strlen(log) > 0);
  CHECK(reinterpret_cast<size_t>(values[1]) >= std::strlen(log));
  GIVES(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&module, " \n"));
  GIVES(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cuModuleLoadData(&module, ".version 99.5\n.target sm_75\n"));
  GIVES(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cuModuleLoadData(&module, ".version 10.0\n.target sm_75\n"));
  // Every toolkit of CUDA 13, the driver's own and later ones.
  for (const char* version : {"9.0", "9.1", "9.3", "9.5", "9.10"}) {
    INFO(version);
    std::string text = std::string(".version ") + version +
                       "\n.target sm_90\n.address_size 64\n.visible .entry f() { ret; }\n";
    OK(cuModuleLoadData(&module, text.c_str()));
    OK(cuModuleUnload(module));
  }
  GIVES(CUDA_ERROR_INVALID_PTX,
        cuModuleLoadData(&module, ".version 8.7\n.target sm_100\n.address_size 64\n"));
  GIVES(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad(&module, "/no/such/file.ptx"));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload(reinterpret_cast<CUmodule>(uintptr_t(0x30))));
}

TEST_CASE("libraries need no context; kernels launch by their own handles") {
  OK(cuInit(0));
  CUlibrary library = nullptr;
  OK(cuLibraryLoadData(&library, kKernels, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CUkernel kernel = nullptr, missing = nullptr;
  OK(cuLibraryGetKernel(&kernel, library, "addTo"));
  GIVES(CUDA_ERROR_NOT_FOUND, cuLibraryGetKernel(&missing, library, "nothing"));
  CUdeviceptr managed = 0;
  OK(cuLibraryGetManaged(&managed, nullptr, library, "shared_value"));
  CHECK(*reinterpret_cast<int*>(managed) == 9);
  {
    Session session;
    Buffer<int> b(1);
    OK(launch(reinterpret_cast<CUfunction>(kernel), 3, 0, nullptr, b.address, 5));
    CHECK(b.get()[0] == 15);
    CUfunction f = nullptr, again = nullptr;
    OK(cuKernelGetFunction(&f, kernel));
    OK(cuKernelGetFunction(&again, kernel));
    CHECK(f == again);
    size_t offset, size;
    OK(cuKernelGetParamInfo(kernel, 1, &offset, &size));
    CHECK(offset == 8);
    CHECK(size == 4);
    int threads = 0;
    OK(cuKernelGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel, 0));
    CHECK(threads == 1024);
    CUkernel managedKernel = nullptr;
    OK(cuLibraryGetKernel(&managedKernel, library, "managed"));
    OK(launch(reinterpret_cast<CUfunction>(managedKernel), 1, 0, nullptr, 20));
    OK(cuCtxSynchronize());
    CHECK(*reinterpret_cast<int*>(managed) == 29);
    CUdeviceptr global = 0;
    size_t bytes = 0;
    OK(cuLibraryGetGlobal(&global, &bytes, library, "counter"));
    CHECK(bytes == 4);
    unsigned count = 0;
    OK(cuLibraryGetKernelCount(&count, library));
    CHECK(count >= 10);
  }
  OK(cuLibraryUnload(library));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuLibraryUnload(library));
}

TEST_CASE("PTX is linked from pieces") {
  Session session;
  std::string caller =
      ".version 7.5\n.target sm_75\n.address_size 64\n"
      ".extern .func (.param .b32 r) twice (.param .b32 x);\n"
      ".visible .entry f(.param .u64 p) {\n .reg .b64 %rd<2>; .reg .b32 %r<3>;\n"
      " ld.param.u64 %rd1, [p];\n ld.global.u32 %r1, [%rd1];\n"
      " { .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call.uni (b), twice, (a); ld.param.b32 %r2, "
      "[b]; }\n"
      " st.global.u32 [%rd1], %r2;\n ret;\n}\n";
  std::string callee =
      ".version 7.5\n.target sm_75\n.address_size 64\n"
      ".visible .func (.param .b32 r) twice (.param .b32 x) {\n .reg .b32 %r<3>;\n"
      " ld.param.b32 %r1, [x];\n add.s32 %r2, %r1, %r1;\n st.param.b32 [r], %r2;\n ret;\n}\n";
  CUlinkState link = nullptr;
  OK(cuLinkCreate(0, nullptr, nullptr, &link));
  OK(cuLinkAddData(link, CU_JIT_INPUT_PTX, caller.data(), caller.size() + 1, "caller", 0, nullptr, nullptr));
  OK(cuLinkAddData(link, CU_JIT_INPUT_PTX, callee.data(), callee.size() + 1, "callee", 0, nullptr, nullptr));
  void* image = nullptr;
  size_t size = 0;
  OK(cuLinkComplete(link, &image, &size));
  CHECK(size > 0);
  CUmodule module = nullptr;
  OK(cuModuleLoadData(&module, image));
  OK(cuLinkDestroy(link));
  CUfunction f = nullptr;
  OK(cuModuleGetFunction(&f, module, "f"));
  Buffer<int> b(1, 21);
  OK(launch(f, 1, 0, nullptr, b.address));
  CHECK(b.get()[0] == 42);
  OK(cuModuleUnload(module));
}

TEST_CASE("shapes that cannot launch are refused at the call") {
  Session session;
  Buffer<int> b(1);
  CUfunction add = session.function("addTo"), bounded = session.function("bounded");
  GIVES(CUDA_ERROR_INVALID_VALUE, launch(add, 0, 0, nullptr, b.address, 1));
  GIVES(CUDA_ERROR_INVALID_VALUE, launch(add, 1025, 0, nullptr, b.address, 1));
  GIVES(CUDA_ERROR_INVALID_VALUE, launch(bounded, 129, 0, nullptr, b.address));
  OK(launch(bounded, 128, 0, nullptr, b.address));
  CHECK(b.get()[0] == 128);
  GIVES(CUDA_ERROR_INVALID_VALUE, launch(add, 1, (48 << 10) + 4, nullptr, b.address, 1));
  CUfunction sum = session.function("sumShared");
  OK(cuFuncSetAttribute(sum, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 64 << 10));
  OK(launch(sum, 64, 64 << 10, nullptr, b.address, 16 << 10));
  CHECK(b.get()[0] == (16 << 10) * ((16 << 10) - 1) / 2);
  GIVES(CUDA_ERROR_INVALID_VALUE,
        cuFuncSetAttribute(sum, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 20));
  void* parameters[] = {&b.address, &b.address};
  GIVES(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        cuLaunchCooperativeKernel(add, 100000, 1, 1, 1024, 1, 1, 0, nullptr, parameters));
  GIVES(CUDA_ERROR_INVALID_HANDLE, launch(nullptr, 1, 0, nullptr, b.address, 1));
  OK(cuCtxSynchronize());
}

TEST_CASE("launches with attributes") {
  Session session;
  Buffer<int> b(1);
  CUlaunchAttribute attributes[2] = {};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  attributes[0].value.cooperative = 1;
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  attributes[1].value.priority = -1;
  CUlaunchConfig config{};
  config.gridDimX = 2;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.blockDimX = 32;
  config.attrs = attributes;
  config.numAttrs = 2;
  int v = 1;
  void* parameters[] = {&b.address, &v};
  OK(cuLaunchKernelEx(&config, session.function("addTo"), parameters, nullptr));
  CHECK(b.get()[0] == 64);
  int blocks = 0, minGrid = 0, blockSize = 0;
  CUfunction f = session.function("addTo");
  OK(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 256, 0));
  CHECK(blocks >= 1);
  OK(cuOccupancyMaxPotentialBlockSize(&minGrid, &blockSize, f, nullptr, 0, 0));
  CHECK(blockSize >= 32);
  CHECK(minGrid >= 1);
}

TEST_CASE("a fault sticks to its context and to nothing else") {
  OK(cuInit(0));
  CUcontext context = nullptr;
  OK(cuCtxCreate(&context, nullptr, 0, 0));
  CUmodule module = nullptr;
  OK(cuModuleLoadData(&module, kKernels));
  CUfunction bad = nullptr;
  OK(cuModuleGetFunction(&bad, module, "badStore"));
  CUevent event;
  OK(cuEventCreate(&event, 0));
  OK(launch(bad, 1, 0, nullptr, CUdeviceptr(0x10)));
  GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
  CUdeviceptr p;
  GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc(&p, 16));
  GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(nullptr));
  GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventQuery(event));
  cuCtxDestroy(context);
}

TEST_CASE("a process's own memory is not the kernels', also once they used shared memory") {
  static int fixed = 7;
  int onStack = 7;
  std::vector<int> mapped(1 << 20, 7);  // large enough for a mapping of its own
  OK(cuInit(0));
  for (int* own : {&fixed, &onStack, mapped.data()}) {
    CUcontext context = nullptr;
    OK(cuCtxCreate(&context, nullptr, 0, 0));
    CUmodule module = nullptr;
    OK(cuModuleLoadData(&module, kKernels));
    CUfunction sum = nullptr, bad = nullptr;
    OK(cuModuleGetFunction(&sum, module, "sumShared"));
    OK(cuModuleGetFunction(&bad, module, "badStore"));
    {
      Buffer<int> total(1);
      OK(launch(sum, 32, 64 * sizeof(int), nullptr, total.address, 64));
      CHECK(total.get()[0] == 63 * 64 / 2);
    }
    OK(launch(bad, 1, 0, nullptr, own));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
    CHECK(*own == 7);
    cuCtxDestroy(context);
  }
}
