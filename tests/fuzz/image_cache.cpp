// Files of the image cache, which anybody may have damaged, and images that arrive in pieces.
//
// Input: u8: bit 0 the pieces' name is right, bit 1 a note is kept; u8 pieces; u16 length, the image; then
// changes to its file: u16 new length (0xffff: as it is), {u16 where, u8 byte}.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/content.h"
#include "server/images/image_cache.h"
#include "tests/fuzz/input.h"

using namespace gpupool;

namespace {

const std::string& folder() {
  static const auto* path = [] {
    char name[] = "/dev/shm/gpupool-fuzz-XXXXXX";
    if (mkdtemp(name) == nullptr) __builtin_trap();
    std::atexit([] { std::filesystem::remove_all(folder()); });
    return new std::string(name);  // until behind that
  }();
  return *path;
}

void change(const std::string& path, fuzz::Input& input) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  const auto length = input.value<uint16_t>();
  if (length != 0xffff && ftruncate(file, length) != 0) __builtin_trap();
  for (int i = 0; i < 64 && !input.empty(); ++i) {
    const auto at = input.value<uint16_t>();
    const auto byte = input.value<uint8_t>();
    if (pwrite(file, &byte, 1, at) != 1) __builtin_trap();
  }
  close(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto kind = input.value<uint8_t>();
  const size_t pieces = input.value<uint8_t>() % 8 + 1;
  const auto bytes = input.blob();
  server::ImageCache cache(server::openFolder(folder()), 1 << 20);
  server::ImageKey key;
  if ((kind & 1) != 0) key.digest = contentDigest(bytes);
  key.bytes = bytes.size();
  auto writer = cache.write(key);
  if (writer == nullptr) __builtin_trap();
  for (size_t i = 0; i < pieces; ++i) {
    const size_t from = bytes.size() * i / pieces, to = bytes.size() * (i + 1) / pieces;
    if (!writer->append(bytes.subspan(from, to - from))) __builtin_trap();
  }
  auto image = writer->finish();
  if (image == nullptr) return 0;
  if ((kind & 2) != 0) cache.keepNote(key, *image, {90, 1});
  const std::string path = folder() + ("/" + image->file);
  image.reset();
  change(path, input);
  if (auto again = cache.open(key)) {
    // Whatever happened to the file: what is given out is what the name says, with a zero behind it.
    if (again->bytes().size() != bytes.size() || contentDigest(again->bytes()) != key.digest)
      __builtin_trap();
    if (again->bytes().data()[bytes.size()] != std::byte{0}) __builtin_trap();
    if (again->note && (again->note->architecture != 90 || again->note->mayPrint != 1)) __builtin_trap();
  }
  unlink(path.c_str());
  return 0;
}
