// The variables of code images: of PTX written here, and of what nvcc makes, whole and damaged.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "server/fatbin/fatbin.h"
#include "server/fatbin/symbols.h"

#include "catch.h"

using namespace gpupool::fatbin;

namespace {

using Bytes = std::vector<std::byte>;

std::span<const std::byte> bytesOf(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string ptx(const std::string& rest) { return ".version 9.0\n.target sm_90\n.address_size 64\n" + rest; }

// "name bytes [constant] [managed]" of each, or "unreadable".
std::vector<std::string> listed(std::span<const std::byte> image, unsigned architecture = 90) {
  std::vector<Symbol> symbols;
  if (!readSymbols(image, architecture, symbols)) return {"unreadable"};
  std::vector<std::string> lines;
  lines.reserve(symbols.size());
  for (const Symbol& one : symbols)
    lines.push_back(one.name + " " + std::to_string(one.bytes) + (one.constant ? " constant" : "") +
                    (one.managed ? " managed" : ""));
  return lines;
}
std::vector<std::string> listedPtx(const std::string& rest) { return listed(bytesOf(ptx(rest))); }
using Lines = std::vector<std::string>;

bool allocatesPtx(const std::string& rest) { return mayAllocate(bytesOf(ptx(rest)), 90); }

}  // namespace

TEST_CASE("variables that PTX declares") {
  CHECK(listedPtx(".global .align 4 .u32 a = 3;\n.visible .const .align 8 .f64 b[2] = {0d0, 1.5};") ==
        Lines{"a 4", "b 16 constant"});
  CHECK(listedPtx(".weak .global .attribute(.managed) .align 8 .b8 m[80];") == Lines{"m 80 managed"});
  CHECK(listedPtx(".global .attribute(.unified(1, 2), .managed) .b64 m;") == Lines{"m 8 managed"});
  CHECK(listedPtx(".global .v4 .f32 v[3];.common .global .s16 s;.global .b128 w;.global .f16x2 h;") ==
        Lines{"v 48", "s 2", "w 16", "h 4"});
  CHECK(listedPtx(".global .b8 m[2][0x10][010], n, o[0b11U];") == Lines{"m 256", "n 1", "o 3"});
  CHECK(listedPtx(".const[2] .align 4 .b32 old[4];") == Lines{"old 16 constant"});
  CHECK(listedPtx(".global .texref t;.global .surfref s, u;.global .u32 a;") == Lines{"a 4"});
  CHECK(listedPtx(".extern .global .b8 x[];.extern .const .u32 y;.global .u32 $z$1;") == Lines{"$z$1 4"});
  CHECK(listedPtx("") == Lines{});
}

TEST_CASE("an array takes its size from its values") {
  CHECK(listedPtx(".global .u32 a[] = {1, 2, 3};") == Lines{"a 12"});
  CHECK(listedPtx(".global .u64 a[] = {generic(b)+4, 0xFF(c), -1, (1+(2)),};") == Lines{"a 32"});
  CHECK(listedPtx(".global .u8 a[][3] = {{1, 2}, {3}, {}};") == Lines{"a 9"});
  CHECK(listedPtx(".global .u8 a[][3] = {1, 2, 3, 4};") == Lines{"a 6"});
  CHECK(listedPtx(".global .u8 a[][2][2] = {{{1, 2}, {3}}, {{4}}};") == Lines{"a 8"});
  CHECK(listedPtx(".global .u32 a[9] = {1}, b = 7, c[] = {1, 2};") == Lines{"a 36", "b 4", "c 8"});
}

TEST_CASE("only the outermost level counts, outside comments and strings") {
  CHECK(listedPtx(".visible .entry k(.param .u64 .ptr .global .align 4 p, .param .u32 .const n)\n"
                  "{ .global .u32 no; { .const .u32 no2; } ret; }\n.global .u32 yes;") == Lines{"yes 4"});
  CHECK(listedPtx("// .global .u32 a;\n/* .global .u32 b; { */.global /**/ .u32 // {\n c;") == Lines{"c 4"});
  CHECK(listedPtx(".file 1 \"a { .global .u32 no; \\\" \"\n.global .u32 c;") == Lines{"c 4"});
  CHECK(listedPtx(".section .debug_str { .b8 1 \".global .u32 x; }\" }\n.global .u32 c;") == Lines{"c 4"});
  CHECK(listedPtx(".extern .func (.param .b32 r) f (.param .b64 .global x);.global .u32 c;") == Lines{"c 4"});
  CHECK(listedPtx(".extern .shared .b8 s[];.shared .b32 t;.global .u32 c;") == Lines{"c 4"});
  CHECK(listedPtx(std::string(".global .u32 c;\0.global .u32 d;", 31)) == Lines{"c 4"});
}

TEST_CASE("PTX that cannot be read") {
  const Lines no = {"unreadable"};
  CHECK(listed(bytesOf(".global .u32 c;")) == no);
  CHECK(listed(bytesOf("x")) == no);
  CHECK(listed({}) == no);
  for (const char* text : {".global .u32 c",
                           ".global .u32",
                           ".global u32 c;",
                           ".global .what c;",
                           ".global .u32 c[;",
                           ".global .u32 c[2;",
                           ".global .u32 c[x];",
                           ".global .u32 c[];",
                           ".global .u32 c = {1;",
                           ".global .u32 c = };",
                           ".global .u32 c = 1);",
                           ".global .u32 c = (1;",
                           ".global .u32 .align;",
                           ".global .align .u32 c;",
                           ".global .attribute(.managed .u32 c;",
                           ".func f() {",
                           ".func f(",
                           "/*",
                           "\"text",
                           "\"text\n\"",
                           "\"\\",
                           ".global .u32 c[99999999999999999999];",
                           ".global .u32 c[0xffffffff][0xffffffff];",
                           ".global .u64 c[0xffffffffff];",
                           ".const[ .u32 c;"}) {
    INFO(text);
    CHECK(listedPtx(text) == no);
    CHECK(allocatesPtx(text));
  }
}

TEST_CASE("the heap is used by those who declare its functions") {
  CHECK(allocatesPtx(".extern .func (.param .b64 func_retval0) malloc\n(\n.param .b64 malloc_param_0\n)\n;"));
  CHECK(allocatesPtx(".extern .func free (.param .b64 free_param_0);"));
  CHECK_FALSE(allocatesPtx(".extern .func vprintf;.global .u32 malloc;.func (.reg .b32 free) mallocs {}"));
  CHECK_FALSE(allocatesPtx("// .extern .func malloc\n.entry free {}"));
}

#ifdef CODE_IMAGES
namespace {

Bytes image(const std::string& name) {
  std::ifstream file(name.front() == '/' ? name : std::string(CODE_IMAGES) + "/" + name, std::ios::binary);
  INFO(name);
  REQUIRE(file);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto bytes = bytesOf(text);
  return {bytes.begin(), bytes.end()};
}

// Local names get a prefix in relocatable code.
const Symbol* find(const std::vector<Symbol>& symbols, const std::string& name) {
  for (const Symbol& one : symbols)
    if (one.name == name || one.name.ends_with("_" + name)) return &one;
  return nullptr;
}

struct Expected {
  const char* name;
  uint64_t bytes;
  bool constant = false, managed = false;
};
constexpr Expected kVariables[] = {
    {"plain", 4},
    {"zeroed", 400},
    {"matrix", 120},
    {"hidden", 4},
    {"big", 16 << 20},
    {"table", 256, true},
    {"smallTable", 12, true},
    {"shared", 4, false, true},
    {"sharedZeroed", 80, false, true},
    {"_Z7perTypeIiE", 4},
    {"_ZN6inside4deepE", 8},
    {"wide", 128},
    {"vector", 16},
    {"unused", 4},
    {"pointer", 8},
    {"object", 8},
    {"_ZZ7callsOfIdEivE5calls", 4},
    {"_ZZ3useiE3own", 4},
};

void checkVariables(std::span<const std::byte> code, unsigned architecture) {
  std::vector<Symbol> symbols;
  REQUIRE(readSymbols(code, architecture, symbols));
  for (const Expected& one : kVariables) {
    INFO(one.name);
    const Symbol* found = find(symbols, one.name);
    REQUIRE(found);
    CHECK(found->bytes == one.bytes);
    CHECK(found->constant == one.constant);
    CHECK(found->managed == one.managed);
  }
  const auto anonymous = std::find_if(symbols.begin(), symbols.end(), [](const Symbol& one) {
    return one.name.ends_with("9anonymousE") && one.bytes == 2;
  });
  CHECK(anonymous != symbols.end());
  // Neither parameters nor functions nor shared memory: the others are the compiler's.
  for (const Symbol& one : symbols) {
    const bool ours =
        std::any_of(std::begin(kVariables), std::end(kVariables),
                    [&](const Expected& expected) { return &one == find(symbols, expected.name); });
    INFO(one.name);
    CHECK((ours || &one == &*anonymous || one.name == "freedom" || one.name == "mallocCalls" ||
           one.name.starts_with("_ZTV") || one.name.starts_with("$str") ||
           one.name.find("__cudart_") != std::string::npos));
  }
}

}  // namespace

TEST_CASE("variables of what nvcc makes") {
  checkVariables(image("variables.ptx"), 90);
  checkVariables(image("variables.relocatable.ptx"), 90);
  checkVariables(image("variables.sm_75.cubin"), 75);
  checkVariables(image("variables.sm_90.cubin"), 90);
  checkVariables(image("variables.sm_100.cubin"), 100);
  checkVariables(image("variables.relocatable.cubin"), 90);
  checkVariables(image("linked.cubin"), 90);
  for (const char* name : {"variables.fatbin", "variables.plain.fatbin"})
    for (unsigned architecture : {75, 80, 89, 90, 120}) {
      INFO(name << " " << architecture);
      checkVariables(image(name), architecture);
    }
  CHECK(listed(image("variables.fatbin"), 70) == Lines{});
  // sm_90 and sm_90a have the same variables, two linked files each their own.
  auto strings = [](const std::vector<std::string>& lines) {
    return std::count_if(lines.begin(), lines.end(), [](auto& line) { return line.starts_with("$str "); });
  };
  CHECK(strings(listed(image("variables.fatbin"))) == 1);
  CHECK(strings(listed(image("linked.cubin"))) == 2);
}

TEST_CASE("what cannot be read adds nothing") {
  Bytes whole = image("variables.fatbin");
  std::vector<Symbol> symbols{{"before", 1}};
  whole.resize(whole.size() - 8);
  CHECK_FALSE(readSymbols(whole, 90, symbols));
  CHECK(mayAllocate(whole, 90));
  CHECK(symbols.size() == 1);
}

TEST_CASE("the heap in what nvcc makes") {
  for (int heap = 0; heap <= 5; ++heap)
    for (const char* kind : {".ptx", ".cubin", ".relocatable.cubin"}) {
      const std::string name = "heap" + std::to_string(heap) + kind;
      INFO(name);
      CHECK(mayAllocate(image(name), 90) == (heap != 0));
    }
  CHECK(mayAllocate(image("linked.cubin"), 90));
  for (const char* name : {"variables.ptx", "variables.sm_90.cubin", "variables.fatbin"})
    CHECK_FALSE(mayAllocate(image(name), 90));
}

TEST_CASE("a linked program has the code that was linked, else what it was linked from") {
  const Bytes variables = image("variables.relocatable.fatbin"), quiet = image("heap0.relocatable.fatbin"),
              loud = image("heap1.relocatable.fatbin"), linked = image("linked75.fatbin");
  const Header nothing{kMagic, 1, sizeof(Header), 0};
  const auto empty = std::as_bytes(std::span(&nothing, 1));
  auto count = [](std::initializer_list<std::span<const std::byte>> parts, unsigned architecture) {
    std::vector<Symbol> symbols;
    REQUIRE(readLinkedSymbols({parts.begin(), parts.size()}, architecture, symbols));
    return std::pair(find(symbols, "plain") != nullptr, find(symbols, "freedom") != nullptr);
  };
  auto allocates = [](std::initializer_list<std::span<const std::byte>> parts, unsigned architecture) {
    return linkedMayAllocate({parts.begin(), parts.size()}, architecture);
  };
  CHECK(count({empty, variables, quiet}, 90) == std::pair(true, true));
  CHECK(count({linked, quiet, quiet}, 90) == std::pair(false, true));  // machine code of another generation
  CHECK(count({linked, quiet, quiet}, 75) == std::pair(true, false));
  CHECK(allocates({empty, quiet, loud}, 90));
  CHECK_FALSE(allocates({empty, variables, quiet}, 90));
  CHECK_FALSE(allocates({linked, loud}, 75));
  std::vector<Symbol> symbols;
  const auto cut = std::span(loud).first(loud.size() - 8);
  for (const std::vector<std::span<const std::byte>>& parts :
       {std::vector<std::span<const std::byte>>{empty, cut}, {cut, quiet}}) {
    CHECK_FALSE(readLinkedSymbols(parts, 90, symbols));
    CHECK(linkedMayAllocate(parts, 90));
  }
  CHECK(symbols.empty());
#ifdef DEVICE_RUNTIME
  const Bytes archive = image(DEVICE_RUNTIME);
  std::span<const std::byte> runtime;
  for (size_t at = 0; at + sizeof(Header) <= archive.size() && runtime.empty(); at += 2)
    if (fits(std::span(archive).subspan(at))) runtime = std::span(archive).subspan(at);
  REQUIRE_FALSE(runtime.empty());
  CHECK(count({empty, variables, runtime}, 90).first);
  CHECK_FALSE(allocates({empty, variables, runtime}, 90));
  CHECK(allocates({empty, loud, runtime}, 90));
#endif
}

// Each in memory of its own length, so that AddressSanitizer sees what is read behind it.
TEST_CASE("machine code and PTX cut short") {
  for (const char* name : {"heap1.cubin", "heap1.relocatable.cubin", "variables.ptx"}) {
    const Bytes whole = image(name);
    REQUIRE(listed(whole) != Lines{"unreadable"});
    for (size_t length = 0; length < whole.size(); ++length) {
      const Bytes prefix(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
      std::vector<Symbol> symbols;
      readSymbols(prefix, 90, symbols);
      mayAllocate(prefix, 90);
    }
  }
}

TEST_CASE("machine code, PTX and fatbins with other bytes") {
  std::mt19937 random(1);
  for (const char* name :
       {"heap1.cubin", "linked.cubin", "variables.sm_90.cubin", "heap1.ptx", "variables.fatbin"}) {
    const Bytes whole = image(name);
    // The header, the sections and the symbols: where the lengths are.
    uint64_t sections = 0;
    std::memcpy(&sections, whole.data() + 40, sizeof sections);
    int readable = 0;
    for (int round = 0; round < 3000; ++round) {
      Bytes damaged = whole;
      for (unsigned n = 1 + random() % 4; n > 0; --n) {
        const unsigned where = random() % 3;
        size_t at = where == 0 ? random() % 64 : where == 1 ? sections + random() % 1600 : random();
        at %= damaged.size();
        damaged[at] = static_cast<std::byte>(random() % 4 == 0 ? 0xff : random());
      }
      std::vector<Symbol> symbols;
      if (readSymbols(damaged, 90, symbols)) ++readable;
      mayAllocate(damaged, 90);
    }
    INFO(name);
    CHECK(readable > 100);
    CHECK(readable < 3000);
  }
}
#endif
