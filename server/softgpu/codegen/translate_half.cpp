// f16, bf16 and their pairs: computed in wider arithmetic and rounded once. Sums and products of halves round
// the same through float (24 bits are more than 2 * 11 + 1); everything else goes through the runtime's
// rounding to odd.
#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/math.h"

namespace gpupool::softgpu::codegen {

using ptx::Kind;

llvm::Value* Translator::smallToFloat(Value* bits, Kind kind) {
  if (kind == Kind::bfloat)
    return builder_.CreateBitCast(builder_.CreateShl(builder_.CreateZExt(bits, integer(32)), constant(16)),
                                  builder_.getFloatTy());
  if (!features_.f16c)
    return call("gpupool.halfToFloat", builder_.getFloatTy(), {builder_.CreateZExt(bits, integer(32))}, true);
  return builder_.CreateFPExt(builder_.CreateBitCast(bits, builder_.getHalfTy()), builder_.getFloatTy());
}

// `value`: float or double.
llvm::Value* Translator::floatToSmall(Value* value, Kind kind, std::string_view rounding) {
  if (kind == Kind::real && rounding == "rn" && features_.f16c && value->getType()->isFloatTy()) {
    Value* half = builder_.CreateBitCast(builder_.CreateFPTrunc(value, builder_.getHalfTy()), integer(16));
    Value* isNan = builder_.CreateFCmpUNO(value, value);
    return builder_.CreateSelect(isNan, constant(0x7FFF, 16), half);
  }
  if (kind == Kind::bfloat && rounding == "rn" && value->getType()->isFloatTy()) {
    Value* bits = builder_.CreateBitCast(value, integer(32));
    Value* odd = builder_.CreateAnd(builder_.CreateLShr(bits, constant(16)), constant(1));
    Value* rounded = builder_.CreateLShr(builder_.CreateAdd(bits, builder_.CreateAdd(odd, constant(0x7FFF))),
                                         constant(16));
    Value* isNan = builder_.CreateFCmpUNO(value, value);
    return builder_.CreateTrunc(builder_.CreateSelect(isNan, constant(0x7FFF), rounded), integer(16));
  }
  if (value->getType()->isFloatTy()) value = builder_.CreateFPExt(value, builder_.getDoubleTy());
  auto mode = static_cast<uint32_t>(runtime::roundingNamed(rounding));
  const char* symbol = kind == Kind::bfloat ? "gpupool.toBfloat" : "gpupool.toHalf";
  return builder_.CreateTrunc(call(symbol, integer(32), {value, constant(mode)}, true), integer(16));
}

llvm::Value* Translator::mapLanes(Type type, const std::vector<Value*>& operands,
                                  const std::function<Value*(const std::vector<Value*>&)>& one) {
  if (type.lanes == 1) return one(operands);
  Value* result = constant(0);
  for (uint64_t lane = 0; lane < 2; ++lane) {
    std::vector<Value*> parts;
    parts.reserve(operands.size());
    for (Value* word : operands)
      parts.push_back(builder_.CreateTrunc(builder_.CreateLShr(word, constant(16 * lane)), integer(16)));
    result = builder_.CreateOr(
        result, builder_.CreateShl(builder_.CreateZExt(one(parts), integer(32)), constant(16 * lane)));
  }
  return result;
}

llvm::Value* Translator::isNanSmall(Value* bits, Kind kind) {
  Value* magnitude = builder_.CreateAnd(bits, constant(0x7FFF, 16));
  return builder_.CreateICmpUGT(magnitude, constant(kind == Kind::bfloat ? 0x7F80 : 0x7C00, 16));
}

llvm::Value* Translator::flushSmall(Value* bits) {
  Value* small = builder_.CreateICmpEQ(builder_.CreateAnd(bits, constant(0x7C00, 16)), constant(0, 16));
  return builder_.CreateSelect(small, builder_.CreateAnd(bits, constant(0x8000, 16)), bits);
}

llvm::Value* Translator::saturateSmall(Value* bits, Kind kind) {
  uint64_t one = kind == Kind::bfloat ? 0x3F80 : 0x3C00;
  Value* negative = builder_.CreateICmpSLT(bits, constant(0, 16));
  Value* zero = builder_.CreateOr(negative, isNanSmall(bits, kind));
  Value* limited = intrinsicCall(llvm::Intrinsic::umin, {integer(16)}, {bits, constant(one, 16)});
  return builder_.CreateSelect(zero, constant(0, 16), limited);
}

llvm::Value* Translator::smallFma(Value* a, Value* b, Value* c, Kind kind) {
  auto wide = [&](Value* bits) {
    return builder_.CreateFPExt(smallToFloat(bits, kind), builder_.getDoubleTy());
  };
  const char* symbol = kind == Kind::bfloat ? "gpupool.fmaBfloat" : "gpupool.fmaHalf";
  return builder_.CreateTrunc(call(symbol, integer(32), {wide(a), wide(b), wide(c)}, true), integer(16));
}

llvm::Value* Translator::smallArithmetic(const Instruction& instruction, Type type, std::string_view opcode,
                                         const std::vector<Value*>& operands) {
  Kind kind = type.kind;
  if (roundingOf(instruction) != "rn" && instruction.opcode != "atom" && instruction.opcode != "red")
    unsupported(instruction);
  bool ftz = instruction.has("ftz") && kind == Kind::real;
  return mapLanes(type, operands, [&](const std::vector<Value*>& raw) -> Value* {
    std::vector<Value*> lane = raw;
    if (ftz)
      for (Value*& one : lane) one = flushSmall(one);
    if (opcode == "neg") return builder_.CreateXor(lane[0], constant(0x8000, 16));
    if (opcode == "abs") return builder_.CreateAnd(lane[0], constant(0x7FFF, 16));
    Value* result = nullptr;
    if (opcode == "min" || opcode == "max") {
      Value* picked =
          minMax(instruction, smallToFloat(lane[0], kind), smallToFloat(lane[1], kind), opcode == "max");
      return floatToSmall(picked, kind);
    }
    if (opcode == "fma") {
      result = smallFma(lane[0], lane[1], lane[2], kind);
    } else if (kind == Kind::bfloat) {
      Value* one = constant(0x3F80, 16);
      Value* minusZero = constant(0x8000, 16);
      if (opcode == "add") result = smallFma(lane[0], one, lane[1], kind);
      if (opcode == "sub") result = smallFma(lane[1], constant(0xBF80, 16), lane[0], kind);
      if (opcode == "mul") result = smallFma(lane[0], lane[1], minusZero, kind);
    } else {
      Value* a = smallToFloat(lane[0], kind);
      Value* b = smallToFloat(lane[1], kind);
      if (opcode == "add") result = builder_.CreateFAdd(a, b);
      if (opcode == "sub") result = builder_.CreateFSub(a, b);
      if (opcode == "mul") result = builder_.CreateFMul(a, b);
      if (result != nullptr) result = floatToSmall(result, kind);
    }
    if (result == nullptr) unsupported(instruction);
    if (ftz) result = flushSmall(result);
    if (instruction.has("sat")) result = saturateSmall(result, kind);
    if (instruction.has("relu")) {
      Value* negative = builder_.CreateICmpSLT(result, constant(0, 16));
      Value* keep = builder_.CreateOr(builder_.CreateNot(negative), isNanSmall(result, kind));
      result = builder_.CreateSelect(keep, result, constant(0, 16));
    }
    return result;
  });
}

}  // namespace gpupool::softgpu::codegen
