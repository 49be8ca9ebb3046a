// Floating-point arithmetic and comparisons (PTX ISA 9.0, chapters 9.7.3 and 9.7.5).
#include <llvm/IR/Intrinsics.h>

#include <cmath>

#include "server/softgpu/codegen/translator.h"

namespace gpupool::softgpu::codegen {

using llvm::CmpInst;

std::string_view Translator::roundingOf(const Instruction& instruction) {
  for (auto word : instruction.modifiers)
    if (word == "rz" || word == "rm" || word == "rp") return word;
  return "rn";
}

llvm::Value* Translator::roundedCall(std::string_view name, std::string_view rounding, unsigned bits,
                                     std::initializer_list<Value*> arguments) {
  std::string symbol =
      "gpupool." + std::string(name) + "." + std::string(rounding) + (bits == 64 ? ".f64" : ".f32");
  return call(symbol.c_str(), bits == 64 ? builder_.getDoubleTy() : builder_.getFloatTy(), arguments, true);
}

// Subnormal -> zero of the same sign; only .f32 has .ftz (halves flush in translate_half.cpp).
llvm::Value* Translator::flush(Value* value, bool really) {
  if (!really || !value->getType()->isFloatTy()) return value;
  Value* bits = builder_.CreateBitCast(value, integer(32));
  Value* small = builder_.CreateICmpEQ(builder_.CreateAnd(bits, constant(0x7F800000)), constant(0));
  Value* zero = builder_.CreateAnd(bits, constant(0x80000000));
  return builder_.CreateBitCast(builder_.CreateSelect(small, zero, bits), builder_.getFloatTy());
}

// Into [0, 1]; NaN becomes 0.
llvm::Value* Translator::saturate(Value* value) {
  Value* zero = llvm::ConstantFP::get(value->getType(), 0.0);
  Value* one = llvm::ConstantFP::get(value->getType(), 1.0);
  Value* low = builder_.CreateSelect(builder_.CreateFCmpOGT(value, zero), value, zero);
  return builder_.CreateSelect(builder_.CreateFCmpOLT(low, one), low, one);
}

void Translator::onFma(const Instruction& instruction) {
  Type type = typeAt(instruction);
  const auto& operands = instruction.operands;
  if (!type.isReal()) unsupported(instruction);
  if (type.bits < 32 || type.lanes > 1 || type.kind == ptx::Kind::bfloat) {
    Value* result = smallArithmetic(
        instruction, type, "fma",
        {read(operands[1], type.bits), read(operands[2], type.bits), read(operands[3], type.bits)});
    return write(operands[0], result);
  }
  bool ftz = instruction.has("ftz");
  Value* a = flush(readReal(operands[1], type.bits), ftz);
  Value* b = flush(readReal(operands[2], type.bits), ftz);
  Value* c = flush(readReal(operands[3], type.bits), ftz);
  std::string_view rounding = roundingOf(instruction);
  Value* result = rounding == "rn" ? intrinsicCall(llvm::Intrinsic::fma, {a->getType()}, {a, b, c})
                                   : roundedCall("fma", rounding, type.bits, {a, b, c});
  result = flush(result, ftz);
  write(operands[0], instruction.has("sat") ? saturate(result) : result);
}

// .approx and .full are computed exactly rounded: better than asked for.
void Translator::onDiv(const Instruction& instruction) {
  Type type = typeAt(instruction);
  if (!type.isReal()) return onRem(instruction);
  realType(instruction, type);
  bool ftz = instruction.has("ftz");
  Value* a = flush(readReal(instruction.operands[1], type.bits), ftz);
  Value* b = flush(readReal(instruction.operands[2], type.bits), ftz);
  std::string_view rounding = roundingOf(instruction);
  Value* result =
      rounding == "rn" ? builder_.CreateFDiv(a, b) : roundedCall("div", rounding, type.bits, {a, b});
  write(instruction.operands[0], flush(result, ftz));
}

void Translator::onRcp(const Instruction& instruction) {
  Type type = typeAt(instruction);
  auto* real = realType(instruction, type);
  bool ftz = instruction.has("ftz");
  Value* one = llvm::ConstantFP::get(real, 1.0);
  Value* a = flush(readReal(instruction.operands[1], type.bits), ftz);
  std::string_view rounding = roundingOf(instruction);
  Value* result =
      rounding == "rn" ? builder_.CreateFDiv(one, a) : roundedCall("div", rounding, type.bits, {one, a});
  if (type.bits == 64 && instruction.has("approx"))  // the low word is zero
    result = builder_.CreateAnd(bitsOf(result), constant(0xFFFFFFFF00000000, 64));
  write(instruction.operands[0], flush(result, ftz));
}

void Translator::onSqrt(const Instruction& instruction) {
  Type type = typeAt(instruction);
  realType(instruction, type);
  bool ftz = instruction.has("ftz");
  Value* a = flush(readReal(instruction.operands[1], type.bits), ftz);
  std::string_view rounding = roundingOf(instruction);
  Value* result = rounding == "rn" ? intrinsicCall(llvm::Intrinsic::sqrt, {a->getType()}, {a})
                                   : roundedCall("sqrt", rounding, type.bits, {a});
  write(instruction.operands[0], flush(result, ftz));
}

void Translator::onRsqrt(const Instruction& instruction) {
  Type type = typeAt(instruction);
  realType(instruction, type);
  bool ftz = instruction.has("ftz");
  Value* a = flush(readReal(instruction.operands[1], type.bits), ftz);
  Value* wide = builder_.CreateFPExt(a, builder_.getDoubleTy());
  Value* root = intrinsicCall(llvm::Intrinsic::sqrt, {builder_.getDoubleTy()}, {wide});
  Value* result = builder_.CreateFDiv(llvm::ConstantFP::get(builder_.getDoubleTy(), 1.0), root);
  if (type.bits == 32) result = builder_.CreateFPTrunc(result, builder_.getFloatTy());
  write(instruction.operands[0], flush(result, ftz));
}

void Translator::onTranscendental(const Instruction& instruction) {
  Type type = typeAt(instruction);
  std::string symbol = "gpupool." + std::string(instruction.opcode) + ".f32";
  auto* real = builder_.getFloatTy();
  auto one = [&](Value* a) { return call(symbol.c_str(), real, {a}, true); };
  bool ftz = instruction.has("ftz");
  if (type.kind == ptx::Kind::real && type.bits == 32 && type.lanes == 1) {
    Value* a = flush(readReal(instruction.operands[1], 32), ftz);
    return write(instruction.operands[0], flush(one(a), ftz));
  }
  if (!type.isReal() || type.bits == 64) unsupported(instruction);
  Value* result =
      mapLanes(type, {read(instruction.operands[1], type.bits)}, [&](const std::vector<Value*>& lane) {
        Value* a = ftz ? flushSmall(lane[0]) : lane[0];
        Value* made = floatToSmall(one(smallToFloat(a, type.kind)), type.kind);
        return ftz ? flushSmall(made) : made;
      });
  write(instruction.operands[0], result);
}

llvm::Value* Translator::absolute(Value* value) {
  return intrinsicCall(llvm::Intrinsic::fabs, {value->getType()}, {value});
}

void Translator::onAbs(const Instruction& instruction) {
  Type type = typeAt(instruction);
  const Operand& source = instruction.operands[1];
  if (type.isReal() && (type.bits < 32 || type.lanes > 1 || type.kind == ptx::Kind::bfloat))
    return write(instruction.operands[0],
                 smallArithmetic(instruction, type, "abs", {read(source, type.bits)}));
  if (type.isReal()) {
    bool ftz = instruction.has("ftz");
    return write(instruction.operands[0], absolute(flush(readReal(source, type.bits), ftz)));
  }
  Value* a = read(source, type.bits);
  write(instruction.operands[0],
        intrinsicCall(llvm::Intrinsic::abs, {a->getType()}, {a, builder_.getFalse()}), true);
}

void Translator::onNeg(const Instruction& instruction) {
  Type type = typeAt(instruction);
  const Operand& source = instruction.operands[1];
  if (type.isReal() && (type.bits < 32 || type.lanes > 1 || type.kind == ptx::Kind::bfloat))
    return write(instruction.operands[0],
                 smallArithmetic(instruction, type, "neg", {read(source, type.bits)}));
  if (type.isReal())
    return write(instruction.operands[0],
                 builder_.CreateFNeg(flush(readReal(source, type.bits), instruction.has("ftz"))));
  write(instruction.operands[0], builder_.CreateNeg(read(source, type.bits)), true);
}

// The number where one operand is NaN (or NaN, with .NaN); -0 is less than +0.
llvm::Value* Translator::minMax(const Instruction& instruction, Value* a, Value* b, bool maximum) {
  Value* sign = nullptr;
  auto* bits = integer(static_cast<unsigned>(a->getType()->getPrimitiveSizeInBits()));
  if (instruction.has("xorsign")) {
    sign = builder_.CreateXor(bitsOf(a), bitsOf(b));
    sign = builder_.CreateAnd(
        sign, llvm::ConstantInt::get(bits, llvm::APInt::getSignMask(bits->getIntegerBitWidth())));
    a = absolute(a);
    b = absolute(b);
  }
  auto id = maximum ? llvm::Intrinsic::maximum : llvm::Intrinsic::minimum;
  Value* result = intrinsicCall(id, {a->getType()}, {a, b});
  Value* nan = builder_.CreateBitCast(
      llvm::ConstantInt::get(bits, bits->getIntegerBitWidth() == 64 ? 0x7FF8000000000000 : 0x7FFFFFFF),
      a->getType());
  Value* aIsNan = builder_.CreateFCmpUNO(a, a);
  Value* bIsNan = builder_.CreateFCmpUNO(b, b);
  if (instruction.has("NaN")) {
    result = builder_.CreateSelect(builder_.CreateOr(aIsNan, bIsNan), nan, result);
  } else {
    Value* other =
        builder_.CreateSelect(builder_.CreateAnd(aIsNan, bIsNan), nan, builder_.CreateSelect(aIsNan, b, a));
    result = builder_.CreateSelect(builder_.CreateOr(aIsNan, bIsNan), other, result);
  }
  if (sign != nullptr) result = builder_.CreateBitCast(builder_.CreateOr(bitsOf(result), sign), a->getType());
  return result;
}

void Translator::onMinMax(const Instruction& instruction) {
  Type type = typeAt(instruction);
  bool maximum = instruction.opcode == "max";
  const auto& operands = instruction.operands;
  if (operands.size() != 3) unsupported(instruction);
  if (type.isReal() && (type.bits < 32 || type.lanes > 1 || type.kind == ptx::Kind::bfloat))
    return write(operands[0], smallArithmetic(instruction, type, instruction.opcode,
                                              {read(operands[1], type.bits), read(operands[2], type.bits)}));
  if (type.isReal()) {
    bool ftz = instruction.has("ftz");
    Value* a = flush(readReal(operands[1], type.bits), ftz);
    Value* b = flush(readReal(operands[2], type.bits), ftz);
    return write(operands[0], minMax(instruction, a, b, maximum));
  }
  auto id = type.isSigned() ? (maximum ? llvm::Intrinsic::smax : llvm::Intrinsic::smin)
                            : (maximum ? llvm::Intrinsic::umax : llvm::Intrinsic::umin);
  auto one = [&](Value* a, Value* b) {
    Value* result = intrinsicCall(id, {a->getType()}, {a, b});
    if (instruction.has("relu"))
      result = intrinsicCall(llvm::Intrinsic::smax, {a->getType()},
                             {result, llvm::Constant::getNullValue(a->getType())});
    return result;
  };
  Value* a = read(operands[1], type.bits);
  Value* b = read(operands[2], type.bits);
  if (type.lanes == 2)
    return write(operands[0], mapLanes(type, {a, b}, [&](const std::vector<Value*>& lane) {
                   return one(lane[0], lane[1]);
                 }));
  write(operands[0], one(a, b), type.isSigned());
}

void Translator::onTestp(const Instruction& instruction) {
  Type type = typeAt(instruction);
  realType(instruction, type);
  Value* a = readReal(instruction.operands[1], type.bits);
  unsigned mask = instruction.has("finite")       ? llvm::fcFinite
                  : instruction.has("infinite")   ? llvm::fcInf
                  : instruction.has("number")     ? llvm::fcFinite | llvm::fcInf
                  : instruction.has("notanumber") ? llvm::fcNan
                  : instruction.has("normal")     ? llvm::fcNormal | llvm::fcZero
                  : instruction.has("subnormal")  ? llvm::fcSubnormal
                                                  : 0u;
  if (mask == 0) unsupported(instruction);
  write(instruction.operands[0],
        intrinsicCall(llvm::Intrinsic::is_fpclass, {a->getType()}, {a, constant(mask)}));
}

void Translator::onCopysign(const Instruction& instruction) {
  Type type = typeAt(instruction);
  realType(instruction, type);
  Value* sign = readReal(instruction.operands[1], type.bits);
  Value* magnitude = readReal(instruction.operands[2], type.bits);
  write(instruction.operands[0],
        intrinsicCall(llvm::Intrinsic::copysign, {sign->getType()}, {magnitude, sign}));
}

// ---- comparisons ----
llvm::Value* Translator::compareReal(std::string_view comparison, Value* a, Value* b) {
  static const std::unordered_map<std::string_view, CmpInst::Predicate> table = {
      {"eq", CmpInst::FCMP_OEQ},  {"ne", CmpInst::FCMP_ONE},  {"lt", CmpInst::FCMP_OLT},
      {"le", CmpInst::FCMP_OLE},  {"gt", CmpInst::FCMP_OGT},  {"ge", CmpInst::FCMP_OGE},
      {"equ", CmpInst::FCMP_UEQ}, {"neu", CmpInst::FCMP_UNE}, {"ltu", CmpInst::FCMP_ULT},
      {"leu", CmpInst::FCMP_ULE}, {"gtu", CmpInst::FCMP_UGT}, {"geu", CmpInst::FCMP_UGE},
      {"num", CmpInst::FCMP_ORD}, {"nan", CmpInst::FCMP_UNO}};
  auto found = table.find(comparison);
  return found == table.end() ? nullptr : builder_.CreateFCmp(found->second, a, b);
}

llvm::Value* Translator::compareInteger(std::string_view comparison, Value* a, Value* b, bool isSigned) {
  static const std::unordered_map<std::string_view, std::pair<CmpInst::Predicate, CmpInst::Predicate>> table =
      {{"eq", {CmpInst::ICMP_EQ, CmpInst::ICMP_EQ}},   {"ne", {CmpInst::ICMP_NE, CmpInst::ICMP_NE}},
       {"lt", {CmpInst::ICMP_SLT, CmpInst::ICMP_ULT}}, {"le", {CmpInst::ICMP_SLE, CmpInst::ICMP_ULE}},
       {"gt", {CmpInst::ICMP_SGT, CmpInst::ICMP_UGT}}, {"ge", {CmpInst::ICMP_SGE, CmpInst::ICMP_UGE}},
       {"lo", {CmpInst::ICMP_ULT, CmpInst::ICMP_ULT}}, {"ls", {CmpInst::ICMP_ULE, CmpInst::ICMP_ULE}},
       {"hi", {CmpInst::ICMP_UGT, CmpInst::ICMP_UGT}}, {"hs", {CmpInst::ICMP_UGE, CmpInst::ICMP_UGE}}};
  auto found = table.find(comparison);
  if (found == table.end()) return nullptr;
  return builder_.CreateICmp(isSigned ? found->second.first : found->second.second, a, b);
}

llvm::Value* Translator::compare(const Instruction& instruction, std::string_view comparison, Type type) {
  const Operand& left = instruction.operands[1];
  const Operand& right = instruction.operands[2];
  Value* result = nullptr;
  if (type.kind == ptx::Kind::real && type.bits >= 32 && type.lanes == 1) {
    bool ftz = instruction.has("ftz");
    result = compareReal(comparison, flush(readReal(left, type.bits), ftz),
                         flush(readReal(right, type.bits), ftz));
  } else if (type.isReal() && type.lanes == 1) {
    result = compareReal(comparison, smallToFloat(read(left, 16), type.kind),
                         smallToFloat(read(right, 16), type.kind));
  } else if (type.isInteger()) {
    result = compareInteger(comparison, read(left, type.bits), read(right, type.bits), type.isSigned());
  }
  if (result == nullptr) unsupported(instruction);
  return result;
}

llvm::Value* Translator::combine(const Instruction& instruction, Value* result, const Operand& with) {
  Value* other = readPredicate(with);
  if (instruction.has("and")) return builder_.CreateAnd(result, other);
  if (instruction.has("or")) return builder_.CreateOr(result, other);
  if (instruction.has("xor")) return builder_.CreateXor(result, other);
  unsupported(instruction);
}

void Translator::onSetp(const Instruction& instruction) {
  Type type = typeAt(instruction);
  const auto& operands = instruction.operands;
  if (instruction.modifiers.empty()) unsupported(instruction);
  std::string_view comparison = instruction.modifiers[0];
  bool isPair = operands[0].kind == Operand::Kind::pair;
  auto finish = [&](Value* value) {
    return operands.size() > 3 ? combine(instruction, value, operands[3]) : value;
  };
  if (type.isReal() && type.lanes == 2) {
    if (!isPair) unsupported(instruction);
    Value* a = read(operands[1], 32);
    Value* b = read(operands[2], 32);
    Value* results[2];
    for (unsigned lane = 0; lane < 2; ++lane) {
      auto part = [&](Value* word) {
        return smallToFloat(
            builder_.CreateTrunc(builder_.CreateLShr(word, constant(uint64_t{16} * lane)), integer(16)),
            type.kind);
      };
      results[lane] = compareReal(comparison, part(a), part(b));
      if (results[lane] == nullptr) unsupported(instruction);
      results[lane] = finish(results[lane]);
    }
    write(operands[0].parts[0], results[0]);
    return write(operands[0].parts[1], results[1]);
  }
  Value* result = compare(instruction, comparison, type);
  if (!isPair) return write(operands[0], finish(result));
  Value* first = finish(result);
  Value* second = finish(builder_.CreateNot(result));
  write(operands[0].parts[0], first);
  write(operands[0].parts[1], second);
}

void Translator::onSet(const Instruction& instruction) {
  std::vector<Type> both = types(instruction);
  if (both.size() != 2) unsupported(instruction);
  const auto& operands = instruction.operands;
  std::string_view comparison = instruction.modifiers[0];
  Type to = both[0];
  auto encode = [&](Value* result, unsigned bits) -> Value* {
    if (to.isInteger()) return builder_.CreateSExt(result, integer(bits));
    uint64_t one = to.kind == ptx::Kind::bfloat ? 0x3F80 : bits == 16 ? 0x3C00 : 0x3F800000;
    return builder_.CreateSelect(result, constant(one, bits), constant(0, bits));
  };
  if (both[1].lanes == 2) {
    Value* result = mapLanes(
        both[1], {read(operands[1], 32), read(operands[2], 32)}, [&](const std::vector<Value*>& lane) {
          Value* one = compareReal(comparison, smallToFloat(lane[0], both[1].kind),
                                   smallToFloat(lane[1], both[1].kind));
          if (one == nullptr) unsupported(instruction);
          return encode(operands.size() > 3 ? combine(instruction, one, operands[3]) : one, 16);
        });
    return write(operands[0], result);
  }
  Value* result = compare(instruction, comparison, both[1]);
  if (operands.size() > 3) result = combine(instruction, result, operands[3]);
  write(operands[0], encode(result, to.bits));
}

void Translator::onSelp(const Instruction& instruction) {
  unsigned bits = typeAt(instruction).bits;
  const auto& operands = instruction.operands;
  Value* a = read(operands[1], bits);
  Value* b = read(operands[2], bits);
  write(operands[0], builder_.CreateSelect(readPredicate(operands[3]), a, b), typeAt(instruction).isSigned());
}

void Translator::onSlct(const Instruction& instruction) {
  std::vector<Type> both = types(instruction);
  if (both.size() != 2) unsupported(instruction);
  const auto& operands = instruction.operands;
  Value* condition = nullptr;
  if (both[1].isReal()) {
    Value* c = flush(readReal(operands[3], 32), instruction.has("ftz"));
    condition = builder_.CreateFCmpOGE(c, llvm::ConstantFP::get(builder_.getFloatTy(), 0.0));
  } else {
    condition = builder_.CreateICmpSGE(read(operands[3], 32), constant(0));
  }
  write(operands[0],
        builder_.CreateSelect(condition, read(operands[1], both[0].bits), read(operands[2], both[0].bits)));
}

}  // namespace gpupool::softgpu::codegen
