// Loads, stores, atomics and address conversions (PTX ISA 9.0, chapters 9.7.9 and 9.7.13).
#include <llvm/IR/MDBuilder.h>

#include <algorithm>

#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/context.h"
#include "server/softgpu/runtime/memory.h"

namespace gpupool::softgpu::codegen {

using runtime::BlockContext;
using runtime::ThreadContext;

ptx::Space Translator::spaceOf(const Instruction& instruction) const {
  for (auto word : instruction.modifiers) {
    if (word == "global") return ptx::Space::global;
    if (word.starts_with("shared")) return ptx::Space::shared;
    if (word == "local") return ptx::Space::local;
    if (word == "const") return ptx::Space::constant;
    if (word.starts_with("param")) return ptx::Space::param;
  }
  return ptx::Space::generic;
}

llvm::Value* Translator::pointer(Value* address) {
  return builder_.CreateIntToPtr(address, builder_.getPtrTy());
}

void Translator::faultIf(Value* condition, Value* address, uint64_t bytes) {
  llvm::BasicBlock* fine = newBlock("fine");
  llvm::BasicBlock* from = builder_.GetInsertBlock();
  faultAddress_->addIncoming(address, from);
  faultBytes_->addIncoming(constant(bytes, 64), from);
  builder_.CreateCondBr(condition, faultBlock_, fine,
                        llvm::MDBuilder(context_).createBranchWeights(1, 1 << 20));
  builder_.SetInsertPoint(fine);
}

// The address as a pointer, after the granule's and the alignment's check.
llvm::Value* Translator::checkedPointer(Value* address, unsigned bytes, const Operand* operand) {
  const Operand* base = operand != nullptr ? &operand->parts[0] : nullptr;
  if (base != nullptr && base->kind == Operand::Kind::reg) {
    auto known = checked_.find(base->index);
    auto offset = static_cast<int64_t>(operand->value);
    if (known != checked_.end() && bytes <= known->second.bytes) {
      int64_t distance = offset - known->second.offset;
      // Near an address that was checked: windows are whole granules, so nothing foreign is that close to
      // their ends.
      if (distance % bytes == 0 && distance > -4096 && distance < 4096) return pointer(address);
    }
    checked_[base->index] = {offset, bytes};
  }
  Value* granule = builder_.CreateAnd(builder_.CreateLShr(address, constant(runtime::kGranuleShift, 64)),
                                      constant(runtime::kGranules - 1, 64));
  Value* table = pointer(constant(reinterpret_cast<uint64_t>(runtime::gpupoolHidden), 64));
  auto* hidden = builder_.CreateLoad(integer(8), builder_.CreateGEP(integer(8), table, granule));
  hidden->setMetadata(llvm::LLVMContext::MD_invariant_load, llvm::MDNode::get(context_, {}));
  Value* bad = builder_.CreateZExt(hidden, integer(64));
  if (bytes > 1) bad = builder_.CreateOr(bad, builder_.CreateAnd(address, constant(bytes - 1, 64)));
  faultIf(builder_.CreateICmpNE(bad, constant(0, 64)), address, bytes);
  return pointer(address);
}

llvm::Value* Translator::baseOf(const Operand& operand, unsigned bits) {
  Value* base = read(operand.parts[0], bits);
  if (operand.value == 0) return base;
  return builder_.CreateAdd(base, constant(operand.value, bits));
}

llvm::Value* Translator::sharedPointer(const Operand& operand, unsigned bytes) {
  const Operand& base = operand.parts[0];
  // 32-bit registers hold shared addresses too; the sum is taken in 64 bits so that it cannot wrap into
  // range.
  Value* offset = baseOf(operand, 64);
  Value* memory = blockField(offsetof(BlockContext, sharedBase), builder_.getPtrTy());
  auto* known = llvm::dyn_cast<llvm::ConstantInt>(offset);
  bool isStatic = known != nullptr && known->getZExtValue() % bytes == 0 &&
                  known->getZExtValue() + bytes <= shared_.bytes;
  bool isChecked = false;
  if (base.kind == Operand::Kind::reg) {
    auto seen = checked_.find(base.index);
    isChecked = seen != checked_.end() && seen->second.bytes == bytes &&
                seen->second.offset == static_cast<int64_t>(operand.value);
    checked_[base.index] = {static_cast<int64_t>(operand.value), bytes};
  }
  if (!isStatic && !isChecked) {
    Value* limit = blockField(offsetof(BlockContext, sharedLimit), integer(32));
    limit = intrinsicCall(llvm::Intrinsic::usub_sat, {integer(32)}, {limit, constant(bytes - 1)});
    Value* bad = builder_.CreateICmpUGE(offset, builder_.CreateZExt(limit, integer(64)));
    if (bytes > 1)
      bad = builder_.CreateOr(
          bad, builder_.CreateICmpNE(builder_.CreateAnd(offset, constant(bytes - 1, 64)), constant(0, 64)));
    faultIf(bad, offset, bytes);
  }
  return builder_.CreateGEP(integer(8), memory, offset);
}

Translator::Address Translator::parameterAddress(const Instruction& instruction, const Operand& operand,
                                                 unsigned bytes) {
  const Operand& base = operand.parts[0];
  if (base.kind != Operand::Kind::variable)
    return {checkedPointer(baseOf(operand, 64), bytes, &operand), true};
  const ptx::Variable& variable = source_.variables[static_cast<size_t>(base.index)];
  if (base.value + operand.value + bytes > variable.bytes && !variable.unsized)
    unsupported(instruction, "access outside the parameter");
  if (Value* memory = variables_[static_cast<size_t>(base.index)])
    return {builder_.CreateConstGEP1_64(integer(8), memory, base.value + operand.value), true};
  return {pointer(baseOf(operand, 64)), true};
}

Translator::Address Translator::address(const Instruction& instruction, const Operand& operand,
                                        ptx::Space space, unsigned bytes) {
  if (operand.kind != Operand::Kind::address) unsupported(instruction, "expected an address");
  const Operand& base = operand.parts[0];
  if (base.kind == Operand::Kind::variable) {
    ptx::Space declared = source_.variables[static_cast<size_t>(base.index)].space;
    if (space == ptx::Space::generic) space = declared;
  } else if (base.kind == Operand::Kind::symbol && space == ptx::Space::generic) {
    auto id = program_.findVariable(id_.module, base.text);
    if (id.first >= 0) space = program_.variable(id).space;
  }
  if (space == ptx::Space::param) return parameterAddress(instruction, operand, bytes);
  if (space == ptx::Space::shared) return {sharedPointer(operand, bytes), true};
  if (base.kind == Operand::Kind::symbol) {
    auto id = program_.findVariable(id_.module, base.text);
    Value* at = baseOf(operand, 64);
    uint64_t offset = base.value + operand.value;
    if (id.first >= 0 && offset % bytes == 0 && offset + bytes <= program_.variable(id).bytes &&
        program_.variable(id).alignment >= bytes)
      return {pointer(at), false};
  }
  if (base.kind == Operand::Kind::variable) {
    const ptx::Variable& variable = source_.variables[static_cast<size_t>(base.index)];
    if (operand.value + bytes <= variable.bytes) return {pointer(baseOf(operand, 64)), true};
  }
  return {checkedPointer(baseOf(operand, 64), bytes, &operand), space == ptx::Space::local};
}

unsigned Translator::vectorLanes(const Instruction& instruction) const {
  if (instruction.has("v2")) return 2;
  if (instruction.has("v4")) return 4;
  if (instruction.has("v8")) return 8;
  return 1;
}

llvm::AtomicOrdering Translator::ordering(const Instruction& instruction) const {
  if (instruction.has("acquire")) return llvm::AtomicOrdering::Acquire;
  if (instruction.has("release")) return llvm::AtomicOrdering::Release;
  if (instruction.has("volatile") || instruction.has("relaxed") || instruction.has("mmio"))
    return llvm::AtomicOrdering::Monotonic;
  return llvm::AtomicOrdering::NotAtomic;
}

// A GPU does a vector access of up to 16 bytes at once, and programs rely on it: NCCL writes data and the
// flag that says so in one. Processors with AVX do that, too, if it is one aligned instruction, which
// `volatile` keeps.
llvm::Type* Translator::wholeVector(const Instruction& instruction, Type type, bool isPrivate) {
  const unsigned lanes = vectorLanes(instruction);
  if (lanes == 1 || isPrivate || ordering(instruction) == llvm::AtomicOrdering::NotAtomic) return nullptr;
  if (type.bytes() < 4 || type.bytes() * lanes > 16) return nullptr;
  return llvm::FixedVectorType::get(registerType(type), lanes);
}

std::vector<llvm::Value*> Translator::loadWhole(const Instruction& instruction, llvm::Type* vector,
                                                Value* from, unsigned bytes) {
  Value* all = builder_.CreateAlignedLoad(vector, from, llvm::Align(bytes), true);
  if (ordering(instruction) == llvm::AtomicOrdering::Acquire)
    builder_.CreateFence(llvm::AtomicOrdering::Acquire, llvm::SyncScope::SingleThread);
  std::vector<Value*> values(vectorLanes(instruction));
  for (unsigned lane = 0; lane < values.size(); ++lane)
    values[lane] = builder_.CreateExtractElement(all, lane);
  return values;
}

void Translator::storeWhole(const Instruction& instruction, llvm::Type* vector, Value* to, unsigned bytes) {
  Value* all = llvm::PoisonValue::get(vector);
  llvm::Type* element = llvm::cast<llvm::FixedVectorType>(vector)->getElementType();
  for (unsigned lane = 0; lane < vectorLanes(instruction); ++lane) {
    Value* value = read(instruction.operands[1].parts[lane], element->getPrimitiveSizeInBits());
    all = builder_.CreateInsertElement(all, builder_.CreateBitCast(value, element), lane);
  }
  if (ordering(instruction) == llvm::AtomicOrdering::Release)
    builder_.CreateFence(llvm::AtomicOrdering::Release, llvm::SyncScope::SingleThread);
  builder_.CreateAlignedStore(all, to, llvm::Align(bytes), true);
}

void Translator::onLd(const Instruction& instruction) {
  Type type = typeAt(instruction);
  if (type.kind == ptx::Kind::predicate || instruction.operands.size() < 2) unsupported(instruction);
  unsigned lanes = vectorLanes(instruction);
  ptx::Space space = spaceOf(instruction);
  const Operand& target = instruction.operands[0];
  if (lanes > 1 && (target.kind != Operand::Kind::vector || target.parts.size() != lanes))
    unsupported(instruction);
  Address at = address(instruction, instruction.operands[1], space, type.bytes() * lanes);
  std::vector<Value*> values;
  llvm::Type* whole = wholeVector(instruction, type, at.isPrivate);
  if (whole != nullptr) values = loadWhole(instruction, whole, at.pointer, type.bytes() * lanes);
  for (unsigned lane = 0; lane < lanes && whole == nullptr; ++lane) {
    Value* from = builder_.CreateConstGEP1_64(integer(8), at.pointer, uint64_t{lane} * type.bytes());
    auto* load =
        builder_.CreateAlignedLoad(registerType(type), from, llvm::Align(std::min(type.bytes(), 16u)));
    llvm::AtomicOrdering order = ordering(instruction);
    if (order != llvm::AtomicOrdering::NotAtomic && !at.isPrivate && type.bits <= 64) load->setAtomic(order);
    if (space == ptx::Space::param && source_.entry &&
        instruction.operands[1].parts[0].kind == Operand::Kind::variable &&
        variables_[static_cast<size_t>(instruction.operands[1].parts[0].index)] == nullptr)
      load->setMetadata(llvm::LLVMContext::MD_invariant_load, llvm::MDNode::get(context_, {}));
    values.push_back(load);
  }
  for (unsigned lane = 0; lane < lanes; ++lane)
    write(lanes > 1 ? target.parts[lane] : target, values[lane], type.isSigned());
}

void Translator::onSt(const Instruction& instruction) {
  Type type = typeAt(instruction);
  if (type.kind == ptx::Kind::predicate || instruction.operands.size() < 2) unsupported(instruction);
  unsigned lanes = vectorLanes(instruction);
  ptx::Space space = spaceOf(instruction);
  const Operand& source = instruction.operands[1];
  if (lanes > 1 && (source.kind != Operand::Kind::vector || source.parts.size() != lanes))
    unsupported(instruction);
  Address at = address(instruction, instruction.operands[0], space, type.bytes() * lanes);
  if (llvm::Type* whole = wholeVector(instruction, type, at.isPrivate))
    return storeWhole(instruction, whole, at.pointer, type.bytes() * lanes);
  for (unsigned lane = 0; lane < lanes; ++lane) {
    Value* to = builder_.CreateConstGEP1_64(integer(8), at.pointer, uint64_t{lane} * type.bytes());
    Value* value = read(lanes > 1 ? source.parts[lane] : source, type.bits);
    auto* store = builder_.CreateAlignedStore(value, to, llvm::Align(std::min(type.bytes(), 16u)));
    llvm::AtomicOrdering order = ordering(instruction);
    if (order != llvm::AtomicOrdering::NotAtomic && !at.isPrivate && type.bits <= 64) store->setAtomic(order);
  }
}

void Translator::onCvta(const Instruction& instruction) {
  unsigned bits = typeAt(instruction).bits;
  Value* value = read(instruction.operands[1], bits);
  if (spaceOf(instruction) == ptx::Space::shared) {
    Value* base = blockField(offsetof(BlockContext, sharedBase), integer(64));
    base = builder_.CreateZExtOrTrunc(base, integer(bits));
    value = instruction.has("to") ? builder_.CreateSub(value, base) : builder_.CreateAdd(value, base);
  }
  write(instruction.operands[0], value);
}

void Translator::onIsspacep(const Instruction& instruction) {
  const Operand& source = instruction.operands[1];
  Value* value = read(source, 64);
  auto within = [&](Value* base, Value* size) {
    return builder_.CreateICmpULT(builder_.CreateSub(value, base), size);
  };
  auto shared = [&] {
    Value* limit = blockField(offsetof(BlockContext, sharedLimit), integer(32));
    return within(blockField(offsetof(BlockContext, sharedBase), integer(64)),
                  builder_.CreateZExt(limit, integer(64)));
  };
  auto local = [&] {
    Value* base = threadField(offsetof(ThreadContext, localBase), integer(64));
    return within(base,
                  builder_.CreateSub(threadField(offsetof(ThreadContext, localEnd), integer(64)), base));
  };
  Value* result = nullptr;
  switch (spaceOf(instruction)) {
    case ptx::Space::shared:
      result = shared();
      break;
    case ptx::Space::local:
      result = local();
      break;
    case ptx::Space::global:
      result = builder_.CreateNot(builder_.CreateOr(shared(), local()));
      break;
    case ptx::Space::constant:
      result = constant(0, 1);
      break;
    case ptx::Space::param: {
      Value* base = blockField(offsetof(BlockContext, parameters), integer(64));
      result = within(base, constant(32764, 64));
      break;
    }
    default:
      unsupported(instruction);
  }
  write(instruction.operands[0], result);
}

// ---- atomics ----
// `at` goes from old to update(old); the old value. A compare-and-swap loop where others may interfere.
llvm::Value* Translator::atomicUpdate(const Address& at, llvm::Type* type,
                                      const std::function<Value*(Value*)>& update) {
  unsigned bits = static_cast<unsigned>(type->getPrimitiveSizeInBits());
  llvm::Align alignment(bits / 8);
  if (at.isPrivate) {
    Value* old = builder_.CreateAlignedLoad(type, at.pointer, alignment);
    builder_.CreateAlignedStore(update(old), at.pointer, alignment);
    return bitsOf(old);
  }
  auto* first = builder_.CreateAlignedLoad(integer(bits), at.pointer, alignment);
  first->setAtomic(llvm::AtomicOrdering::Monotonic);
  llvm::BasicBlock* before = builder_.GetInsertBlock();
  llvm::BasicBlock* loop = newBlock("atomic");
  builder_.CreateBr(loop);
  builder_.SetInsertPoint(loop);
  auto* old = builder_.CreatePHI(integer(bits), 2);
  old->addIncoming(first, before);
  Value* wanted = bitsOf(update(builder_.CreateBitCast(old, type)));
  auto* swap = builder_.CreateAtomicCmpXchg(at.pointer, old, wanted, alignment,
                                            llvm::AtomicOrdering::SequentiallyConsistent,
                                            llvm::AtomicOrdering::SequentiallyConsistent);
  old->addIncoming(builder_.CreateExtractValue(swap, 0), builder_.GetInsertBlock());
  llvm::BasicBlock* done = newBlock("swapped");
  builder_.CreateCondBr(builder_.CreateExtractValue(swap, 1), done, loop);
  builder_.SetInsertPoint(done);
  return old;
}

llvm::Value* Translator::atomicRmw(const Instruction&, llvm::AtomicRMWInst::BinOp operation,
                                   const Address& at, Value* value) {
  auto* type = value->getType();
  if (!at.isPrivate)
    return builder_.CreateAtomicRMW(operation, at.pointer, value,
                                    llvm::Align(type->getPrimitiveSizeInBits() / 8),
                                    llvm::AtomicOrdering::SequentiallyConsistent);
  return atomicUpdate(at, type, [&](Value* old) -> Value* {
    switch (operation) {
      case llvm::AtomicRMWInst::Add:
        return builder_.CreateAdd(old, value);
      case llvm::AtomicRMWInst::And:
        return builder_.CreateAnd(old, value);
      case llvm::AtomicRMWInst::Or:
        return builder_.CreateOr(old, value);
      case llvm::AtomicRMWInst::Xor:
        return builder_.CreateXor(old, value);
      case llvm::AtomicRMWInst::Xchg:
        return value;
      case llvm::AtomicRMWInst::Min:
        return builder_.CreateSelect(builder_.CreateICmpSLT(value, old), value, old);
      case llvm::AtomicRMWInst::Max:
        return builder_.CreateSelect(builder_.CreateICmpSGT(value, old), value, old);
      case llvm::AtomicRMWInst::UMin:
        return builder_.CreateSelect(builder_.CreateICmpULT(value, old), value, old);
      default:
        return builder_.CreateSelect(builder_.CreateICmpUGT(value, old), value, old);
    }
  });
}

// The old value of an atomic on one element; its operands begin at `first`.
llvm::Value* Translator::atomicResult(const Instruction& instruction, const Address& at, Type type,
                                      size_t first) {
  using Op = llvm::AtomicRMWInst;
  const auto& operands = instruction.operands;
  auto b = [&] { return read(operands.at(first), type.bits); };
  if (instruction.has("cas")) {
    Value* expected = b();
    Value* wanted = read(operands.at(first + 1), type.bits);
    if (at.isPrivate)
      return atomicUpdate(at, integer(type.bits), [&](Value* old) {
        return builder_.CreateSelect(builder_.CreateICmpEQ(old, expected), wanted, old);
      });
    auto* swap = builder_.CreateAtomicCmpXchg(at.pointer, expected, wanted, llvm::Align(type.bytes()),
                                              llvm::AtomicOrdering::SequentiallyConsistent,
                                              llvm::AtomicOrdering::SequentiallyConsistent);
    return builder_.CreateExtractValue(swap, 0);
  }
  if (instruction.has("exch")) return atomicRmw(instruction, Op::Xchg, at, b());
  bool isFloat = type.kind == ptx::Kind::real && type.lanes == 1 && type.bits >= 32;
  if (isFloat) {
    if (!instruction.has("add")) unsupported(instruction);
    Value* value = readReal(operands.at(first), type.bits);
    return atomicUpdate(at, value->getType(), [&](Value* old) { return builder_.CreateFAdd(old, value); });
  }
  if (type.isReal()) {
    std::string_view opcode = instruction.has("add") ? "add" : instruction.has("min") ? "min" : "max";
    Value* value = b();
    return atomicUpdate(at, integer(type.bits),
                        [&](Value* old) { return smallArithmetic(instruction, type, opcode, {old, value}); });
  }
  if (instruction.has("inc") || instruction.has("dec")) {
    Value* limit = b();
    bool up = instruction.has("inc");
    return atomicUpdate(at, integer(type.bits), [&](Value* old) {
      Value* zero = constant(0, type.bits);
      Value* one = constant(1, type.bits);
      if (up)
        return builder_.CreateSelect(builder_.CreateICmpUGE(old, limit), zero, builder_.CreateAdd(old, one));
      Value* wrap = builder_.CreateOr(builder_.CreateICmpEQ(old, zero), builder_.CreateICmpUGT(old, limit));
      return builder_.CreateSelect(wrap, limit, builder_.CreateSub(old, one));
    });
  }
  if (instruction.has("add")) return atomicRmw(instruction, Op::Add, at, b());
  if (instruction.has("and")) return atomicRmw(instruction, Op::And, at, b());
  if (instruction.has("or")) return atomicRmw(instruction, Op::Or, at, b());
  if (instruction.has("xor")) return atomicRmw(instruction, Op::Xor, at, b());
  if (instruction.has("min")) return atomicRmw(instruction, type.isSigned() ? Op::Min : Op::UMin, at, b());
  if (instruction.has("max")) return atomicRmw(instruction, type.isSigned() ? Op::Max : Op::UMax, at, b());
  unsupported(instruction);
}

void Translator::atomicVector(const Instruction& instruction, ptx::Space space, Type type, unsigned lanes) {
  bool returns = instruction.opcode == "atom";
  size_t addressIndex = returns ? 1 : 0;
  Address at = address(instruction, instruction.operands.at(addressIndex), space, type.bytes() * lanes);
  const Operand& values = instruction.operands.at(addressIndex + 1);
  if (values.parts.size() != lanes) unsupported(instruction);
  for (unsigned lane = 0; lane < lanes; ++lane) {
    Instruction one = instruction;
    one.operands[addressIndex + 1] = values.parts[lane];
    Address element{builder_.CreateConstGEP1_64(integer(8), at.pointer, uint64_t{lane} * type.bytes()),
                    at.isPrivate};
    Value* old = atomicResult(one, element, type, addressIndex + 1);
    if (returns) write(instruction.operands[0].parts.at(lane), old);
  }
}

void Translator::onAtom(const Instruction& instruction) {
  if (instruction.has("async")) unsupported(instruction);
  Type type = typeAt(instruction);
  ptx::Space space = spaceOf(instruction);
  if (unsigned lanes = vectorLanes(instruction); lanes > 1)
    return atomicVector(instruction, space, type, lanes);
  bool returns = instruction.opcode == "atom";
  size_t addressIndex = returns ? 1 : 0;
  Address at = address(instruction, instruction.operands.at(addressIndex), space, type.bytes());
  Value* old = atomicResult(instruction, at, type, addressIndex + 1);
  if (returns) write(instruction.operands[0], old, type.isSigned());
}

// ---- copies and the rest ----
// cp.async of 4, 8 or 16 bytes, as a plain copy.
void Translator::copy(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  if (operands.size() < 3 || operands[2].kind != Operand::Kind::integer) unsupported(instruction);
  auto bytes = static_cast<unsigned>(operands[2].value);
  if (bytes != 4 && bytes != 8 && bytes != 16) unsupported(instruction);
  Address to = address(instruction, operands[0], ptx::Space::shared, bytes);
  auto* type = integer(bytes * 8);
  llvm::Align alignment(bytes);
  bool hasSize = operands.size() > 3 && !instruction.has("L2::cache_hint");
  if (operands.size() > 4) hasSize = true;
  if (!hasSize) {
    Address from = address(instruction, operands[1], ptx::Space::global, bytes);
    builder_.CreateAlignedStore(builder_.CreateAlignedLoad(type, from.pointer, alignment), to.pointer,
                                alignment);
    return;
  }
  bool isPredicate = operands[3].kind == Operand::Kind::reg &&
                     source_.registers[static_cast<size_t>(operands[3].index)].kind == ptx::Kind::predicate;
  Value* size = isPredicate ? builder_.CreateSelect(readPredicate(operands[3]), constant(0), constant(bytes))
                            : read(operands[3], 32);
  builder_.CreateAlignedStore(llvm::Constant::getNullValue(type), to.pointer, alignment);
  llvm::BasicBlock* copy = newBlock("copy");
  llvm::BasicBlock* after = newBlock("copied");
  builder_.CreateCondBr(builder_.CreateICmpEQ(size, constant(0)), after, copy);
  startBlock(copy);
  Address from = address(instruction, operands[1], ptx::Space::global, bytes);
  size = intrinsicCall(llvm::Intrinsic::umin, {integer(32)}, {size, constant(bytes)});
  builder_.CreateMemCpy(to.pointer, llvm::MaybeAlign(4), from.pointer, llvm::MaybeAlign(1),
                        builder_.CreateZExt(size, integer(64)));
  builder_.CreateBr(after);
  startBlock(after);
}

void Translator::onNothing(const Instruction&) {}

void Translator::onAlloca(const Instruction& instruction) {
  uint64_t alignment = instruction.operands.size() > 2 ? instruction.operands[2].value : 8;
  Value* mask = constant(alignment - 1, 64);
  Value* top = threadField(offsetof(ThreadContext, localTop), integer(64));
  Value* begin = builder_.CreateAnd(builder_.CreateAdd(top, mask), builder_.CreateNot(mask));
  Value* end = builder_.CreateAdd(begin, read(instruction.operands[1], 64));
  Value* limit = threadField(offsetof(ThreadContext, localEnd), integer(64));
  faultIf(builder_.CreateOr(builder_.CreateICmpUGT(end, limit), builder_.CreateICmpULT(end, begin)), begin,
          0);
  builder_.CreateStore(end, threadPointer(offsetof(ThreadContext, localTop)));
  write(instruction.operands[0], begin);
}

void Translator::onStacksave(const Instruction& instruction) {
  write(instruction.operands[0], threadField(offsetof(ThreadContext, localTop), integer(64)));
}

void Translator::onStackrestore(const Instruction& instruction) {
  builder_.CreateStore(read(instruction.operands[0], 64), threadPointer(offsetof(ThreadContext, localTop)));
}

// A cluster has one block: its shared memory is everybody's.
void Translator::onMapa(const Instruction& instruction) {
  write(instruction.operands[0], read(instruction.operands[1], typeAt(instruction).bits));
}

void Translator::onGetctarank(const Instruction& instruction) { write(instruction.operands[0], constant(0)); }
void Translator::onCreatepolicy(const Instruction& instruction) {
  write(instruction.operands[0], constant(0, 64));
}

}  // namespace gpupool::softgpu::codegen
