// wmma, mma, ldmatrix and stmatrix (PTX ISA 9.0, chapter 9.7.14): the dense forms of 8 bits and more.
#include <bit>
#include <charconv>

#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/matrix.h"

namespace gpupool::softgpu::codegen {

using runtime::Element;
using runtime::MatrixRows;
using runtime::MatrixShape;
using runtime::WarpOperation;

namespace {

Element elementNamed(std::string_view word) {
  constexpr std::pair<std::string_view, Element> kRows[] = {
      {"f16", Element::f16}, {"bf16", Element::bf16}, {"tf32", Element::tf32}, {"f32", Element::f32},
      {"f64", Element::f64}, {"s8", Element::s8},     {"u8", Element::u8},     {"s32", Element::s32}};
  for (const auto& [name, element] : kRows)
    if (name == word) return element;
  return Element::none;
}

// "m16n8k16"; false for any other word.
bool parseShape(std::string_view word, MatrixShape& shape) {
  unsigned numbers[3] = {};
  const char letters[] = {'m', 'n', 'k'};
  const char* at = word.data();
  const char* end = at + word.size();
  for (int i = 0; i < 3; ++i) {
    if (at == end || *at != letters[i]) return false;
    ++at;
    auto [next, error] = std::from_chars(at, end, numbers[i]);
    if (error != std::errc{}) return false;
    at = next;
  }
  if (at != end) return false;
  shape.m = static_cast<uint8_t>(numbers[0]);
  shape.n = static_cast<uint8_t>(numbers[1]);
  shape.k = static_cast<uint8_t>(numbers[2]);
  return true;
}

bool isKnown(const MatrixShape& shape) {
  auto is = [&](unsigned m, unsigned n, unsigned k) { return shape.m == m && shape.n == n && shape.k == k; };
  bool accumulates = (shape.ab == Element::f64) == (shape.d == Element::f64) &&
                     (runtime::bitsOf(shape.ab) == 8) == (shape.d == Element::s32);
  if (!accumulates) return false;
  if (shape.opaque) {
    bool square = is(16, 16, 16) || is(32, 8, 16) || is(8, 32, 16);
    if (shape.ab == Element::tf32) return is(16, 16, 8);
    if (shape.ab == Element::f64) return is(8, 8, 4);
    return square;
  }
  switch (shape.ab) {
    case Element::f16:
    case Element::bf16:
      return is(16, 8, 8) || is(16, 8, 16);
    case Element::tf32:
      return is(16, 8, 4) || is(16, 8, 8);
    case Element::f64:
      return is(8, 8, 4) || is(16, 8, 4) || is(16, 8, 8) || is(16, 8, 16);
    case Element::s8:
    case Element::u8:
      return is(8, 8, 16) || is(16, 8, 16) || is(16, 8, 32);
    default:
      return false;
  }
}

// The shape's element types, from the type words in their order: d [a b] c, where halves are not named.
MatrixShape shapeOf(const ptx::Instruction& instruction, bool& fine) {
  MatrixShape shape;
  std::vector<Element> elements;
  fine = false;
  for (auto word : instruction.modifiers) {
    if (parseShape(word, shape)) fine = true;
    if (Element element = elementNamed(word); element != Element::none) elements.push_back(element);
  }
  shape.opaque = instruction.opcode == "wmma";
  if (elements.size() == 1) {
    shape.ab = shape.b = shape.c = shape.d = elements[0];
  } else if (elements.size() == 2) {
    shape.ab = shape.b = Element::f16;
    shape.d = elements[0];
    shape.c = elements[1];
  } else if (elements.size() == 4) {
    shape.d = elements[0];
    shape.ab = elements[1];
    shape.b = elements[2];
    shape.c = elements[3];
  } else {
    fine = false;
  }
  return shape;
}

}  // namespace

// A fragment's registers as memory of this thread's stack: one piece for each role, used again by every
// instruction.
llvm::Value* Translator::fragmentMemory(unsigned role, const Operand* fill, unsigned bits) {
  static constexpr unsigned kMaxBytes = 256;  // more than any fragment has
  llvm::AllocaInst*& memory = fragments_[role];
  if (memory == nullptr) {
    llvm::IRBuilder<> entry(entryBlock_, entryBlock_->begin());
    memory = entry.CreateAlloca(llvm::ArrayType::get(integer(8), kMaxBytes));
    memory->setAlignment(llvm::Align(16));
  }
  if (fill != nullptr) {
    std::vector<Operand> parts =
        fill->kind == Operand::Kind::vector ? fill->parts : std::vector<Operand>{*fill};
    for (unsigned i = 0; i < parts.size(); ++i)
      builder_.CreateAlignedStore(read(parts[i], bits),
                                  builder_.CreateConstGEP1_64(integer(8), memory, i * bits / 8),
                                  llvm::Align(4));
  }
  return memory;
}

void Translator::readFragment(const Operand& operand, Value* memory, unsigned bits) {
  std::vector<Operand> parts =
      operand.kind == Operand::Kind::vector ? operand.parts : std::vector<Operand>{operand};
  for (unsigned i = 0; i < parts.size(); ++i)
    write(parts[i],
          builder_.CreateAlignedLoad(
              integer(bits), builder_.CreateConstGEP1_64(integer(8), memory, i * bits / 8), llvm::Align(4)));
}

void Translator::onMma(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  bool fine = false;
  MatrixShape shape = shapeOf(instruction, fine);
  if (instruction.has("load")) return matrixLoad(instruction);
  if (instruction.has("store")) return matrixStore(instruction);
  if (!fine || !isKnown(shape) || operands.size() != 4 || !instruction.has("sync") || instruction.has("sp"))
    unsupported(instruction);
  for (auto word : instruction.modifiers)
    if (word.starts_with("sp::") || word == "xor" || word == "and" || word == "block_scale")
      unsupported(instruction);
  auto width = [](Element element) { return element == Element::f64 ? 64u : 32u; };
  Value* fields[] = {constant(std::bit_cast<uint64_t>(shape), 64),
                     fragmentMemory(0, &operands[1], width(shape.ab)),
                     fragmentMemory(1, &operands[2], width(shape.b)),
                     fragmentMemory(2, &operands[3], width(shape.c)),
                     fragmentMemory(3, nullptr, 0),
                     constant(instruction.has("satfinite"), 64)};
  Value* product = fragmentMemory(4, nullptr, 0);
  for (unsigned i = 0; i < 6; ++i)
    builder_.CreateStore(fields[i], builder_.CreateConstGEP1_64(integer(64), product, i));
  warpCall(static_cast<unsigned>(WarpOperation::multiply), constant(0xFFFFFFFF),
           builder_.CreatePtrToInt(product, integer(64)));
  readFragment(operands[0], fields[4], width(shape.d));
}

// The address of a matrix in memory, as a generic one; the runtime checks what it touches.
llvm::Value* Translator::matrixAddress(const Instruction& instruction, const Operand& operand) {
  Value* at = baseOf(operand, 64);
  if (spaceOf(instruction) == ptx::Space::shared)
    at = builder_.CreateAdd(at, blockField(offsetof(runtime::BlockContext, sharedBase), integer(64)));
  return at;
}

void Translator::matrixLoad(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  bool fine = false;
  MatrixShape shape = shapeOf(instruction, fine);
  const unsigned char which = instruction.has("a") ? 'a' : instruction.has("b") ? 'b' : 'c';
  if (!fine || operands.size() < 2) unsupported(instruction);
  bool column = instruction.has("col");
  uint64_t natural = which == 'a'   ? (column ? shape.m : shape.k)
                     : which == 'b' ? (column ? shape.k : shape.n)
                                    : (column ? shape.m : shape.n);
  Value* stride = operands.size() > 2 ? read(operands[2], 32) : constant(natural);
  unsigned width = shape.ab == Element::f64 ? 64 : 32;
  Value* memory = fragmentMemory(0, nullptr, 0);
  builder_.CreateMemSet(memory, constant(0, 8), 256, llvm::MaybeAlign(16));
  call("gpupool.loadFragment", builder_.getVoidTy(),
       {thread_, constant(std::bit_cast<uint64_t>(shape), 64), constant(which),
        matrixAddress(instruction, operands[1]), stride, constant(column), memory});
  readFragment(operands[0], memory, width);
}

void Translator::matrixStore(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  bool fine = false;
  MatrixShape shape = shapeOf(instruction, fine);
  if (!fine || operands.size() < 2) unsupported(instruction);
  bool column = instruction.has("col");
  Value* stride = operands.size() > 2 ? read(operands[2], 32) : constant(column ? shape.m : shape.n);
  Value* memory = fragmentMemory(0, &operands[1], shape.c == Element::f64 ? 64 : 32);
  call("gpupool.storeFragment", builder_.getVoidTy(),
       {thread_, constant(std::bit_cast<uint64_t>(shape), 64), matrixAddress(instruction, operands[0]),
        stride, constant(column), memory});
}

void Translator::onLdmatrix(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  bool store = instruction.opcode == "stmatrix";
  unsigned count = instruction.has("x4") ? 4 : instruction.has("x2") ? 2 : 1;
  if (!instruction.has("m8n8") || !instruction.has("b16") || operands.size() != 2) unsupported(instruction);
  const Operand& place = operands[store ? 0 : 1];
  const Operand& data = operands[store ? 1 : 0];
  // Only the first eight lanes' addresses of each matrix count; the others may hold anything.
  Value* lane = builder_.CreateAnd(linearThread(), constant(31));
  llvm::BasicBlock* check = newBlock("row");
  llvm::BasicBlock* after = newBlock("rows");
  llvm::BasicBlock* before = builder_.GetInsertBlock();
  builder_.CreateCondBr(builder_.CreateICmpULT(lane, constant(uint64_t{8} * count)), check, after);
  startBlock(check);
  ptx::Space space = spaceOf(instruction);
  Value* row = builder_.CreatePtrToInt(address(instruction, place, space, 16).pointer, integer(64));
  llvm::BasicBlock* checked = builder_.GetInsertBlock();
  builder_.CreateBr(after);
  startBlock(after);
  auto* address = builder_.CreatePHI(integer(64), 2);
  address->addIncoming(constant(0, 64), before);
  address->addIncoming(row, checked);
  Value* registers = fragmentMemory(0, store ? &data : nullptr, 32);
  Value* call = fragmentMemory(4, nullptr, 0);
  auto put = [&](Value* value, size_t offset) {
    builder_.CreateStore(value, builder_.CreateConstGEP1_64(integer(8), call, offset));
  };
  put(address, offsetof(MatrixRows, row));
  put(registers, offsetof(MatrixRows, registers));
  put(constant(count), offsetof(MatrixRows, count));
  put(constant(instruction.has("trans")), offsetof(MatrixRows, transposed));
  put(constant(store), offsetof(MatrixRows, store));
  warpCall(static_cast<unsigned>(WarpOperation::rows), constant(0xFFFFFFFF),
           builder_.CreatePtrToInt(call, integer(64)));
  if (!store) readFragment(data, registers, 32);
}

}  // namespace gpupool::softgpu::codegen
