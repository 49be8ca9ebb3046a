// Registers, constants, symbols and special registers as LLVM values.
#include <llvm/IR/Intrinsics.h>

#include <bit>

#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/context.h"

namespace gpupool::softgpu::codegen {

using runtime::BlockContext;
using runtime::ThreadContext;

llvm::Type* Translator::registerType(Type type) {
  if (type.kind == ptx::Kind::predicate) return integer(1);
  if (type.kind == ptx::Kind::real && type.lanes == 1 && type.bits == 32) return builder_.getFloatTy();
  if (type.kind == ptx::Kind::real && type.lanes == 1 && type.bits == 64) return builder_.getDoubleTy();
  return integer(type.bits);
}

llvm::Type* Translator::realType(const Instruction& instruction, Type type) {
  if (type.kind != ptx::Kind::real || type.lanes != 1 || type.bits < 32) unsupported(instruction);
  return type.bits == 64 ? builder_.getDoubleTy() : builder_.getFloatTy();
}

llvm::AllocaInst* Translator::registerSlot(int index) {
  llvm::AllocaInst*& slot = registers_[static_cast<size_t>(index)];
  if (slot == nullptr) {
    llvm::IRBuilder<> at(entryBlock_, entryBlock_->begin());
    slot = at.CreateAlloca(registerType(source_.registers[static_cast<size_t>(index)]));
  }
  return slot;
}

llvm::Value* Translator::readRegister(int index) {
  llvm::AllocaInst* slot = registerSlot(index);
  return builder_.CreateLoad(slot->getAllocatedType(), slot);
}

llvm::Value* Translator::bitsOf(Value* value) {
  llvm::Type* type = value->getType();
  if (type->isFloatTy()) return builder_.CreateBitCast(value, integer(32));
  if (type->isDoubleTy()) return builder_.CreateBitCast(value, integer(64));
  return value;
}

llvm::Value* Translator::constantOf(const Operand& operand, unsigned bits) {
  uint64_t value = operand.value;
  if (operand.kind == Operand::Kind::real32 && bits == 64)
    value = std::bit_cast<uint64_t>(static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(value))));
  if (operand.kind == Operand::Kind::real64 && bits == 32)
    value = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(value)));
  if (bits == 128)
    return llvm::ConstantInt::get(integer(128),
                                  llvm::APInt(128, value, operand.kind == Operand::Kind::integer));
  return llvm::ConstantInt::get(integer(bits), llvm::APInt(64, value).trunc(bits));
}

llvm::Value* Translator::addressOfSymbol(const Operand& operand) {
  auto id = program_.findVariable(id_.module, operand.text);
  if (id.first >= 0) {
    const ptx::Variable& variable = program_.variable(id);
    if (variable.space == ptx::Space::shared) {
      if (variable.unsized) {
        Value* offset = blockField(offsetof(BlockContext, dynamicOffset), integer(32));
        return builder_.CreateZExt(builder_.CreateAdd(offset, constant(operand.value)), integer(64));
      }
      auto found = shared_.offsets.find({id.first, -1, id.second});
      if (found == shared_.offsets.end())
        throw Problem{CompileError::Kind::unresolved, source_.line,
                      "shared variable " + std::string(operand.text)};
      return constant(found->second + operand.value, 64);
    }
    return constant(
        program_.modules[static_cast<size_t>(id.first)].addresses[static_cast<size_t>(id.second)] +
            operand.value,
        64);
  }
  FunctionId function = program_.findFunction(id_.module, operand.text);
  if (function.valid())
    if (auto slot = program_.slots.find(function); slot != program_.slots.end())
      return constant(reinterpret_cast<uint64_t>(slot->second), 64);
  throw Problem{CompileError::Kind::unresolved, source_.instructions[static_cast<size_t>(current_)].line,
                "undefined symbol " + std::string(operand.text)};
}

