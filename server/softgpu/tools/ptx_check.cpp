// ptx-check [--compile] FILE...: loads each PTX file as cuModuleLoadData would and says OK, or what is wrong
// with it. With --compile also generates machine code for every kernel. Exit status: how many files failed
// (at most 100).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "server/softgpu/engine.h"

namespace gpupool::softgpu {

// Nothing runs here, so no texture is ever fetched.
bool fetchTexture(uint64_t, const TextureFetch&, uint32_t*) { return false; }
bool surfaceStore(uint64_t, int, int32_t, int32_t, int32_t, const void*, uint32_t, int) { return false; }
bool surfaceLoad(uint64_t, int, int32_t, int32_t, int32_t, void*, uint32_t, int) { return false; }

}  // namespace gpupool::softgpu

namespace {

using namespace gpupool::softgpu;

double milliseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

bool check(const char* path, bool compile) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::printf("%s: cannot be read\n", path);
    return false;
  }
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::string_view source = text;
  CompileError error;
  auto begin = std::chrono::steady_clock::now();
  auto place = [](const GlobalInfo& info) {
    return reinterpret_cast<uint64_t>(std::aligned_alloc(4096, (info.size + 8191) & ~uint64_t{4095}));
  };
  auto program = load({&source, 1}, place, error);
  if (program == nullptr) {
    std::printf("%s: %s\n", path, error.text.c_str());
    return false;
  }
  double loaded = milliseconds(std::chrono::steady_clock::now() - begin);
  bool fine = true;
  begin = std::chrono::steady_clock::now();
  if (compile)
    for (const KernelInfo& info : program->kernels())
      if (!prepare(*program->kernel(info.name))) {
        std::printf("%s: %s: code generation failed\n", path, info.name.c_str());
        fine = false;
      }
  double compiled = milliseconds(std::chrono::steady_clock::now() - begin);
  if (fine)
    std::printf("%s: OK, %zu kernels, load %.1f ms, compile %.1f ms\n", path, program->kernels().size(),
                loaded, compiled);
  return fine;
}

}  // namespace

int main(int argc, char** argv) {
  bool compile = false;
  int failed = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--compile") == 0)
      compile = true;
    else
      failed += !check(argv[i], compile);
  }
  return std::min(failed, 100);
}
