#include "client/image.h"

#include <elf.h>

#include <cstring>
#include <string>

#include "catch.h"

using namespace gpupool::client;

namespace {

struct Wrapper {
  uint32_t magic = 0x466243B1;
  uint32_t version = 1;
  const void* data = nullptr;
  const void* aux = nullptr;
};

std::vector<std::byte> fatbin(uint64_t content, uint16_t headerBytes = 16) {
  std::vector<std::byte> made(headerBytes + content, std::byte{0x33});
  const uint32_t magic = 0xBA55ED50;
  const uint16_t version = 1;
  std::memcpy(&made[0], &magic, 4);
  std::memcpy(&made[4], &version, 2);
  std::memcpy(&made[6], &headerBytes, 2);
  std::memcpy(&made[8], &content, 8);
  return made;
}

// Header, section table at 64, then one section with contents, one program header at the end.
std::vector<std::byte> cubin() {
  std::vector<std::byte> made(64 + 3 * 64 + 40 + 56);
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_machine = 190;
  header.e_shoff = 64;
  header.e_shnum = 3;
  header.e_shentsize = 64;
  header.e_phoff = 64 + 3 * 64 + 40;
  header.e_phnum = 1;
  header.e_phentsize = 56;
  Elf64_Shdr sections[3] = {};
  sections[1].sh_type = SHT_PROGBITS;
  sections[1].sh_offset = 64 + 3 * 64;
  sections[1].sh_size = 40;
  sections[2].sh_type = SHT_NOBITS;
  sections[2].sh_offset = 0x10000000;
  sections[2].sh_size = 0x10000000;
  std::memcpy(made.data(), &header, sizeof header);
  std::memcpy(made.data() + 64, sections, sizeof sections);
  return made;
}

}  // namespace

TEST_CASE("image: fatbins, bare and wrapped") {
  const auto inner = fatbin(100), other = fatbin(10);
  CodeImage image;
  CHECK(recogniseImage(inner.data(), &image) == CUDA_SUCCESS);
  CHECK(image.form == ImageForm::fatbin);
  CHECK(image.bytes.size() == 116);
  CHECK(wrapperVersion(image.form) == 0);

  Wrapper wrapper{.data = inner.data()};
  CHECK(recogniseImage(&wrapper, &image) == CUDA_SUCCESS);
  CHECK(image.form == ImageForm::wrapper1);
  CHECK(image.bytes.data() == inner.data());
  CHECK(image.bytes.size() == 116);
  CHECK(wrapperVersion(image.form) == 1);

  const void* parts[] = {other.data(), inner.data(), nullptr};
  Wrapper linked{.version = 2, .data = inner.data(), .aux = parts};
  CHECK(recogniseImage(&linked, &image) == CUDA_SUCCESS);
  CHECK(image.form == ImageForm::wrapper2);
  CHECK(wrapperVersion(image.form) == 2);
  REQUIRE(image.prelinked.size() == 2);
  CHECK(image.prelinked[0].size() == 26);
}

TEST_CASE("image: broken wrappers and fatbins") {
  CodeImage image;
  auto inner = fatbin(100);
  Wrapper wrapper{.version = 3, .data = inner.data()};
  CHECK(recogniseImage(&wrapper, &image) == CUDA_ERROR_INVALID_IMAGE);
  wrapper = {};
  CHECK(recogniseImage(&wrapper, &image) == CUDA_ERROR_INVALID_IMAGE);
  const void* parts[] = {"no fatbin, this", nullptr};
  wrapper = {.version = 2, .data = inner.data(), .aux = parts};
  CHECK(recogniseImage(&wrapper, &image) == CUDA_ERROR_INVALID_IMAGE);
  const uint64_t huge = ~uint64_t{0} - 8;
  std::memcpy(&inner[8], &huge, 8);
  CHECK(recogniseImage(inner.data(), &image) == CUDA_ERROR_INVALID_IMAGE);
  CHECK(recogniseImage(nullptr, &image) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("image: ELF ends where its last table or section does") {
  auto elf = cubin();
  CodeImage image;
  CHECK(recogniseImage(elf.data(), &image) == CUDA_SUCCESS);
  CHECK(image.form == ImageForm::elf);
  CHECK(image.bytes.size() == elf.size());

  Elf64_Shdr section;
  std::memcpy(&section, &elf[64 + 64], sizeof section);
  section.sh_size = ~uint64_t{0};
  std::memcpy(&elf[64 + 64], &section, sizeof section);
  CHECK(recogniseImage(elf.data(), &image) == CUDA_ERROR_INVALID_IMAGE);
  elf = cubin();
  elf[EI_CLASS] = std::byte{ELFCLASS32};
  CHECK(recogniseImage(elf.data(), &image) == CUDA_ERROR_INVALID_IMAGE);
}

TEST_CASE("image: PTX is text") {
  CodeImage image;
  for (const std::string text : {"\n   .version 8.0\n.target sm_50\n",
                                 "//\n// made by a compiler\n.version 9.0\n", ".version 8.0", "\t.v", "x"}) {
    CHECK(recogniseImage(text.c_str(), &image) == CUDA_SUCCESS);
    CHECK(image.form == ImageForm::ptx);
    CHECK(image.bytes.size() == text.size() + 1);
  }
  CHECK(recogniseImage("", &image) == CUDA_ERROR_INVALID_IMAGE);
  CHECK(recogniseImage("\x01\x5a\xe5\x1e", &image) == CUDA_ERROR_INVALID_IMAGE);
}

TEST_CASE("image: names tell contents apart") {
  const auto one = fatbin(100), same = fatbin(100), longer = fatbin(101);
  const auto a = nameOfImage(one), b = nameOfImage(same), c = nameOfImage(longer);
  CHECK(std::memcmp(&a, &b, sizeof a) == 0);
  CHECK(std::memcmp(a.words, c.words, sizeof a.words) != 0);
  CHECK(c.bytes == 117);
  // FIPS 180-4's example: "abc".
  const auto abc = nameOfImage(std::as_bytes(std::span("abc", 3)));
  const unsigned char first[8] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea};
  CHECK(std::memcmp(abc.words, first, 8) == 0);
}
