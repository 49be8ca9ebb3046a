#include "server/softgpu/tests/engine_cases.h"

#include <bit>
#include <random>

#include "server/softgpu/tests/instruction_forms.h"

namespace gpupool::softgpu::test {
namespace {

const uint32_t kFloats[] = {
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000,
    0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F000000, 0xBF000000,
    0x3FC00000, 0x40200000, 0x4B000001, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x4F800000,
    0x5EFFFFFF, 0x5F000000, 0xDF000000, 0x3DCCCCCD, 0x33800000, 0x477FF000, 0x477FEFFF, 0x387FE000};
const uint64_t kDoubles[] = {0x0000000000000000, 0x8000000000000000, 0x3FF0000000000000, 0xBFF0000000000000,
                             0x0000000000000001, 0x8000000000000001, 0x000FFFFFFFFFFFFF, 0x0010000000000000,
                             0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000,
                             0x7FF8000000000000, 0x3FE0000000000000, 0xBFE0000000000000, 0x3FF8000000000000,
                             0x4004000000000000, 0x41DFFFFFFFC00000, 0x41E0000000000000, 0xC1E0000000200000,
                             0x41EFFFFFFFE00000, 0x43E0000000000000, 0xC3E0000000000000, 0x43F0000000000000,
                             0x3FB999999999999A, 0x47EFFFFFF0000000, 0x36A0000000000000, 0x3690000000000001,
                             0x380FFFFFE0000000, 0x40EFFC0000000000, 0x3E60000000000000, 0x3FF0000010000000};
const uint32_t kIntegers[] = {
    0,          1,          2,          3,          7,          31,         32,         33,
    63,         64,         127,        128,        255,        256,        0x7FFF,     0x8000,
    0xFFFF,     0x10000,    0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFF80,
    0xFFFF8000, 0x55555555, 0xAAAAAAAA, 0x12345678, 0xDEADBEEF, 0x00FF00FF, 0x01000000, 0x80808080};
const uint16_t kHalves[] = {0x0000, 0x8000, 0x3C00, 0xBC00, 0x0001, 0x8001, 0x03FF, 0x0400,
                            0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3800, 0x3E00, 0x4100,
                            0x3C01, 0x6BFF, 0x6C00, 0x7800, 0x1000, 0x0401, 0x57FF, 0x5800,
                            0x77FF, 0x2E66, 0xB800, 0x3555, 0x8400, 0x5BF8, 0x7BFE, 0x0200};
const uint16_t kBfloats[] = {0x0000, 0x8000, 0x3F80, 0xBF80, 0x0001, 0x8001, 0x007F, 0x0080,
                             0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x3F00, 0x3FC0, 0x4020,
                             0x3F81, 0x4F00, 0xCF00, 0x4F7F, 0x5F00, 0x3B80, 0x3380, 0x4B00,
                             0x0100, 0x3DCD, 0xBF00, 0x3EAB, 0x8080, 0x42FE, 0x7F7E, 0x0040};

uint64_t valueOf(char kind, uint32_t index, std::mt19937_64& random) {
  uint64_t any = random();
  bool edge = index < 32;
  switch (kind) {
    case 'f':
      return edge             ? kFloats[index]
             : (any & 1) != 0 ? static_cast<uint32_t>(any >> 32)
                              : 0x3C000000u + static_cast<uint32_t>(any >> 37);
    case 'F':
      return edge ? kDoubles[index] : (any & 1) != 0 ? random() : 0x3F00000000000000u + (random() >> 7);
    case 'r':
      return edge ? kIntegers[index] : static_cast<uint32_t>(any >> (any & 31));
    case 'R':
      return edge ? static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(kIntegers[index])))
                  : random() >> (any & 63);
    case 's':
      return edge ? kIntegers[index] & 0xFFFF : any & 0xFFFF;
    case 'h':
      return edge ? kHalves[index] : any & 0xFFFF;
    case 'g':
      return edge ? kBfloats[index] : any & 0xFFFF;
    case 'H':
      return (edge ? kHalves[index] : any & 0xFFFF) | (kHalves[(any >> 16) & 31] << 16);
    case 'G':
      return (edge ? kBfloats[index] : any & 0xFFFF) | (kBfloats[(any >> 16) & 31] << 16);
    case 'n':
      return edge ? uint64_t{3} * index : (any & 7) != 0 ? any & 127 : static_cast<uint32_t>(any >> 16);
    default:
      return any & 0xFFFF;
  }
}

