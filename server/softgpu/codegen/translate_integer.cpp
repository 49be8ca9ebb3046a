// Integer arithmetic, bits and carries (PTX ISA 9.0, chapters 9.7.1, 9.7.2 and 9.7.8).
#include <llvm/IR/Intrinsics.h>

#include "server/softgpu/codegen/translator.h"

namespace gpupool::softgpu::codegen {

namespace {
// Bit counts and positions are taken from the low 32 bits of their operands.
constexpr unsigned kAmountBits = 32;
}  // namespace

llvm::AllocaInst* Translator::carry() {
  if (carry_ == nullptr) {
    llvm::IRBuilder<> at(entryBlock_, entryBlock_->begin());
    carry_ = at.CreateAlloca(at.getInt1Ty());
  }
  return carry_;
}

llvm::Value* Translator::loadCarry(unsigned bits) {
  return builder_.CreateZExt(builder_.CreateLoad(integer(1), carry()), integer(bits));
}

void Translator::onAdd(const Instruction& instruction) {
  Type type = typeAt(instruction);
  bool subtract = instruction.opcode == "sub";
  const auto& operands = instruction.operands;
  if (type.isReal()) {
    if (type.bits < 32 || type.lanes > 1 || type.kind == ptx::Kind::bfloat) {
      Value* result = smallArithmetic(instruction, type, instruction.opcode,
                                      {read(operands[1], type.bits), read(operands[2], type.bits)});
      return write(operands[0], result);
    }
    bool ftz = instruction.has("ftz");
    Value* a = flush(readReal(operands[1], type.bits), ftz);
    Value* b = flush(readReal(operands[2], type.bits), ftz);
    std::string_view rounding = roundingOf(instruction);
    Value* result = nullptr;
    if (rounding != "rn")
      result = roundedCall("add", rounding, type.bits, {a, subtract ? builder_.CreateFNeg(b) : b});
    else
      result = subtract ? builder_.CreateFSub(a, b) : builder_.CreateFAdd(a, b);
    result = flush(result, ftz);
    return write(operands[0], instruction.has("sat") ? saturate(result) : result);
  }
  Value* a = read(operands[1], type.bits);
  Value* b = read(operands[2], type.bits);
  if (type.lanes == 2) {
    Value* result = mapLanes(type, {a, b}, [&](const std::vector<Value*>& lane) {
      return subtract ? builder_.CreateSub(lane[0], lane[1]) : builder_.CreateAdd(lane[0], lane[1]);
    });
    return write(operands[0], result);
  }
  Value* result = nullptr;
  if (instruction.has("cc")) {
    auto id = subtract ? llvm::Intrinsic::usub_with_overflow : llvm::Intrinsic::uadd_with_overflow;
    Value* both = intrinsicCall(id, {a->getType()}, {a, b});
    builder_.CreateStore(builder_.CreateExtractValue(both, 1), carry());
    result = builder_.CreateExtractValue(both, 0);
  } else if (instruction.has("sat")) {
    result = intrinsicCall(subtract ? llvm::Intrinsic::ssub_sat : llvm::Intrinsic::sadd_sat, {a->getType()},
                           {a, b});
  } else {
    result = subtract ? builder_.CreateSub(a, b) : builder_.CreateAdd(a, b);
  }
  write(operands[0], result, type.isSigned());
}

void Translator::onAddc(const Instruction& instruction) {
  Type type = typeAt(instruction);
  bool subtract = instruction.opcode == "subc";
  Value* a = read(instruction.operands[1], type.bits);
  Value* b = read(instruction.operands[2], type.bits);
  auto id = subtract ? llvm::Intrinsic::usub_with_overflow : llvm::Intrinsic::uadd_with_overflow;
  Value* first = intrinsicCall(id, {a->getType()}, {a, b});
  Value* second =
      intrinsicCall(id, {a->getType()}, {builder_.CreateExtractValue(first, 0), loadCarry(type.bits)});
  if (instruction.has("cc"))
    builder_.CreateStore(
        builder_.CreateOr(builder_.CreateExtractValue(first, 1), builder_.CreateExtractValue(second, 1)),
        carry());
  write(instruction.operands[0], builder_.CreateExtractValue(second, 0));
}

void Translator::onMul(const Instruction& instruction) {
  Type type = typeAt(instruction);
  const auto& operands = instruction.operands;
  if (type.isReal()) {
    if (type.bits < 32 || type.lanes > 1 || type.kind == ptx::Kind::bfloat) {
      Value* result = smallArithmetic(instruction, type, "mul",
                                      {read(operands[1], type.bits), read(operands[2], type.bits)});
      return write(operands[0], result);
    }
    bool ftz = instruction.has("ftz");
    Value* a = flush(readReal(operands[1], type.bits), ftz);
    Value* b = flush(readReal(operands[2], type.bits), ftz);
    std::string_view rounding = roundingOf(instruction);
    Value* result =
        rounding == "rn" ? builder_.CreateFMul(a, b) : roundedCall("mul", rounding, type.bits, {a, b});
    result = flush(result, ftz);
    return write(operands[0], instruction.has("sat") ? saturate(result) : result);
  }
  Value* a = read(operands[1], type.bits);
  Value* b = read(operands[2], type.bits);
  if (instruction.has("lo")) return write(operands[0], builder_.CreateMul(a, b), type.isSigned());
  auto* wide = integer(type.bits * 2u);
  auto extend = [&](Value* value) {
    return type.isSigned() ? builder_.CreateSExt(value, wide) : builder_.CreateZExt(value, wide);
  };
  Value* product = builder_.CreateMul(extend(a), extend(b));
  if (instruction.has("wide")) return write(operands[0], product, type.isSigned());
  if (!instruction.has("hi")) unsupported(instruction);
  product = builder_.CreateTrunc(builder_.CreateLShr(product, llvm::ConstantInt::get(wide, type.bits)),
                                 integer(type.bits));
  write(operands[0], product, type.isSigned());
}

void Translator::onMad(const Instruction& instruction) {
  Type type = typeAt(instruction);
  if (type.isReal()) return onFma(instruction);
  onMadc(instruction);
}

// mad and madc: the low, high or whole product, plus c, plus the carry of before where madc says so.
void Translator::onMadc(const Instruction& instruction) {
  Type type = typeAt(instruction);
  const auto& operands = instruction.operands;
  Value* a = read(operands[1], type.bits);
  Value* b = read(operands[2], type.bits);
  unsigned bits = instruction.has("wide") ? type.bits * 2u : type.bits;
  auto* wide = integer(type.bits * 2u);
  Value* product = nullptr;
  if (instruction.has("lo")) {
    product = builder_.CreateMul(a, b);
  } else {
    auto extend = [&](Value* value) {
      return type.isSigned() ? builder_.CreateSExt(value, wide) : builder_.CreateZExt(value, wide);
    };
    product = builder_.CreateMul(extend(a), extend(b));
    if (instruction.has("hi"))
      product = builder_.CreateTrunc(builder_.CreateLShr(product, llvm::ConstantInt::get(wide, type.bits)),
                                     integer(type.bits));
    else if (!instruction.has("wide"))
      unsupported(instruction);
  }
  Value* c = read(operands[3], bits);
  if (instruction.has("sat"))
    return write(operands[0], intrinsicCall(llvm::Intrinsic::sadd_sat, {c->getType()}, {product, c}));
  bool withCarry = instruction.opcode == "madc";
  if (!withCarry && !instruction.has("cc"))
    return write(operands[0], builder_.CreateAdd(product, c), type.isSigned());
  Value* first = intrinsicCall(llvm::Intrinsic::uadd_with_overflow, {c->getType()}, {product, c});
  Value* result = builder_.CreateExtractValue(first, 0);
  Value* out = builder_.CreateExtractValue(first, 1);
  if (withCarry) {
    Value* second =
        intrinsicCall(llvm::Intrinsic::uadd_with_overflow, {c->getType()}, {result, loadCarry(bits)});
    result = builder_.CreateExtractValue(second, 0);
    out = builder_.CreateOr(out, builder_.CreateExtractValue(second, 1));
  }
  if (instruction.has("cc")) builder_.CreateStore(out, carry());
  write(operands[0], result);
}

// Division by zero and of the smallest number by -1 trap on the host and do not on the GPU.
void Translator::onRem(const Instruction& instruction) {
  Type type = typeAt(instruction);
  bool remainder = instruction.opcode == "rem";
  Value* a = read(instruction.operands[1], type.bits);
  Value* b = read(instruction.operands[2], type.bits);
  Value* zero = constant(0, type.bits);
  Value* ones = llvm::Constant::getAllOnesValue(integer(type.bits));
  Value* byZero = builder_.CreateICmpEQ(b, zero);
  Value* byMinusOne = type.isSigned() ? builder_.CreateICmpEQ(b, ones) : builder_.getFalse();
  Value* safe = builder_.CreateSelect(builder_.CreateOr(byZero, byMinusOne), constant(1, type.bits), b);
  Value* result = nullptr;
  if (remainder) {
    result = type.isSigned() ? builder_.CreateSRem(a, safe) : builder_.CreateURem(a, safe);
    result = builder_.CreateSelect(byZero, ones, result);
  } else {
    result = type.isSigned() ? builder_.CreateSDiv(a, safe) : builder_.CreateUDiv(a, safe);
    result = builder_.CreateSelect(byMinusOne, builder_.CreateNeg(a), result);
    result = builder_.CreateSelect(byZero, ones, result);
  }
  write(instruction.operands[0], result, type.isSigned());
}

void Translator::onLogic(const Instruction& instruction) {
  Type type = typeAt(instruction);
  bool isPredicate = type.kind == ptx::Kind::predicate;
  auto get = [&](size_t index) {
    return isPredicate ? readPredicate(instruction.operands[index])
                       : read(instruction.operands[index], type.bits);
  };
  Value* a = get(1);
  Value* b = get(2);
  Value* result = instruction.opcode == "and"  ? builder_.CreateAnd(a, b)
                  : instruction.opcode == "or" ? builder_.CreateOr(a, b)
                                               : builder_.CreateXor(a, b);
  write(instruction.operands[0], result);
}

void Translator::onNot(const Instruction& instruction) {
  Type type = typeAt(instruction);
  Value* value = type.kind == ptx::Kind::predicate ? readPredicate(instruction.operands[1])
                                                   : read(instruction.operands[1], type.bits);
  write(instruction.operands[0], builder_.CreateNot(value));
}

void Translator::onCnot(const Instruction& instruction) {
  unsigned bits = typeAt(instruction).bits;
  Value* isZero = builder_.CreateICmpEQ(read(instruction.operands[1], bits), constant(0, bits));
  write(instruction.operands[0], builder_.CreateZExt(isZero, integer(bits)));
}

void Translator::onShift(const Instruction& instruction) {
  Type type = typeAt(instruction);
  Value* a = read(instruction.operands[1], type.bits);
  Value* amount = read(instruction.operands[2], kAmountBits);
  Value* tooFar = builder_.CreateICmpUGE(amount, constant(type.bits));
  bool left = instruction.opcode == "shl";
  bool arithmetic = !left && type.isSigned();
  if (arithmetic) amount = builder_.CreateSelect(tooFar, constant(type.bits - 1u), amount);
  Value* sized = builder_.CreateZExtOrTrunc(amount, integer(type.bits));
  if (arithmetic) return write(instruction.operands[0], builder_.CreateAShr(a, sized), true);
  Value* shifted = left ? builder_.CreateShl(a, sized) : builder_.CreateLShr(a, sized);
  write(instruction.operands[0], builder_.CreateSelect(tooFar, constant(0, type.bits), shifted));
}

void Translator::onShf(const Instruction& instruction) {
  Value* low = builder_.CreateZExt(read(instruction.operands[1], 32), integer(64));
  Value* high = builder_.CreateZExt(read(instruction.operands[2], 32), integer(64));
  Value* amount = read(instruction.operands[3], 32);
  if (instruction.has("wrap"))
    amount = builder_.CreateAnd(amount, constant(31));
  else
    amount = intrinsicCall(llvm::Intrinsic::umin, {integer(32)}, {amount, constant(32)});
  amount = builder_.CreateZExt(amount, integer(64));
  Value* both = builder_.CreateOr(builder_.CreateShl(high, constant(32, 64)), low);
  Value* result = instruction.has("l")
                      ? builder_.CreateLShr(builder_.CreateShl(both, amount), constant(32, 64))
                      : builder_.CreateLShr(both, amount);
  write(instruction.operands[0], builder_.CreateTrunc(result, integer(32)));
}

void Translator::onLop3(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  if (operands.size() < 5 || operands[4].kind != Operand::Kind::integer) unsupported(instruction);
  Value* inputs[3] = {read(operands[1], 32), read(operands[2], 32), read(operands[3], 32)};
  auto table = static_cast<unsigned>(operands[4].value);
  Value* result = constant(0);
  for (unsigned row = 0; row < 8; ++row) {
    if (((table >> row) & 1) == 0) continue;
    Value* term = nullptr;
    for (unsigned i = 0; i < 3; ++i) {
      Value* input = ((row >> (2 - i)) & 1) != 0 ? inputs[i] : builder_.CreateNot(inputs[i]);
      term = term == nullptr ? input : builder_.CreateAnd(term, input);
    }
    result = builder_.CreateOr(result, term);
  }
  if (operands[0].kind != Operand::Kind::pair) return write(operands[0], result);
  write(operands[0].parts[0], result);
  Value* isSet = builder_.CreateICmpNE(result, constant(0));
  Value* with = readPredicate(operands.at(5));
  write(operands[0].parts[1],
        instruction.has("and") ? builder_.CreateAnd(isSet, with) : builder_.CreateOr(isSet, with));
}

void Translator::onPopc(const Instruction& instruction) {
  unsigned bits = typeAt(instruction).bits;
  Value* count =
      intrinsicCall(llvm::Intrinsic::ctpop, {integer(bits)}, {read(instruction.operands[1], bits)});
  write(instruction.operands[0], builder_.CreateZExtOrTrunc(count, integer(32)));
}

void Translator::onClz(const Instruction& instruction) {
  unsigned bits = typeAt(instruction).bits;
  Value* count = intrinsicCall(llvm::Intrinsic::ctlz, {integer(bits)},
                               {read(instruction.operands[1], bits), builder_.getFalse()});
  write(instruction.operands[0], builder_.CreateZExtOrTrunc(count, integer(32)));
}

void Translator::onBrev(const Instruction& instruction) {
  unsigned bits = typeAt(instruction).bits;
  write(instruction.operands[0],
        intrinsicCall(llvm::Intrinsic::bitreverse, {integer(bits)}, {read(instruction.operands[1], bits)}));
}

void Translator::onBfind(const Instruction& instruction) {
  Type type = typeAt(instruction);
  Value* a = read(instruction.operands[1], type.bits);
  if (type.isSigned()) a = builder_.CreateXor(a, builder_.CreateAShr(a, constant(type.bits - 1u, type.bits)));
  Value* zeros = intrinsicCall(llvm::Intrinsic::ctlz, {integer(type.bits)}, {a, builder_.getFalse()});
  zeros = builder_.CreateZExtOrTrunc(zeros, integer(32));
  Value* found = instruction.has("shiftamt") ? zeros : builder_.CreateSub(constant(type.bits - 1u), zeros);
  Value* none = builder_.CreateICmpEQ(a, constant(0, type.bits));
  write(instruction.operands[0], builder_.CreateSelect(none, constant(0xFFFFFFFF), found));
}

// The position or length of a bit field: 32-bit fields take a byte of the operand, 64-bit fields all of it
// (so does the hardware, whatever the manual says).
llvm::Value* Translator::fieldBound(const Operand& operand, unsigned bits) {
  Value* value = read(operand, 32);
  if (bits == 32) return builder_.CreateAnd(value, constant(255));
  return intrinsicCall(llvm::Intrinsic::umin, {integer(32)}, {value, constant(255)});
}

void Translator::onBfe(const Instruction& instruction) {
  Type type = typeAt(instruction);
  unsigned bits = type.bits;
  Value* a = read(instruction.operands[1], bits);
  Value* position = fieldBound(instruction.operands[2], bits);
  Value* length = fieldBound(instruction.operands[3], bits);
  Value* ones = llvm::Constant::getAllOnesValue(integer(bits));
  Value* zero = constant(0, bits);
  auto sized = [&](Value* value) { return builder_.CreateZExtOrTrunc(value, integer(bits)); };
  auto shifted = [&](Value* value, bool left, Value* amount) -> Value* {
    Value* moved =
        left ? builder_.CreateShl(value, sized(amount)) : builder_.CreateLShr(value, sized(amount));
    return builder_.CreateSelect(builder_.CreateICmpUGE(amount, constant(bits)), zero, moved);
  };
  Value* inLength = builder_.CreateNot(shifted(ones, true, length));
  Value* result = builder_.CreateAnd(shifted(a, false, position), inLength);
  if (type.isSigned()) {
    Value* top = builder_.CreateSub(builder_.CreateAdd(position, length), constant(1));
    top = intrinsicCall(llvm::Intrinsic::umin, {integer(32)}, {top, constant(bits - 1)});
    Value* sign = builder_.CreateTrunc(builder_.CreateLShr(a, sized(top)), integer(1));
    sign = builder_.CreateAnd(sign, builder_.CreateICmpNE(length, constant(0)));
    Value* valid = builder_.CreateAnd(shifted(ones, false, position), inLength);
    result = builder_.CreateSelect(sign, builder_.CreateOr(result, builder_.CreateNot(valid)), result);
  }
  write(instruction.operands[0], result, type.isSigned());
}

void Translator::onBfi(const Instruction& instruction) {
  unsigned bits = typeAt(instruction).bits;
  Value* a = read(instruction.operands[1], bits);
  Value* b = read(instruction.operands[2], bits);
  Value* position = fieldBound(instruction.operands[3], bits);
  Value* length = fieldBound(instruction.operands[4], bits);
  Value* ones = llvm::Constant::getAllOnesValue(integer(bits));
  auto shifted = [&](Value* value, Value* amount) -> Value* {
    Value* moved = builder_.CreateShl(value, builder_.CreateZExtOrTrunc(amount, integer(bits)));
    return builder_.CreateSelect(builder_.CreateICmpUGE(amount, constant(bits)), constant(0, bits), moved);
  };
  Value* mask = shifted(builder_.CreateNot(shifted(ones, length)), position);
  Value* result = builder_.CreateOr(builder_.CreateAnd(b, builder_.CreateNot(mask)),
                                    builder_.CreateAnd(shifted(a, position), mask));
  write(instruction.operands[0], result);
}

void Translator::onSad(const Instruction& instruction) {
  Type type = typeAt(instruction);
  Value* a = read(instruction.operands[1], type.bits);
  Value* b = read(instruction.operands[2], type.bits);
  Value* less = type.isSigned() ? builder_.CreateICmpSLT(a, b) : builder_.CreateICmpULT(a, b);
  Value* distance = builder_.CreateSelect(less, builder_.CreateSub(b, a), builder_.CreateSub(a, b));
  write(instruction.operands[0], builder_.CreateAdd(distance, read(instruction.operands[3], type.bits)));
}

void Translator::onMul24(const Instruction& instruction) {
  Type type = typeAt(instruction);
  auto operand = [&](size_t index) -> Value* {
    Value* value = builder_.CreateShl(read(instruction.operands[index], 32), constant(8));
    value =
        type.isSigned() ? builder_.CreateAShr(value, constant(8)) : builder_.CreateLShr(value, constant(8));
    return type.isSigned() ? builder_.CreateSExt(value, integer(64))
                           : builder_.CreateZExt(value, integer(64));
  };
  Value* product = builder_.CreateMul(operand(1), operand(2));
  if (instruction.has("hi")) product = builder_.CreateLShr(product, constant(16, 64));
  Value* result = builder_.CreateTrunc(product, integer(32));
  if (instruction.opcode == "mad24") {
    if (instruction.has("sat"))
      result = intrinsicCall(llvm::Intrinsic::sadd_sat, {integer(32)},
                             {result, read(instruction.operands[3], 32)});
    else
      result = builder_.CreateAdd(result, read(instruction.operands[3], 32));
  }
  write(instruction.operands[0], result);
}

}  // namespace gpupool::softgpu::codegen
