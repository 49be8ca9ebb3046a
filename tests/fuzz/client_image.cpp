// Code as applications hand it over, without a length: the client measures it. It is the application's own
// memory and may not be read further than its own sizes lead, which are bounded: so the input lies at the
// beginning of as much memory as an image may have, zeros behind it.
//
// Input: u8: bit 0: inside nvcc's wrapper of version 1, bit 1: of version 2, with the image twice; the image.
#include <sys/mman.h>

#include "client/image.h"
#include "tests/fuzz/input.h"

using namespace gpupool;

namespace {

constexpr size_t kBehind = 1 << 20;  // the end of the last header that is read

std::byte* memory() {
  static auto* at =
      static_cast<std::byte*>(mmap(nullptr, client::kMaxImageBytes + kBehind, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED) __builtin_trap();
  return at;
}

void inside(std::span<const std::byte> bytes) {
  const std::byte* first = memory();
  if (bytes.data() < first || bytes.data() + bytes.size() > first + client::kMaxImageBytes + kBehind)
    __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto kind = input.value<uint8_t>();
  auto bytes = input.all();
  std::byte* image = memory();
  if (!bytes.empty()) std::memcpy(image, bytes.data(), bytes.size());
  const void* parts[] = {image, nullptr};
  struct {
    uint32_t magic = 0x466243b1, version = 1;
    const void* data;
    const void* const* prelinked;
  } wrapper{.data = image, .prelinked = parts};
  if ((kind & 2) != 0) wrapper.version = 2;
  uint32_t magic = 0;
  std::memcpy(&magic, image, sizeof magic);
  // A wrapper's pointers are the application's: not from the input.
  const bool bare = (kind & 3) == 0 && magic != wrapper.magic;
  client::CodeImage code;
  if (client::recogniseImage(bare ? static_cast<const void*>(image) : &wrapper, &code) == CUDA_SUCCESS) {
    inside(code.bytes);
    for (auto part : code.prelinked) inside(part);
  }
  if (!bytes.empty()) std::memset(image, 0, bytes.size());
  return 0;
}
