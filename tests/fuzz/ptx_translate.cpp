// PTX text up to LLVM's IR, as cuModuleLoadData has it checked: any text is translated, or refused with a
// reason.
//
// Input: the text.
#include <sys/mman.h>

#include <cstdlib>

#include "server/softgpu/engine.h"

namespace gpupool::softgpu {

// Nothing runs here, so no texture is ever fetched.
bool fetchTexture(uint64_t, const TextureFetch&, uint32_t*) { return false; }
bool surfaceStore(uint64_t, int, int32_t, int32_t, int32_t, const void*, uint32_t, int) { return false; }
bool surfaceLoad(uint64_t, int, int32_t, int32_t, int32_t, void*, uint32_t, int) { return false; }

}  // namespace gpupool::softgpu

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool::softgpu;
  const std::string_view source(reinterpret_cast<const char*>(data), size);
  // Memory of a device with 1 MiB.
  static auto* memory = static_cast<std::byte*>(std::aligned_alloc(65536, 1 << 20));
  size_t used = 0;
  auto place = [&](const GlobalInfo& info) -> uint64_t {
    const size_t alignment = info.alignment == 0 ? 1 : info.alignment;
    const size_t at = (used + alignment - 1) / alignment * alignment;
    if (at > (1 << 20) || info.size > (1 << 20) - at) return 0;
    used = at + info.size;
    std::fill_n(memory + at, info.size, std::byte{0});
    return reinterpret_cast<uint64_t>(memory + at);
  };
  CompileError error;
  load({&source, 1}, place, error);
  return 0;
}
