// Fatbins: what is read, what is refused, and what is known of them without running anything.
#include <lz4.h>
#include <zstd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "server/fatbin/fatbin.h"

#include "catch.h"

using namespace gpupool::fatbin;

namespace {

using Bytes = std::vector<std::byte>;

struct Part {
  uint16_t kind;
  uint32_t arch;
  std::string code;
  uint64_t packing = 0;  // kLz4, kZstd or 0
};

void put(Bytes& out, const void* data, size_t bytes) {
  out.resize(out.size() + bytes);
  std::memcpy(out.data() + out.size() - bytes, data, bytes);
}

Bytes pack(const Part& part) {
  Bytes out(ZSTD_compressBound(part.code.size()) + 64);
  auto* to = reinterpret_cast<char*>(out.data());
  size_t n = 0;
  if (part.packing == kLz4)
    n = static_cast<size_t>(
        LZ4_compress_default(part.code.data(), to, int(part.code.size()), int(out.size())));
  else if (part.packing == kZstd)
    n = ZSTD_compress(to, out.size(), part.code.data(), part.code.size(), 3);
  else
    n = part.code.copy(to, part.code.size());
  out.resize(n);
  return out;
}

Bytes fatbin(const std::vector<Part>& parts) {
  Bytes body;
  for (const Part& part : parts) {
    Bytes code = pack(part);
    EntryHeader entry{};
    entry.kind = part.kind;
    entry.version = 0x0101;
    entry.headerBytes = sizeof entry;
    entry.compressedBytes = part.packing != 0 ? static_cast<uint32_t>(code.size()) : 0;
    code.resize((code.size() + 7) / 8 * 8);
    entry.payloadBytes = static_cast<uint32_t>(code.size());
    entry.arch = part.arch;
    entry.flags = 0x11 | part.packing;
    entry.plainBytes = part.packing != 0 ? part.code.size() : 0;
    put(body, &entry, sizeof entry);
    put(body, code.data(), code.size());
  }
  const Header header{kMagic, 1, sizeof(Header), body.size()};
  Bytes out;
  put(out, &header, sizeof header);
  put(out, body.data(), body.size());
  return out;
}

std::span<const std::byte> bytesOf(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string text(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

const std::string kQuiet(5000, 'q');
const std::string kLoud = std::string(3000, 'l') + "vprintf" + std::string(3000, 'l');

}  // namespace

TEST_CASE("entries come back as they were, whatever they are packed with") {
  const Bytes image = fatbin({{kPtx, 75, kQuiet, kZstd}, {kElf, 90, kLoud, kLz4}, {kElf, 100, kQuiet, 0}});
  std::vector<Entry> entries;
  REQUIRE(readEntries(image, entries));
  REQUIRE(entries.size() == 3);
  Bytes plain;
  REQUIRE(expand(entries[0], plain));
  CHECK(text(plain) == kQuiet);
  REQUIRE(expand(entries[1], plain));
  CHECK(text(plain) == kLoud);
  REQUIRE(expand(entries[2], plain));
  CHECK(text(plain).substr(0, kQuiet.size()) == kQuiet);
  CHECK_FALSE(expand(entries[0], plain, kQuiet.size() - 1));
  CHECK_FALSE(expand(entries[1], plain, kLoud.size() - 1));
  CHECK_FALSE(expand(entries[2], plain, kQuiet.size() - 1));
  CHECK(fits(image));
  CHECK_FALSE(fits(std::span(image).first(image.size() - 1)));
}

TEST_CASE("lengths that lead out of their container are refused") {
  Bytes image = fatbin({{kPtx, 75, kQuiet, 0}, {kElf, 90, kQuiet, kZstd}});
  auto set = [&](size_t at, auto value) { std::memcpy(image.data() + at, &value, sizeof value); };
  SECTION("the body") { set(8, uint64_t{image.size()}); }
  SECTION("the body, overflowing") { set(8, ~uint64_t{0} - 8); }
  SECTION("the header's own") { set(6, uint16_t{15}); }
  SECTION("an entry's header, short") { set(16 + 4, uint32_t{63}); }
  SECTION("an entry's header, long") { set(16 + 4, uint32_t{0x7fffffff}); }
  SECTION("an entry's payload") { set(16 + 8, uint32_t{0xfffffff8}); }
  SECTION("magic") { set(0, uint32_t{0xba55ed51}); }
  std::vector<Entry> entries;
  CHECK_FALSE(readEntries(image, entries));
}

TEST_CASE("a packed length is not believed") {
  std::vector<Entry> entries;
  for (uint64_t packing : {kLz4, kZstd}) {
    const Bytes image = fatbin({{kElf, 90, kQuiet, packing}});
    entries.clear();
    REQUIRE(readEntries(image, entries));
    Bytes plain;
    Entry wrong = entries[0];
    wrong.header.plainBytes += 1;
    CHECK_FALSE(expand(wrong, plain));
    wrong.header.plainBytes = kQuiet.size() - 1;
    CHECK_FALSE(expand(wrong, plain));
    wrong.header.plainBytes = uint64_t{1} << 40;
    CHECK_FALSE(expand(wrong, plain));
    wrong = entries[0];
    wrong.header.compressedBytes = wrong.header.payloadBytes + 1;
    CHECK_FALSE(expand(wrong, plain));
    wrong.header.compressedBytes = 4;
    CHECK_FALSE(expand(wrong, plain));
  }
}

TEST_CASE("whether kernels print is found in the code that would run") {
  for (uint64_t packing : {uint64_t{0}, kLz4, kZstd}) {
    CHECK(mayPrint(fatbin({{kElf, 90, kLoud, packing}}), 90));
    CHECK_FALSE(mayPrint(fatbin({{kElf, 90, kQuiet, packing}}), 90));
    // Machine code before PTX, the newest that runs, of this generation only.
    CHECK_FALSE(mayPrint(fatbin({{kPtx, 75, kLoud, packing}, {kElf, 90, kQuiet, packing}}), 90));
    CHECK_FALSE(mayPrint(fatbin({{kElf, 80, kLoud, packing}, {kElf, 86, kQuiet, packing}}), 89));
    CHECK(mayPrint(fatbin({{kElf, 80, kQuiet, packing}, {kElf, 86, kLoud, packing}}), 89));
    CHECK(mayPrint(fatbin({{kElf, 80, kLoud, packing}, {kElf, 90, kQuiet, packing}}), 86));
    CHECK(mayPrint(fatbin({{kElf, 80, kQuiet, packing}, {kPtx, 80, kLoud, packing}}), 90));
    // Of two that are alike to the container (sm_90 and sm_90a) either may run.
    CHECK(mayPrint(fatbin({{kElf, 90, kQuiet, packing}, {kElf, 90, kLoud, packing}}), 90));
    CHECK_FALSE(mayPrint(fatbin({{kElf, 100, kLoud, packing}}), 90));  // the driver will refuse it
  }
}

TEST_CASE("code outside fatbins") {
  CHECK(mayPrint(bytesOf(".version 8.0\n.extern .func vprintf;"), 90));
  CHECK_FALSE(mayPrint(bytesOf(".version 8.0\n.entry k() { ret; }"), 90));
  CHECK_FALSE(mayPrint(bytesOf("x"), 90));
  CHECK_FALSE(mayPrint({}, 90));
}

TEST_CASE("what cannot be read may print") {
  Bytes image = fatbin({{kElf, 90, kQuiet, kZstd}});
  image[16 + 64 + 20] ^= std::byte{0x55};
  image[16 + 64 + 21] ^= std::byte{0x55};
  image[16 + 64] ^= std::byte{0x55};  // the frame's magic
  CHECK(mayPrint(image, 90));
  image = fatbin({{kElf, 90, kQuiet, 0}});
  image.resize(image.size() - 8);
  CHECK(mayPrint(image, 90));
}

TEST_CASE("any bytes are survived") {
  const Bytes good = fatbin({{kPtx, 75, kLoud, kZstd}, {kElf, 90, kQuiet, kLz4}, {kElf, 90, kLoud, kZstd}});
  std::mt19937 random(1);
  Bytes plain;
  size_t read = 0;
  for (int round = 0; round < 20000; ++round) {
    Bytes image = good;
    for (unsigned n = 1 + random() % 8; n > 0; --n) {
      // Headers more often than payloads.
      const size_t at = random() % (random() % 2 == 0 ? 200 : image.size());
      image[at] = static_cast<std::byte>(random() % 4 == 0 ? 0xff : random());
    }
    image.resize(random() % 4 == 0 ? random() % (image.size() + 1) : image.size());
    std::vector<Entry> entries;
    if (readEntries(image, entries)) ++read;
    for (const Entry& entry : entries) expand(entry, plain, 1 << 20);
    mayPrint(image, 90);
  }
  CHECK(read > 1000);
}
