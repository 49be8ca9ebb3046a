// Fatbins as a client sends them: their entries, unpacked, what their kernels may do, and their variables.
//
// Input: u8 architecture; the image.
#include <vector>

#include "server/fatbin/fatbin.h"
#include "server/fatbin/symbols.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool;
  fuzz::Input input(data, size);
  const unsigned architecture = input.value<uint8_t>();
  auto all = input.all();
  // A copy of its own: what is read beyond it is seen.
  const std::vector<std::byte> image(all.begin(), all.end());
  fatbin::mayPrint(image, architecture);
  fatbin::mayAllocate(image, architecture);
  std::vector<fatbin::Symbol> symbols;
  fatbin::readSymbols(image, architecture, symbols);
  std::vector<fatbin::Entry> entries;
  if (!fatbin::readEntries(image, entries)) return 0;
  std::vector<std::byte> plain;
  for (const auto& entry : entries) {
    fuzz::touch(entry.payload.data(), entry.payload.size());
    if (fatbin::expand(entry, plain, 1 << 20)) fuzz::touch(plain.data(), plain.size());
  }
  return 0;
}
