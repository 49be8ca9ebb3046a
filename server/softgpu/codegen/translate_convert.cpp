// cvt and mov: conversions between types (PTX ISA 9.0, chapter 9.7.9.21, and "Operand conversions", 6.5).
#include <llvm/IR/Intrinsics.h>

#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/math.h"

namespace gpupool::softgpu::codegen {

using ptx::Kind;

void Translator::onMov(const Instruction& instruction) {
  Type type = typeAt(instruction);
  const Operand& to = instruction.operands[0];
  const Operand& from = instruction.operands[1];
  if (type.kind == Kind::predicate) return write(to, readPredicate(from));
  for (const Operand* one : {&to, &from})
    if (one->kind == Operand::Kind::vector && (one->parts.empty() || type.bits / one->parts.size() < 8))
      unsupported(instruction);
  if (from.kind == Operand::Kind::vector) {  // pack: the first part is the lowest
    unsigned part = type.bits / static_cast<unsigned>(from.parts.size());
    Value* result = constant(0, type.bits);
    for (unsigned i = 0; i < from.parts.size(); ++i) {
      Value* one = builder_.CreateZExt(read(from.parts[i], part), integer(type.bits));
      result = builder_.CreateOr(
          result, builder_.CreateShl(one, llvm::ConstantInt::get(integer(type.bits), uint64_t{part} * i)));
    }
    return write(to, result);
  }
  Value* value = read(from, type.bits);
  if (to.kind != Operand::Kind::vector) return write(to, value, type.isSigned());
  unsigned part = type.bits / static_cast<unsigned>(to.parts.size());
  for (unsigned i = 0; i < to.parts.size(); ++i)
    write(to.parts[i],
          builder_.CreateTrunc(
              builder_.CreateLShr(value, llvm::ConstantInt::get(integer(type.bits), uint64_t{part} * i)),
              integer(part)));
}

void Translator::onCvt(const Instruction& instruction) {
  if (instruction.has("pack")) {
    if (!convertPacked(instruction, {}, {})) unsupported(instruction);
    return;
  }
  std::vector<Type> both = types(instruction);
  for (auto word : instruction.modifiers)
    if (word.starts_with("e4m3") || word.starts_with("e5m2")) {
      if (!convertPacked(instruction, {}, {})) unsupported(instruction);
      return;
    }
  if (both.size() != 2) unsupported(instruction);
  Type to = both[0];
  Type from = both[1];
  if (to.lanes == 2 || from.lanes == 2) {
    if (!convertPacked(instruction, to, from)) unsupported(instruction);
    return;
  }
  const Operand& source = instruction.operands[1];
  Value* result = nullptr;
  if (from.isInteger()) {
    Value* value = read(source, from.bits);
    result = to.isInteger() ? integerToInteger(instruction, value, to, from)
                            : integerToReal(instruction, value, to, from);
  } else {
    Value* value = nullptr;
    if (from.bits >= 32)
      value = flush(readReal(source, from.bits), instruction.has("ftz"));
    else
      value = smallToFloat(read(source, 16), from.kind);
    result =
        to.isInteger() ? toInteger(instruction, value, to, from) : realToReal(instruction, value, to, from);
  }
  write(instruction.operands[0], result, to.isSigned());
}

llvm::Value* Translator::integerToInteger(const Instruction& instruction, Value* value, Type to, Type from) {
  unsigned bits = std::max(to.bits, from.bits) + 1u;
  if (!instruction.has("sat"))
    return from.isSigned() ? builder_.CreateSExtOrTrunc(value, integer(to.bits))
                           : builder_.CreateZExtOrTrunc(value, integer(to.bits));
  Value* wide =
      from.isSigned() ? builder_.CreateSExt(value, integer(bits)) : builder_.CreateZExt(value, integer(bits));
  llvm::APInt high = to.isSigned() ? llvm::APInt::getSignedMaxValue(to.bits).sext(bits)
                                   : llvm::APInt::getMaxValue(to.bits).zext(bits);
  llvm::APInt low = to.isSigned() ? llvm::APInt::getSignedMinValue(to.bits).sext(bits) : llvm::APInt(bits, 0);
  wide =
      intrinsicCall(llvm::Intrinsic::smin, {wide->getType()}, {wide, llvm::ConstantInt::get(context_, high)});
  wide =
      intrinsicCall(llvm::Intrinsic::smax, {wide->getType()}, {wide, llvm::ConstantInt::get(context_, low)});
  return builder_.CreateTrunc(wide, integer(to.bits));
}

llvm::Value* Translator::integerToReal(const Instruction& instruction, Value* value, Type to, Type from) {
  std::string_view rounding = roundingOf(instruction);
  bool isSigned = from.isSigned();
  auto* i64 = integer(64);
  Value* result = nullptr;
  if (to.bits == 16) {  // what a double cannot hold exactly is far beyond a half's range, but not a bfloat's
    Value* wide = isSigned ? builder_.CreateSExtOrTrunc(value, i64) : builder_.CreateZExtOrTrunc(value, i64);
    auto mode = static_cast<uint32_t>(runtime::roundingNamed(rounding));
    const char* symbol = to.kind == Kind::bfloat ? "gpupool.integerToBfloat" : "gpupool.integerToHalf";
    result = builder_.CreateTrunc(call(symbol, integer(32), {wide, constant(isSigned), constant(mode)}, true),
                                  integer(16));
    return instruction.has("sat") ? saturateSmall(result, to.kind) : result;
  }
  auto* real = to.bits == 64 ? builder_.getDoubleTy() : builder_.getFloatTy();
  if (rounding == "rn") {
    result = isSigned ? builder_.CreateSIToFP(value, real) : builder_.CreateUIToFP(value, real);
  } else {
    Value* wide = isSigned ? builder_.CreateSExtOrTrunc(value, i64) : builder_.CreateZExtOrTrunc(value, i64);
    result = roundedCall(isSigned ? "fromS64" : "fromU64", rounding, to.bits, {wide});
  }
  return instruction.has("sat") ? saturate(result) : result;
}

llvm::Value* Translator::toInteger(const Instruction& instruction, Value* value, Type to, Type from) {
  auto id = instruction.has("rni")   ? llvm::Intrinsic::roundeven
            : instruction.has("rmi") ? llvm::Intrinsic::floor
            : instruction.has("rpi") ? llvm::Intrinsic::ceil
            : instruction.has("rzi") ? llvm::Intrinsic::trunc
                                     : llvm::Intrinsic::not_intrinsic;
  if (id == llvm::Intrinsic::not_intrinsic) unsupported(instruction, "rounding");
  Value* rounded = intrinsicCall(id, {value->getType()}, {value});
  auto convert = to.isSigned() ? llvm::Intrinsic::fptosi_sat : llvm::Intrinsic::fptoui_sat;
  Value* result = intrinsicCall(convert, {integer(to.bits), value->getType()}, {rounded});
  if (from.bits < 64 && to.bits < 64) return result;
  // NaN: zero for narrow conversions, the top bit alone where a 64-bit type takes part.
  llvm::APInt top = llvm::APInt::getSignMask(to.bits);
  return builder_.CreateSelect(builder_.CreateFCmpUNO(value, value), llvm::ConstantInt::get(context_, top),
                               result);
}

llvm::Value* Translator::realToReal(const Instruction& instruction, Value* value, Type to, Type from) {
  std::string_view rounding = roundingOf(instruction);
  if (to.kind == Kind::tf32) {
    auto mode = static_cast<uint32_t>(instruction.has("rna") ? runtime::Rounding::away
                                                             : runtime::roundingNamed(rounding));
    return call("gpupool.toTf32", integer(32), {value, constant(mode)}, true);
  }
  bool isIntegral =
      instruction.has("rni") || instruction.has("rzi") || instruction.has("rmi") || instruction.has("rpi");
  if (isIntegral) {
    auto id = instruction.has("rni")   ? llvm::Intrinsic::roundeven
              : instruction.has("rmi") ? llvm::Intrinsic::floor
              : instruction.has("rpi") ? llvm::Intrinsic::ceil
                                       : llvm::Intrinsic::trunc;
    value = intrinsicCall(id, {value->getType()}, {value});
  }
  bool ftz = instruction.has("ftz");
  if (to.bits == 16) {
    Value* result = floatToSmall(value, to.kind, rounding);
    if (instruction.has("sat")) result = saturateSmall(result, to.kind);
    if (instruction.has("satfinite")) {
      Value* magnitude = builder_.CreateAnd(result, constant(0x7FFF, 16));
      uint64_t infinity = to.kind == Kind::bfloat ? 0x7F80 : 0x7C00;
      Value* limit =
          builder_.CreateOr(builder_.CreateAnd(result, constant(0x8000, 16)), constant(infinity - 1, 16));
      result = builder_.CreateSelect(builder_.CreateICmpEQ(magnitude, constant(infinity, 16)), limit, result);
    }
    if (instruction.has("relu")) {
      Value* keep =
          builder_.CreateOr(builder_.CreateICmpSGE(result, constant(0, 16)), isNanSmall(result, to.kind));
      result = builder_.CreateSelect(keep, result, constant(0, 16));
    }
    return result;
  }
  if (to.bits == 64 && value->getType()->isFloatTy())
    value = builder_.CreateFPExt(value, builder_.getDoubleTy());
  if (to.bits == 32 && value->getType()->isDoubleTy()) {
    if (ftz) {  // what is too small before rounding is flushed, also where rounding would save it
      auto* wide = builder_.getDoubleTy();
      Value* tiny = builder_.CreateFCmpOLT(absolute(value), llvm::ConstantFP::get(wide, 0x1p-126));
      Value* zero =
          intrinsicCall(llvm::Intrinsic::copysign, {wide}, {llvm::ConstantFP::get(wide, 0.0), value});
      value = builder_.CreateSelect(tiny, zero, value);
    }
    value = rounding == "rn" ? builder_.CreateFPTrunc(value, builder_.getFloatTy())
                             : roundedCall("narrow", rounding, 32, {value});
  }
  (void)from;
  value = flush(value, ftz);
  return instruction.has("sat") ? saturate(value) : value;
}

// cvt of pairs, of 8-bit floats, and cvt.pack. False: not one of those handled.
bool Translator::convertPacked(const Instruction& instruction, Type to, Type from) {
  const auto& operands = instruction.operands;
  auto join = [&](Value* high, Value* low, unsigned bits) {
    Value* wideHigh =
        builder_.CreateShl(builder_.CreateZExt(high, integer(bits * 2)), constant(bits, bits * 2));
    return builder_.CreateOr(wideHigh, builder_.CreateZExt(low, integer(bits * 2)));
  };
  if (to.lanes == 2 && from.lanes == 1 && from.bits == 32 && from.kind == Kind::real &&
      operands.size() == 3) {
    Type one{to.kind, 16, 1};
    Value* high = realToReal(instruction, readReal(operands[1], 32), one, from);
    Value* low = realToReal(instruction, readReal(operands[2], 32), one, from);
    write(operands[0], join(high, low, 16));
    return true;
  }
  if (instruction.has("pack")) {
    std::vector<Type> all = types(instruction);
    if (all.size() < 2 || operands.size() < 3 || all[0].bits < 8) return false;
    Value* high = integerToInteger(instruction, read(operands[1], 32), all[0], all[1]);
    Value* low = integerToInteger(instruction, read(operands[2], 32), all[0], all[1]);
    Value* both = builder_.CreateZExt(join(high, low, all[0].bits), integer(32));
    if (operands.size() > 3)
      both = builder_.CreateOr(
          both, builder_.CreateShl(read(operands[3], 32), constant(uint64_t{all[0].bits} * 2)));
    write(operands[0], both);
    return true;
  }
  auto eightBit = [](std::string_view word) { return word == "e4m3x2" || word == "e5m2x2"; };
  std::string_view first;
  std::string_view second;
  for (auto word : instruction.modifiers)
    if (eightBit(word) || ptx::typeOf(word).kind != Kind::none) (first.empty() ? first : second) = word;
  auto narrow = [&](Value* value) {
    Value* relu = constant(instruction.has("relu"));
    return builder_.CreateTrunc(
        call("gpupool.toFloat8", integer(32), {value, constant(first == "e5m2x2"), relu}, true), integer(8));
  };
  if (eightBit(first) && second == "f32" && operands.size() == 3) {
    write(operands[0], join(narrow(readReal(operands[1], 32)), narrow(readReal(operands[2], 32)), 8));
    return true;
  }
  if (eightBit(first) && second == "f16x2") {
    Value* word = read(operands[1], 32);
    auto part = [&](unsigned shift) {
      return narrow(smallToFloat(
          builder_.CreateTrunc(builder_.CreateLShr(word, constant(shift)), integer(16)), Kind::real));
    };
    write(operands[0], join(part(16), part(0), 8));
    return true;
  }
  if (first == "f16x2" && eightBit(second)) {
    Value* word = read(operands[1], 16);
    auto part = [&](unsigned shift) -> Value* {
      Value* byte = builder_.CreateAnd(
          builder_.CreateZExt(builder_.CreateLShr(word, constant(shift, 16)), integer(32)), constant(255));
      Value* half = builder_.CreateTrunc(
          call("gpupool.float8ToHalf", integer(32), {byte, constant(second == "e5m2x2")}, true), integer(16));
      if (!instruction.has("relu")) return half;
      Value* keep =
          builder_.CreateOr(builder_.CreateICmpSGE(half, constant(0, 16)), isNanSmall(half, Kind::real));
      return builder_.CreateSelect(keep, half, constant(0, 16));
    };
    write(operands[0], join(part(8), part(0), 16));
    return true;
  }
  return false;
}

}  // namespace gpupool::softgpu::codegen
