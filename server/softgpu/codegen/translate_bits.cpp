// Bytes and fields inside words: prmt, dp4a, masks and the packed video instructions (PTX ISA 9.0, 9.7.1
// and 9.7.17).
#include "server/softgpu/codegen/translator.h"

namespace gpupool::softgpu::codegen {

void Translator::onPrmt(const Instruction& instruction) {
  Value* low = builder_.CreateZExt(read(instruction.operands[1], 32), integer(64));
  Value* high = builder_.CreateZExt(read(instruction.operands[2], 32), integer(64));
  Value* selector = read(instruction.operands[3], 32);
  Value* both = builder_.CreateOr(builder_.CreateShl(high, constant(32, 64)), low);
  Value* first = builder_.CreateAnd(selector, constant(3));
  auto byteIndex = [&](unsigned i) -> Value* {  // 0..7, bit 3 set: replicate the sign
    if (instruction.has("f4e")) return builder_.CreateAdd(first, constant(i));
    if (instruction.has("b4e"))
      return builder_.CreateAnd(builder_.CreateSub(first, constant(i)), constant(7));
    if (instruction.has("rc8")) return first;
    if (instruction.has("ecl"))
      return intrinsicCall(llvm::Intrinsic::umax, {integer(32)}, {first, constant(i)});
    if (instruction.has("ecr"))
      return intrinsicCall(llvm::Intrinsic::umin, {integer(32)}, {first, constant(i)});
    if (instruction.has("rc16"))
      return builder_.CreateAdd(builder_.CreateShl(builder_.CreateAnd(selector, constant(1)), constant(1)),
                                constant(i & 1));
    return builder_.CreateAnd(builder_.CreateLShr(selector, constant(uint64_t{4} * i)), constant(15));
  };
  Value* result = constant(0);
  for (unsigned i = 0; i < 4; ++i) {
    Value* index = byteIndex(i);
    Value* shift = builder_.CreateShl(builder_.CreateAnd(index, constant(7)), constant(3));
    Value* byte =
        builder_.CreateTrunc(builder_.CreateLShr(both, builder_.CreateZExt(shift, integer(64))), integer(8));
    Value* sign = builder_.CreateICmpNE(builder_.CreateAnd(index, constant(8)), constant(0));
    byte = builder_.CreateSelect(sign, builder_.CreateAShr(byte, constant(7, 8)), byte);
    result = builder_.CreateOr(
        result, builder_.CreateShl(builder_.CreateZExt(byte, integer(32)), constant(uint64_t{8} * i)));
  }
  write(instruction.operands[0], result);
}

void Translator::onDp4a(const Instruction& instruction) {
  std::vector<Type> both = types(instruction);
  if (both.size() != 2) unsupported(instruction);
  Value* a = read(instruction.operands[1], 32);
  Value* b = read(instruction.operands[2], 32);
  Value* sum = read(instruction.operands[3], 32);
  auto byte = [&](Value* word, unsigned i, bool isSigned) {
    Value* one = builder_.CreateTrunc(builder_.CreateLShr(word, constant(uint64_t{8} * i)), integer(8));
    return isSigned ? builder_.CreateSExt(one, integer(32)) : builder_.CreateZExt(one, integer(32));
  };
  for (unsigned i = 0; i < 4; ++i)
    sum = builder_.CreateAdd(
        sum, builder_.CreateMul(byte(a, i, both[0].isSigned()), byte(b, i, both[1].isSigned())));
  write(instruction.operands[0], sum);
}

void Translator::onDp2a(const Instruction& instruction) {
  std::vector<Type> both = types(instruction);
  if (both.size() != 2) unsupported(instruction);
  Value* a = read(instruction.operands[1], 32);
  Value* b = read(instruction.operands[2], 32);
  Value* sum = read(instruction.operands[3], 32);
  auto part = [&](Value* word, unsigned shift, unsigned bits, bool isSigned) {
    Value* one = builder_.CreateTrunc(builder_.CreateLShr(word, constant(shift)), integer(bits));
    return isSigned ? builder_.CreateSExt(one, integer(32)) : builder_.CreateZExt(one, integer(32));
  };
  unsigned half = instruction.has("hi") ? 16 : 0;
  for (unsigned i = 0; i < 2; ++i)
    sum = builder_.CreateAdd(sum, builder_.CreateMul(part(a, 16 * i, 16, both[0].isSigned()),
                                                     part(b, half + 8 * i, 8, both[1].isSigned())));
  write(instruction.operands[0], sum);
}

void Translator::onBmsk(const Instruction& instruction) {
  Value* a = read(instruction.operands[1], 32);
  Value* b = read(instruction.operands[2], 32);
  Value* ones = constant(0xFFFFFFFF);
  Value* position = builder_.CreateAnd(a, constant(31));
  Value* sum = builder_.CreateAdd(position, builder_.CreateAnd(b, constant(31)));
  Value* mask0 = builder_.CreateShl(ones, position);
  Value* over = builder_.CreateICmpUGE(sum, constant(32));
  if (instruction.has("clamp")) {
    Value* tooFar = builder_.CreateICmpUGE(a, constant(32));
    mask0 = builder_.CreateSelect(tooFar, constant(0), mask0);
    over = builder_.CreateOr(over, builder_.CreateOr(tooFar, builder_.CreateICmpUGE(b, constant(32))));
  }
  Value* mask1 = builder_.CreateSelect(over, constant(0),
                                       builder_.CreateShl(ones, builder_.CreateAnd(sum, constant(31))));
  write(instruction.operands[0], builder_.CreateAnd(mask0, builder_.CreateNot(mask1)));
}

void Translator::onSzext(const Instruction& instruction) {
  Type type = typeAt(instruction);
  Value* a = read(instruction.operands[1], 32);
  Value* b = read(instruction.operands[2], 32);
  Value* width = builder_.CreateAnd(b, constant(31));
  Value* mask = builder_.CreateShl(constant(0xFFFFFFFF), width);
  Value* tooLarge = instruction.has("clamp") ? builder_.CreateICmpUGE(b, constant(32)) : builder_.getFalse();
  mask = builder_.CreateSelect(tooLarge, constant(0), mask);
  Value* result = builder_.CreateAnd(a, builder_.CreateNot(mask));
  if (type.isSigned()) {
    Value* top = builder_.CreateAnd(builder_.CreateSub(width, constant(1)), constant(31));
    Value* sign = builder_.CreateTrunc(builder_.CreateLShr(a, top), integer(1));
    sign = builder_.CreateAnd(sign, builder_.CreateICmpNE(width, constant(0)));
    sign = builder_.CreateAnd(sign, builder_.CreateNot(tooLarge));
    result = builder_.CreateSelect(sign, builder_.CreateOr(result, mask), result);
  }
  write(instruction.operands[0], result);
}

void Translator::onFns(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  write(operands[0], call("gpupool.fns", integer(32),
                          {read(operands[1], 32), read(operands[2], 32), read(operands[3], 32)}, true));
}

// One lane of a packed video instruction, in 32-bit arithmetic.
llvm::Value* Translator::videoLane(const Instruction& instruction, Value* a, Value* b) {
  std::string_view name = instruction.opcode.substr(0, instruction.opcode.size() - 1);
  if (name == "vadd") return builder_.CreateAdd(a, b);
  if (name == "vsub") return builder_.CreateSub(a, b);
  if (name == "vavrg") {  // halves are rounded away from zero
    Value* sum = builder_.CreateAdd(a, b);
    Value* up = builder_.CreateZExt(builder_.CreateICmpSGE(sum, constant(0)), integer(32));
    return builder_.CreateAShr(builder_.CreateAdd(sum, up), constant(1));
  }
  if (name == "vmin") return builder_.CreateSelect(builder_.CreateICmpSLT(a, b), a, b);
  if (name == "vmax") return builder_.CreateSelect(builder_.CreateICmpSGT(a, b), a, b);
  Value* difference = builder_.CreateSub(a, b);
  return builder_.CreateSelect(builder_.CreateICmpSLT(difference, constant(0)),
                               builder_.CreateNeg(difference), difference);
}

void Translator::onVideo(const Instruction& instruction) {
  std::vector<Type> all = types(instruction);
  if (all.size() != 3) unsupported(instruction);
  unsigned lanes = instruction.opcode.back() == '4' ? 4 : 2;
  unsigned bits = 32 / lanes;
  for (const Operand& one : instruction.operands)
    if (one.kind != Operand::Kind::reg && one.kind != Operand::Kind::integer)
      unsupported(instruction, "selectors");
  Value* a = read(instruction.operands.at(1), 32);
  Value* b = read(instruction.operands.at(2), 32);
  auto lane = [&](Value* word, unsigned i, bool isSigned) {
    Value* one = builder_.CreateTrunc(builder_.CreateLShr(word, constant(uint64_t{bits} * i)), integer(bits));
    return isSigned ? builder_.CreateSExt(one, integer(32)) : builder_.CreateZExt(one, integer(32));
  };
  bool accumulate = instruction.has("add");
  bool isSigned = all[0].isSigned();
  Value* result = accumulate ? read(instruction.operands.at(3), 32) : constant(0);
  for (unsigned i = 0; i < lanes; ++i) {
    Value* one = videoLane(instruction, lane(a, i, all[1].isSigned()), lane(b, i, all[2].isSigned()));
    if (accumulate) {
      result = builder_.CreateAdd(result, one);
      continue;
    }
    if (instruction.has("sat")) {
      uint32_t high = isSigned ? (1u << (bits - 1)) - 1 : (1u << bits) - 1;
      uint32_t low = isSigned ? ~high : 0;
      one = intrinsicCall(llvm::Intrinsic::smax, {integer(32)}, {one, constant(low)});
      one = intrinsicCall(llvm::Intrinsic::smin, {integer(32)}, {one, constant(high)});
    }
    one = builder_.CreateAnd(one, constant((uint64_t{1} << bits) - 1));
    result = builder_.CreateOr(result, builder_.CreateShl(one, constant(uint64_t{bits} * i)));
  }
  write(instruction.operands[0], result);
}

}  // namespace gpupool::softgpu::codegen
