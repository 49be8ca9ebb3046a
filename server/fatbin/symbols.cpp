#include "server/fatbin/symbols.h"

#include <cstring>
#include <iterator>
#include <string_view>
#include <unordered_set>

#include "server/fatbin/contents.h"
#include "server/fatbin/fatbin.h"

namespace gpupool::fatbin {
namespace {

bool readCode(std::span<const std::byte> code, Contents& contents) {
  const std::string_view text(reinterpret_cast<const char*>(code.data()), code.size());
  uint32_t magic = 0;
  if (code.size() >= sizeof magic) std::memcpy(&magic, code.data(), sizeof magic);
  if (magic == kElfMagic) return readCubin(code, contents);
  return readPtx(text.substr(0, text.find('\0')), contents);  // fatbins pad PTX with zeros
}

// Those of `parts` that the driver takes.
Parts taken(Parts parts, unsigned architecture) {
  if (parts.size() < 2) return parts;
  bool any = false;
  const bool read = eachChosen(parts[0], architecture, [&](std::span<const std::byte> code) {
    any = !code.empty();
    return true;
  });
  return any || !read ? parts.first(1) : parts.subspan(1);
}

}  // namespace

bool readLinkedSymbols(Parts parts, unsigned architecture, std::vector<Symbol>& symbols) {
  std::vector<Symbol> all;
  std::unordered_set<std::string> names;  // of the pieces before: sm_90 and sm_90a have the same variables
  auto add = [&](std::span<const std::byte> code) {
    Contents contents;
    if (!readCode(code, contents)) return false;
    const size_t before = all.size();
    for (Symbol& symbol : contents.symbols)
      if (!names.contains(symbol.name)) all.push_back(std::move(symbol));
    for (size_t i = before; i < all.size(); ++i) names.insert(all[i].name);
    return true;
  };
  for (std::span<const std::byte> part : taken(parts, architecture))
    if (!eachChosen(part, architecture, add)) return false;
  symbols.insert(symbols.end(), std::make_move_iterator(all.begin()), std::make_move_iterator(all.end()));
  return true;
}

// The device runtime library, which nvcc links to everything, does not count: who allocates through it is
// found by the name of what it calls.
bool linkedMayAllocate(Parts parts, unsigned architecture) {
  auto cannot = [](std::span<const std::byte> code) {
    Contents contents;
    return readCode(code, contents) && (!contents.allocates || contents.runtime);
  };
  for (std::span<const std::byte> part : taken(parts, architecture))
    if (!eachChosen(part, architecture, cannot)) return true;
  return false;
}

bool readSymbols(std::span<const std::byte> image, unsigned architecture, std::vector<Symbol>& symbols) {
  return readLinkedSymbols({&image, 1}, architecture, symbols);
}

bool mayAllocate(std::span<const std::byte> image, unsigned architecture) {
  return linkedMayAllocate({&image, 1}, architecture);
}

}  // namespace gpupool::fatbin