llvm::Value* Translator::read(const Operand& operand, unsigned bits) {
  Value* value = nullptr;
  switch (operand.kind) {
    case Operand::Kind::integer:
    case Operand::Kind::real32:
    case Operand::Kind::real64:
      return constantOf(operand, bits);
    case Operand::Kind::special:
      return special(operand.text, bits);
    case Operand::Kind::symbol:
      value = addressOfSymbol(operand);
      break;
    case Operand::Kind::reg:
      value = bitsOf(readRegister(operand.index));
      break;
    case Operand::Kind::sink:
      return constant(0, bits);
    case Operand::Kind::variable: {
      const ptx::Variable& variable = source_.variables[static_cast<size_t>(operand.index)];
      if (variable.space == ptx::Space::shared) {
        value = constant(shared_.offsets.at({id_.module, id_.function, operand.index}) + operand.value, 64);
      } else if (variable.space == ptx::Space::local) {
        value = builder_.CreateAdd(
            frame_, constant(frameOffsets_[static_cast<size_t>(operand.index)] + operand.value, 64));
      } else if (source_.entry && variables_[static_cast<size_t>(operand.index)] == nullptr) {
        uint64_t offset = 0;
        for (int index : source_.parameters) {
          const ptx::Variable& one = source_.variables[static_cast<size_t>(index)];
          offset = (offset + one.alignment - 1) & ~uint64_t{one.alignment - 1};
          if (index == operand.index) break;
          offset += one.bytes;
        }
        Value* base = blockField(offsetof(BlockContext, parameters), builder_.getPtrTy());
        value = builder_.CreateAdd(builder_.CreatePtrToInt(base, integer(64)),
                                   constant(offset + operand.value, 64));
      } else {
        value = builder_.CreateAdd(
            builder_.CreatePtrToInt(variables_[static_cast<size_t>(operand.index)], integer(64)),
            constant(operand.value, 64));
      }
      break;
    }
    case Operand::Kind::vector:  // {%r1}: ptxas takes it for the register itself
      if (operand.parts.size() == 1) return read(operand.parts[0], bits);
      [[fallthrough]];
    default:
      unsupported(source_.instructions[static_cast<size_t>(current_)], "operand");
  }
  return builder_.CreateZExtOrTrunc(value, integer(bits));
}

llvm::Value* Translator::readReal(const Operand& operand, unsigned bits) {
  llvm::Type* type = bits == 64 ? builder_.getDoubleTy() : builder_.getFloatTy();
  if (operand.kind == Operand::Kind::reg) {
    Value* value = readRegister(operand.index);
    if (value->getType() == type) return value;
  }
  return builder_.CreateBitCast(read(operand, bits), type);
}

llvm::Value* Translator::readPredicate(const Operand& operand) {
  Value* value = operand.kind == Operand::Kind::integer ? constant(operand.value != 0, 1)
                                                        : builder_.CreateTrunc(read(operand, 1), integer(1));
  return operand.negated ? builder_.CreateNot(value) : value;
}

void Translator::write(const Operand& operand, Value* value, bool signExtend) {
  if (operand.kind == Operand::Kind::sink) return;
  if (operand.kind == Operand::Kind::vector && operand.parts.size() == 1)
    return write(operand.parts[0], value, signExtend);
  if (operand.kind == Operand::Kind::special)
    throw Problem{CompileError::Kind::syntax, source_.instructions[static_cast<size_t>(current_)].line,
                  "undeclared register " + std::string(operand.text)};
  if (operand.kind != Operand::Kind::reg)
    unsupported(source_.instructions[static_cast<size_t>(current_)], "destination");
  llvm::AllocaInst* slot = registerSlot(operand.index);
  llvm::Type* type = slot->getAllocatedType();
  if (value->getType() != type) {
    value = bitsOf(value);
    auto* bits = integer(static_cast<unsigned>(type->getPrimitiveSizeInBits()));
    value = signExtend ? builder_.CreateSExtOrTrunc(value, bits) : builder_.CreateZExtOrTrunc(value, bits);
    if (type != bits) value = builder_.CreateBitCast(value, type);
  }
  builder_.CreateStore(value, slot);
  checked_.erase(operand.index);
}