std::vector<Input> inputsOf(const std::string& classes) {
  std::mt19937_64 random(classes[0] * size_t{1000} + classes.size());
  std::vector<Input> result;
  auto at = [&](size_t i, uint32_t index) {
    return i < classes.size() ? valueOf(classes[i], index, random) : 0;
  };
  for (uint32_t i = 0; i < kCaseThreads; ++i) {
    // Two operands meet every edge of one with half the edges of the other; the rest is random.
    uint32_t first = i < 512 || classes.size() == 1 ? i % 32 + (classes.size() == 1 && i >= 32 ? 32 : 0) : 99;
    uint32_t second = i < 512 ? (i / 32) * 2 : 99;
    uint32_t third = static_cast<uint32_t>(random() % 48);
    uint32_t fourth = static_cast<uint32_t>(random() % 48);
    Input one{};
    one.a = at(0, first);
    one.b = at(1, second);
    one.c = at(2, third);
    one.d = at(3, fourth);
    result.push_back(one);
  }
  return result;
}

const char* prefixOf(char kind) {
  switch (kind) {
    case 'f':
      return "%f";
    case 'F':
      return "%fd";
    case 'R':
      return "%rd";
    case 's':
    case 'h':
    case 'g':
      return "%rs";
    default:
      return "%r";
  }
}
const char* typeOf(char kind) {
  switch (kind) {
    case 'f':
      return "f32";
    case 'F':
      return "f64";
    case 'R':
      return "u64";
    case 's':
    case 'h':
    case 'g':
      return "u16";
    default:
      return "u32";
  }
}

std::string moduleOf(const std::string& classes, char result, std::string body) {
  for (size_t at; (at = body.find("%x")) != std::string::npos;) {
    size_t number = static_cast<size_t>(body[at + 2] - '0');
    char kind = number == 0 ? result : classes[number - 1];
    body.replace(at, 2, prefixOf(kind));
  }
  std::string loads;
  for (size_t i = 0; i < classes.size(); ++i)
    loads += std::string("ld.global.") + typeOf(classes[i]) + " " + prefixOf(classes[i]) +
             std::to_string(i + 1) + ", [%src+" + std::to_string(i * 8) + "];\n";
  return std::string(
             ".version 8.3\n.target sm_90\n.address_size 64\n"
             ".visible .entry test(.param .u64 in, .param .u64 out)\n{\n"
             ".reg .pred %p<8>; .reg .b16 %rs<32>; .reg .b32 %r<32>; .reg .b64 %rd<32>; .reg .f32 %f<32>;\n"
             ".reg .f64 %fd<32>; .reg .b64 %src, %dst; .reg .b32 %i;\n"
             "ld.param.u64 %src, [in]; ld.param.u64 %dst, [out]; mov.u32 %i, %tid.x;\n"
             "mad.wide.u32 %src, %i, 32, %src; mad.wide.u32 %dst, %i, 8, %dst; setp.ne.u32 %p0, %i, 5;\n") +
         loads + body + "\nst.global." + typeOf(result) + " [%dst], " + prefixOf(result) + "0;\nret;\n}\n";
}

InstructionCase makeCase(const std::string& form, std::string body) {
  size_t arrow = form.find('>');
  std::string classes = form.substr(0, arrow);
  InstructionCase one;
  one.result = form[arrow + 1];
  one.name = form.substr(form.find(": ") + 2);
  one.inputs = inputsOf(classes);
  if (body.empty()) {
    body = one.name + " %x0";
    for (size_t i = 0; i < classes.size(); ++i) body += ", %x" + std::to_string(i + 1);
    body += ";";
  }
  one.ptx = moduleOf(classes, one.result, body);
  return one;
}

}  // namespace

std::vector<InstructionCase> instructionCases() {
  std::vector<InstructionCase> cases;
  for (const char* form : instructionForms()) cases.push_back(makeCase(form, ""));
  for (const InstructionBody& body : instructionBodies()) cases.push_back(makeCase(body.form, body.body));
  return cases;
}

uint64_t hashResults(const InstructionCase& one, std::vector<uint64_t>& results) {
  uint64_t hash = 0xcbf29ce484222325;
  auto isNan16 = [](uint64_t bits, uint64_t infinity) { return (bits & 0x7FFF) > infinity; };
  for (uint64_t& value : results) {
    switch (one.result) {
      case 'f':
        if ((value & 0x7FFFFFFF) > 0x7F800000) value = 0x7FFFFFFF;
        break;
      case 'F':
        if ((value & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000) value = 0x7FFFFFFFFFFFFFFF;
        break;
      case 'h':
        if (isNan16(value, 0x7C00)) value = 0x7FFF;
        break;
      case 'g':
        if (isNan16(value, 0x7F80)) value = 0x7FFF;
        break;
      case 'H':
      case 'G': {
        uint64_t infinity = one.result == 'H' ? 0x7C00 : 0x7F80;
        if (isNan16(value, infinity)) value = (value & 0xFFFF0000) | 0x7FFF;
        if (isNan16(value >> 16, infinity)) value = (value & 0xFFFF) | 0x7FFF0000;
        break;
      }
      default:
        break;
    }
    for (unsigned i = 0; i < 8; ++i) hash = (hash ^ ((value >> (8 * i)) & 255)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace gpupool::softgpu::test
