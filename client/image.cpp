#include "client/image.h"

#include <elf.h>

#include <algorithm>
#include <cstring>

#include "base/content.h"

namespace gpupool::client {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243B1;
constexpr uint32_t kFatbinMagic = 0xBA55ED50;
constexpr size_t kMaxPrelinked = 4096;

struct Wrapper {
  uint32_t magic;
  uint32_t version;
  const void* data;
  const void* const* prelinked;
};
static_assert(sizeof(Wrapper) == 24);

struct FatbinHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t headerBytes;
  uint64_t contentBytes;
};
static_assert(sizeof(FatbinHeader) == 16);

template <typename T>
T load(const void* from, uint64_t offset = 0) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(from) + offset, sizeof value);
  return value;
}

std::span<const std::byte> spanOf(const void* data, size_t bytes) {
  return {static_cast<const std::byte*>(data), bytes};
}

bool measureFatbin(const void* image, std::span<const std::byte>* out) {
  if (image == nullptr || load<uint32_t>(image) != kFatbinMagic) return false;
  const auto header = load<FatbinHeader>(image);
  if (header.headerBytes < sizeof header || header.contentBytes > kMaxImageBytes) return false;
  *out = spanOf(image, header.headerBytes + header.contentBytes);
  return true;
}

// Raises `end` to offset + bytes; false where that cannot be.
bool cover(uint64_t offset, uint64_t bytes, uint64_t* end) {
  if (offset > kMaxImageBytes || bytes > kMaxImageBytes - offset) return false;
  *end = std::max(*end, offset + bytes);
  return true;
}

// The end of the last of: section table, program header table, sections with contents.
bool measureElf(const void* image, std::span<const std::byte>* out) {
  const auto header = load<Elf64_Ehdr>(image);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB) return false;
  uint64_t end = sizeof header;
  if (header.e_phnum > 0 && !cover(header.e_phoff, uint64_t{header.e_phnum} * header.e_phentsize, &end)) {
    return false;
  }
  if (header.e_shoff != 0) {
    if (header.e_shentsize < sizeof(Elf64_Shdr) || header.e_shoff > kMaxImageBytes) return false;
    uint64_t count = header.e_shnum;
    if (count == 0)
      count = load<Elf64_Shdr>(image, header.e_shoff).sh_size;  // too many for the header's field
    if (count > kMaxImageBytes / header.e_shentsize) return false;
    if (!cover(header.e_shoff, count * header.e_shentsize, &end)) return false;
    for (uint64_t i = 0; i < count; ++i) {
      const auto section = load<Elf64_Shdr>(image, header.e_shoff + i * header.e_shentsize);
      if (section.sh_type == SHT_NOBITS || section.sh_type == SHT_NULL) continue;
      if (!cover(section.sh_offset, section.sh_size, &end)) return false;
    }
  }
  *out = spanOf(image, end);
  return true;
}

// Text, with its final zero. Recognised by being none of the others and starting with a character, because
// cuDNN's starts with blanks and NVRTC's with comments.
bool measurePtx(const void* image, std::span<const std::byte>* out) {
  const auto* text = static_cast<const char*>(image);
  const auto first = static_cast<unsigned char>(text[0]);
  const bool blank = first == ' ' || (first >= '\t' && first <= '\r');
  const bool byteOrderMark = first == 0xef && std::strncmp(text, "\xef\xbb\xbf", 3) == 0;
  if (!blank && !byteOrderMark && (first < '!' || first > '~')) return false;
  const size_t length = strnlen(text, kMaxImageBytes);
  if (length == kMaxImageBytes) return false;
  *out = spanOf(image, length + 1);
  return true;
}

bool openWrapper(const void* image, CodeImage* out) {
  const auto wrapper = load<Wrapper>(image);
  if (wrapper.version != 1 && wrapper.version != 2) return false;
  out->form = wrapper.version == 1 ? ImageForm::wrapper1 : ImageForm::wrapper2;
  if (!measureFatbin(wrapper.data, &out->bytes)) return false;
  if (wrapper.version == 1 || wrapper.prelinked == nullptr) return true;
  for (size_t i = 0; wrapper.prelinked[i] != nullptr; ++i) {
    std::span<const std::byte> part;
    if (i == kMaxPrelinked || !measureFatbin(wrapper.prelinked[i], &part)) return false;
    out->prelinked.push_back(part);
  }
  return true;
}

}  // namespace

CUresult recogniseImage(const void* image, CodeImage* out) {
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = {};
  bool good = false;
  // Byte by byte up to the first difference: a short text may end where memory does.
  const auto* bytes = static_cast<const unsigned char*>(image);
  const auto begins = [bytes](uint32_t magic) {
    for (unsigned i = 0; i < 4; ++i) {
      if (bytes[i] != (magic >> 8 * i & 0xff)) return false;
    }
    return true;
  };
  constexpr uint32_t kElfMagic = 0x464c457f;
  if (begins(kWrapperMagic)) {
    good = openWrapper(image, out);
  } else if (begins(kFatbinMagic)) {
    out->form = ImageForm::fatbin;
    good = measureFatbin(image, &out->bytes);
  } else if (begins(kElfMagic)) {
    out->form = ImageForm::elf;
    good = measureElf(image, &out->bytes);
  } else {
    out->form = ImageForm::ptx;
    good = measurePtx(image, &out->bytes);
  }
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

schema::ImageName nameOfImage(std::span<const std::byte> bytes) {
  const Digest digest = contentDigest(bytes);
  schema::ImageName name;
  static_assert(sizeof name.words == sizeof digest);
  std::memcpy(name.words, digest.data(), sizeof name.words);
  name.bytes = bytes.size();
  return name;
}

}  // namespace gpupool::client