// ---- contexts ----
llvm::Value* Translator::threadPointer(size_t offset) {
  return builder_.CreateConstGEP1_64(builder_.getInt8Ty(), thread_, offset);
}

llvm::Value* Translator::threadField(size_t offset, llvm::Type* type) {
  return builder_.CreateLoad(type, threadPointer(offset));
}

llvm::Value* Translator::blockField(size_t offset, llvm::Type* type) {
  auto* load = builder_.CreateLoad(type, builder_.CreateConstGEP1_64(builder_.getInt8Ty(), block_, offset));
  load->setMetadata(llvm::LLVMContext::MD_invariant_load, llvm::MDNode::get(context_, {}));
  return load;
}

llvm::Value* Translator::tid(unsigned axis) {
  if (tids_[axis] != nullptr) return tids_[axis];
  return threadField(offsetof(ThreadContext, tid) + size_t{4} * axis, integer(32));
}

llvm::Value* Translator::linearThread() {
  return linear_ != nullptr ? linear_ : threadField(offsetof(ThreadContext, linear), integer(32));
}

llvm::Value* Translator::special(std::string_view name, unsigned bits) {
  auto* i32 = integer(32);
  auto field = [&](size_t offset) { return blockField(offset, integer(32)); };
  auto lane = [&] { return builder_.CreateAnd(linearThread(), constant(31)); };
  Value* value = nullptr;
  auto axis = [&](std::string_view prefix) -> int {
    if (name.size() != prefix.size() + 2 || !name.starts_with(prefix) || name[prefix.size()] != '.')
      return -1;
    char c = name.back();
    return c == 'x' ? 0 : c == 'y' ? 1 : c == 'z' ? 2 : -1;
  };
  if (int a = axis("%tid"); a >= 0)
    value = tid(static_cast<unsigned>(a));
  else if (int a = axis("%ntid"); a >= 0)
    value = field(offsetof(BlockContext, size) + static_cast<size_t>(a) * 4);
  else if (int a = axis("%ctaid"); a >= 0)
    value = field(offsetof(BlockContext, block) + static_cast<size_t>(a) * 4);
  else if (int a = axis("%nctaid"); a >= 0)
    value = field(offsetof(BlockContext, grid) + static_cast<size_t>(a) * 4);
  else if (int a = axis("%clusterid"); a >= 0)
    value = field(offsetof(BlockContext, block) + static_cast<size_t>(a) * 4);
  else if (int a = axis("%nclusterid"); a >= 0)
    value = field(offsetof(BlockContext, grid) + static_cast<size_t>(a) * 4);
  else if (axis("%cluster_ctaid") >= 0 || name == "%cluster_ctarank" || name == "%is_explicit_cluster")
    value = constant(0);
  else if (axis("%cluster_nctaid") >= 0 || name == "%cluster_nctarank")
    value = constant(1);
  else if (name == "%laneid")
    value = lane();
  else if (name == "%warpid")
    value = builder_.CreateLShr(linearThread(), constant(5));
  else if (name == "%nwarpid")
    value = builder_.CreateLShr(builder_.CreateAdd(field(offsetof(BlockContext, threads)), constant(31)),
                                constant(5));
  else if (name == "%smid")
    value = field(offsetof(BlockContext, multiprocessor));
  else if (name == "%nsmid")
    value = constant(1);
  else if (name == "%gridid")
    value = blockField(offsetof(BlockContext, gridId), integer(64));
  else if (name == "%lanemask_eq")
    value = builder_.CreateShl(constant(1), lane());
  else if (name == "%lanemask_lt")
    value = builder_.CreateSub(builder_.CreateShl(constant(1), lane()), constant(1));
  else if (name == "%lanemask_le")
    value = builder_.CreateSub(builder_.CreateShl(constant(2), lane()), constant(1));
  else if (name == "%lanemask_gt")
    value = builder_.CreateShl(constant(0xFFFFFFFE), lane());
  else if (name == "%lanemask_ge")
    value = builder_.CreateShl(constant(0xFFFFFFFF), lane());
  else if (name == "%clock64")
    value = intrinsicCall(llvm::Intrinsic::readcyclecounter, {}, {});
  else if (name == "%clock")
    value = builder_.CreateTrunc(intrinsicCall(llvm::Intrinsic::readcyclecounter, {}, {}), i32);
  else if (name == "%clock_hi")
    value = builder_.CreateTrunc(
        builder_.CreateLShr(intrinsicCall(llvm::Intrinsic::readcyclecounter, {}, {}), constant(32, 64)), i32);
  else if (name == "%globaltimer")
    value = call("gpupool.globalTimer", integer(64), {});
  else if (name == "%globaltimer_lo")
    value = builder_.CreateTrunc(call("gpupool.globalTimer", integer(64), {}), i32);
  else if (name == "%globaltimer_hi")
    value = builder_.CreateTrunc(
        builder_.CreateLShr(call("gpupool.globalTimer", integer(64), {}), constant(32, 64)), i32);
  else if (name == "%dynamic_smem_size")
    value = field(offsetof(BlockContext, dynamicBytes));
  else if (name == "%total_smem_size" || name == "%aggr_smem_size")
    value = field(offsetof(BlockContext, sharedBytes));
  else if (name == "%reserved_smem_offset_end" || name == "%reserved_smem_offset_cap")
    value = constant(kReservedShared);
  else if (name.starts_with("%reserved_smem_offset"))
    value = constant(name == "%reserved_smem_offset_1" ? kReservedShared / 2 : 0);
  else if (name == "%envreg2")
    value = builder_.CreateTrunc(blockField(offsetof(BlockContext, workspace), integer(64)), i32);
  else if (name == "%envreg1")
    value = builder_.CreateTrunc(
        builder_.CreateLShr(blockField(offsetof(BlockContext, workspace), integer(64)), constant(32, 64)),
        i32);
  else if (name.starts_with("%envreg") || name.starts_with("%pm"))
    value = constant(0);
  else
    unsupported(source_.instructions[static_cast<size_t>(current_)], name);
  return builder_.CreateZExtOrTrunc(value, integer(bits));
}

