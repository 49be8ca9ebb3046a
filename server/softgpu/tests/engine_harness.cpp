#include "server/softgpu/tests/engine_harness.h"

#include <atomic>
#include <fstream>
#include <iterator>

#include "server/softgpu/tests/addresses.h"

namespace gpupool::softgpu::test {

namespace {
std::atomic<uint64_t> nextAddress{kUnusedAddresses};
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_((bytes + 4095) & ~size_t{4095}) {
  uint64_t hint = nextAddress.fetch_add(bytes_ + (1 << 20));
  void* mapped = mmap(reinterpret_cast<void*>(hint), bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  REQUIRE(mapped != MAP_FAILED);
  address_ = reinterpret_cast<uint64_t>(mapped);
  markVisible(address_, bytes_);
}

DeviceMemory::~DeviceMemory() {
  unmarkVisible(address_, bytes_);
  munmap(reinterpret_cast<void*>(address_), bytes_);
}

Loaded::Loaded(const std::vector<std::string>& sources) {
  std::vector<std::string_view> views(sources.begin(), sources.end());
  program_ = load(
      views,
      [this](const GlobalInfo& info) {
        globals_.push_back(std::make_unique<DeviceMemory>(info.size));
        return globals_.back()->address();
      },
      error_);
}

uint64_t Loaded::global(const std::string& name) const {
  for (const GlobalInfo& info : program_->globals())
    if (info.name == name) return info.address;
  return 0;
}

Outcome Loaded::launch(const std::string& kernel, const std::vector<uint32_t>& grid,
                       const std::vector<uint32_t>& block, const std::vector<std::byte>& packed) {
  Launch one;
  one.kernel = program_->kernel(kernel);
  REQUIRE(one.kernel != nullptr);
  for (size_t i = 0; i < grid.size(); ++i) one.grid[i] = grid[i];
  for (size_t i = 0; i < block.size(); ++i) one.block[i] = block[i];
  one.parameters = packed;
  one.dynamicSharedBytes = dynamicShared;
  one.cooperative = cooperative;
  return softgpu::run(one);
}

std::string kernelOf(const std::string& body, const std::string& module) {
  return ".version 9.0\n.target sm_90\n.address_size 64\n" + module +
         ".visible .entry test(.param .u64 in, .param .u64 out)\n{\n"
         ".reg .pred %p<8>; .reg .b16 %rs<32>; .reg .b32 %r<32>; .reg .b64 %rd<32>; .reg .f32 %f<32>;\n"
         ".reg .f64 %fd<32>; .reg .b64 %in, %out, %src, %dst; .reg .b32 %i;\n"
         "ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %i, %tid.x;\n" +
         body + "\nret;\n}\n";
}

std::string readFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The engine's tests use no textures but those of the texture test: an object is the address of 16 words.
}  // namespace gpupool::softgpu::test

namespace gpupool::softgpu {

bool fetchTexture(uint64_t object, const TextureFetch& fetch, uint32_t* result) {
  if (object == 0) return false;
  result[0] = static_cast<uint32_t>(object);
  result[1] = static_cast<uint32_t>(fetch.geometry);
  result[2] = static_cast<uint32_t>(fetch.integerCoordinates ? fetch.integerCoordinate[0]
                                                             : static_cast<int32_t>(fetch.coordinate[0]));
  result[3] = static_cast<uint32_t>(fetch.layer);
  return true;
}

bool surfaceStore(uint64_t object, int dimensions, int32_t x, int32_t y, int32_t z, const void* data,
                  uint32_t bytes, int) {
  if (object == 0) return false;
  std::memcpy(
      reinterpret_cast<char*>(object) + x + (dimensions > 1 ? y * 64 : 0) + (dimensions > 2 ? z * 1024 : 0),
      data, bytes);
  return true;
}

bool surfaceLoad(uint64_t object, int dimensions, int32_t x, int32_t y, int32_t z, void* data, uint32_t bytes,
                 int) {
  if (object == 0) return false;
  std::memcpy(
      data,
      reinterpret_cast<char*>(object) + x + (dimensions > 1 ? y * 64 : 0) + (dimensions > 2 ? z * 1024 : 0),
      bytes);
  return true;
}

}  // namespace gpupool::softgpu
