// The symbol table of machine code: ELF of 64 bits, little-endian.
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "server/fatbin/contents.h"

namespace gpupool::fatbin {
namespace {

constexpr uint16_t kCudaMachine = 190;    // EM_CUDA
constexpr unsigned kCudaObject = 13;      // a variable's type before it is linked; OBJECT afterwards
constexpr unsigned char kManaged = 0x04;  // in a symbol's st_other

using CodeBytes = std::span<const std::byte>;

template <class T>
T element(CodeBytes bytes, uint64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof value);
  return value;
}

class Cubin {
 public:
  explicit Cubin(CodeBytes code) : code_(code) {}
  bool read(Contents& contents);

 private:
  enum class Place : uint8_t { other, global, constant };

  std::optional<CodeBytes> part(uint64_t offset, uint64_t bytes) const {
    if (offset > code_.size() || bytes > code_.size() - offset) return std::nullopt;
    return code_.subspan(offset, bytes);
  }
  bool readSections();
  bool readPlaces(uint32_t names);
  bool findTables();
  bool add(uint64_t index, Contents& contents);
  Place placeOf(const Elf64_Sym& symbol, uint64_t index, uint64_t& bytes) const;
  // The content of a section in the file. None: it leads beyond it, or has none there.
  std::optional<CodeBytes> content(uint64_t index, uint64_t entryBytes) const;

  CodeBytes code_;
  std::vector<Elf64_Shdr> sections_;
  std::vector<Place> places_;  // of each section
  CodeBytes symbols_, strings_, indices_;
  bool linked_ = true;
  uint64_t nameBytes_ = 0;  // of all variables so far
};

bool startsWith(CodeBytes text, std::string_view name) {
  return text.size() >= name.size() && std::memcmp(text.data(), name.data(), name.size()) == 0;
}
bool isCalled(CodeBytes text, std::string_view name) {
  return startsWith(text, name) && text.size() > name.size() && text[name.size()] == std::byte{0};
}

bool Cubin::readSections() {
  if (code_.size() < sizeof(Elf64_Ehdr)) return false;
  const auto header = element<Elf64_Ehdr>(code_, 0);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB ||
      header.e_machine != kCudaMachine || header.e_shentsize != sizeof(Elf64_Shdr))
    return false;
  linked_ = header.e_type != ET_REL;
  const auto first = part(header.e_shoff, sizeof(Elf64_Shdr));
  if (!first) return false;
  // Counts that the header has no room for stand in the first section.
  const auto spare = element<Elf64_Shdr>(*first, 0);
  const uint64_t count = header.e_shnum != 0 ? header.e_shnum : spare.sh_size;
  if (count == 0 || count > code_.size() / sizeof(Elf64_Shdr)) return false;
  const auto table = part(header.e_shoff, count * sizeof(Elf64_Shdr));
  if (!table) return false;
  sections_.resize(count);
  std::memcpy(sections_.data(), table->data(), table->size());
  return readPlaces(header.e_shstrndx != SHN_XINDEX ? header.e_shstrndx : spare.sh_link);
}

bool Cubin::readPlaces(uint32_t names) {
  const auto text = content(names, 0);
  if (!text) return false;
  places_.reserve(sections_.size());
  for (const Elf64_Shdr& section : sections_) {
    if (section.sh_name >= text->size() && section.sh_name != 0) return false;
    const CodeBytes name = text->subspan(std::min<size_t>(section.sh_name, text->size()));
    // Bank 3 holds what the user declared; the others hold parameters and what the compiler needs.
    if (isCalled(name, ".nv.global") || isCalled(name, ".nv.global.init"))
      places_.push_back(Place::global);
    else if (isCalled(name, ".nv.constant3") || startsWith(name, ".nv.constant3."))
      places_.push_back(Place::constant);
    else
      places_.push_back(Place::other);
  }
  return true;
}