// ---- calls of the runtime ----
llvm::Value* Translator::call(const char* name, llvm::Type* result, std::initializer_list<Value*> arguments,
                              bool pure) {
  std::vector<llvm::Type*> types;
  for (Value* one : arguments) types.push_back(one->getType());
  auto callee = module_.getOrInsertFunction(name, llvm::FunctionType::get(result, types, false));
  auto* made = builder_.CreateCall(callee, llvm::ArrayRef<Value*>(arguments.begin(), arguments.size()));
  made->setDoesNotThrow();
  if (pure) made->setDoesNotAccessMemory();
  return made;
}

llvm::Value* Translator::intrinsicCall(llvm::Intrinsic::ID id, std::initializer_list<llvm::Type*> types,
                                       std::initializer_list<Value*> arguments) {
  return builder_.CreateIntrinsic(id, llvm::ArrayRef<llvm::Type*>(types.begin(), types.size()),
                                  llvm::ArrayRef<Value*>(arguments.begin(), arguments.size()));
}

std::vector<ptx::Type> Translator::types(const Instruction& instruction) const {
  std::vector<Type> result;
  for (auto modifier : instruction.modifiers)
    if (Type type = ptx::typeOf(modifier); type.kind != ptx::Kind::none) result.push_back(type);
  return result;
}

// The type `fromEnd` places before the last; most instructions have one, at the end.
ptx::Type Translator::typeAt(const Instruction& instruction, size_t fromEnd) const {
  std::vector<Type> all = types(instruction);
  if (all.size() <= fromEnd) unsupported(instruction, "no type");
  return all[all.size() - 1 - fromEnd];
}

}  // namespace gpupool::softgpu::codegen