std::optional<CodeBytes> Cubin::content(uint64_t index, uint64_t entryBytes) const {
  if (index >= sections_.size()) return std::nullopt;
  const Elf64_Shdr& section = sections_[index];
  if (section.sh_type == SHT_NOBITS) return std::nullopt;
  if (entryBytes != 0 && (section.sh_entsize != entryBytes || section.sh_size % entryBytes != 0))
    return std::nullopt;
  return part(section.sh_offset, section.sh_size);
}

// Exactly one symbol table, so that what is read is not more than the file.
bool Cubin::findTables() {
  uint64_t table = 0;
  for (uint64_t i = 1; i < sections_.size(); ++i) {
    if (sections_[i].sh_type != SHT_SYMTAB) continue;
    if (table != 0) return false;
    table = i;
  }
  if (table == 0) return false;
  const auto symbols = content(table, sizeof(Elf64_Sym));
  const auto strings = content(sections_[table].sh_link, 0);
  if (!symbols || !strings) return false;
  symbols_ = *symbols;
  strings_ = *strings;
  for (uint64_t i = 1; i < sections_.size(); ++i) {
    if (sections_[i].sh_type != SHT_SYMTAB_SHNDX || sections_[i].sh_link != table) continue;
    const auto indices = part(sections_[i].sh_offset, sections_[i].sh_size);
    if (!indices || indices->size() / sizeof(uint32_t) < symbols_.size() / sizeof(Elf64_Sym)) return false;
    indices_ = *indices;
    break;
  }
  return true;
}

Cubin::Place Cubin::placeOf(const Elf64_Sym& symbol, uint64_t index, uint64_t& bytes) const {
  uint64_t section = symbol.st_shndx;
  if (section == SHN_XINDEX && !indices_.empty())
    section = element<uint32_t>(indices_, index);
  else if (section >= SHN_LORESERVE)
    return Place::other;
  if (section >= places_.size()) return Place::other;
  bytes = sections_[section].sh_size;
  return places_[section];
}

// False: the symbol contradicts its section or the names.
bool Cubin::add(uint64_t index, Contents& contents) {
  const auto symbol = element<Elf64_Sym>(symbols_, index);
  if (symbol.st_name >= strings_.size()) return symbol.st_name == 0;
  const CodeBytes text = strings_.subspan(symbol.st_name);
  const unsigned type = ELF64_ST_TYPE(symbol.st_info);
  if (type == STT_FUNC || type == STT_NOTYPE) {
    for (std::string_view name : kHeapFunctions) contents.allocates |= isCalled(text, name);
    contents.runtime |= !linked_ && symbol.st_shndx != SHN_UNDEF && isCalled(text, kRuntimeMalloc);
    return true;
  }
  if (type != STT_OBJECT && type != STT_COMMON && type != kCudaObject) return true;
  uint64_t room = 0;
  const Place place = placeOf(symbol, index, room);
  if (place == Place::other) return true;
  if (symbol.st_size > room || symbol.st_value > room - symbol.st_size) return false;
  const auto end = std::find(text.begin(), text.end(), std::byte{0});
  if (end == text.end()) return false;
  const auto length = static_cast<size_t>(end - text.begin());
  // Names may overlap in the file: together they take no more than it.
  nameBytes_ += length;
  if (nameBytes_ > code_.size()) return false;
  contents.symbols.push_back({.name = {reinterpret_cast<const char*>(text.data()), length},
                              .bytes = symbol.st_size,
                              .constant = place == Place::constant,
                              .managed = (symbol.st_other & kManaged) != 0});
  return true;
}

bool Cubin::read(Contents& contents) {
  if (!readSections() || !findTables()) return false;
  for (uint64_t i = 0; i < symbols_.size() / sizeof(Elf64_Sym); ++i)
    if (!add(i, contents)) return false;
  return true;
}

}  // namespace

bool readCubin(std::span<const std::byte> code, Contents& contents) { return Cubin(code).read(contents); }

}  // namespace gpupool::fatbin
