// Branches, calls and ends (PTX ISA 9.0, chapter 9.7.12).
#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/context.h"

namespace gpupool::softgpu::codegen {

using runtime::ThreadContext;

// To `target` if `condition` (null: always). Going back in a loop that waits for others lets them run now and
// then.
void Translator::branchTo(const Instruction&, int target, Value* condition) {
  llvm::BasicBlock* to = labels_.at(target);
  if (target <= current_ && isSpinLoop(target, current_)) {
    llvm::BasicBlock* count = newBlock("again");
    llvm::BasicBlock* yield = newBlock("yield");
    llvm::BasicBlock* from = builder_.GetInsertBlock();
    builder_.SetInsertPoint(yield);
    call("gpupool.spin", builder_.getVoidTy(), {thread_});
    builder_.CreateBr(to);
    builder_.SetInsertPoint(count);
    Value* budget = threadPointer(offsetof(ThreadContext, spinBudget));
    Value* left = builder_.CreateSub(builder_.CreateLoad(integer(32), budget), constant(1));
    builder_.CreateStore(left, budget);
    builder_.CreateCondBr(builder_.CreateICmpSLT(left, constant(0)), yield, to);
    builder_.SetInsertPoint(from);
    to = count;
  }
  if (condition == nullptr) {
    builder_.CreateBr(to);
    return;
  }
  llvm::BasicBlock* next = newBlock("next");
  builder_.CreateCondBr(condition, to, next);
  startBlock(next);
}

void Translator::onBra(const Instruction& instruction) {
  const Operand& target = instruction.operands.at(0);
  if (target.kind != Operand::Kind::label)
    throw Problem{CompileError::Kind::syntax, instruction.line, "unknown label " + std::string(target.text)};
  Value* condition = nullptr;
  if (instruction.predicate != ptx::kNoRegister) {
    condition = readRegister(instruction.predicate);
    if (instruction.predicateNegated) condition = builder_.CreateNot(condition);
  }
  branchTo(instruction, target.index, condition);
}

void Translator::onBrx(const Instruction& instruction) {
  auto list = source_.branchTargets.find(instruction.operands.at(1).text);
  if (list == source_.branchTargets.end()) unsupported(instruction, "no .branchtargets");
  Value* index = read(instruction.operands[0], 32);
  llvm::BasicBlock* wrong = newBlock("wrong");
  auto* dispatch = builder_.CreateSwitch(index, wrong, static_cast<unsigned>(list->second.size()));
  for (size_t i = 0; i < list->second.size(); ++i)
    dispatch->addCase(builder_.getInt32(static_cast<uint32_t>(i)), labels_.at(list->second[i]));
  builder_.SetInsertPoint(wrong);
  builder_.CreateUnreachable();
}

void Translator::onRet(const Instruction&) { builder_.CreateBr(exitBlock_); }

void Translator::onExit(const Instruction&) {
  if (source_.entry) {
    builder_.CreateBr(exitBlock_);
    return;
  }
  call("gpupool.exitThread", builder_.getVoidTy(), {thread_});
  builder_.CreateUnreachable();
}

void Translator::onTrap(const Instruction&) {
  call("gpupool.faultTrap", builder_.getVoidTy(), {});
  builder_.CreateUnreachable();
}

// Its operand is an address of a multicast object, and this GPU has none
// (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0). Programs that ask first, as NCCL does, bring such code
// along and never run it.
void Translator::onMultimem(const Instruction&) {
  call("gpupool.faultInstruction", builder_.getVoidTy(), {});
  builder_.CreateUnreachable();
}

void Translator::onNanosleep(const Instruction&) { call("gpupool.spin", builder_.getVoidTy(), {thread_}); }

// ---- calls ----
// Memory for each argument: the caller's .param variables, or a temporary for a register or a number.
std::vector<llvm::Value*> Translator::argumentPointers(const Instruction& instruction, const Operand& list) {
  std::vector<Value*> pointers;
  for (const Operand& one : list.parts) {
    if (one.kind == Operand::Kind::variable) {
      Value* memory = variables_[static_cast<size_t>(one.index)];
      if (memory == nullptr) unsupported(instruction, "argument");
      pointers.push_back(memory);
      continue;
    }
    unsigned bits = 64;
    if (one.kind == Operand::Kind::reg)
      bits = std::max(8u, unsigned{source_.registers[static_cast<size_t>(one.index)].bits});
    llvm::IRBuilder<> at(entryBlock_, entryBlock_->begin());
    auto* memory = at.CreateAlloca(integer(bits));
    builder_.CreateStore(read(one, bits), memory);
    pointers.push_back(memory);
  }
  return pointers;
}

void Translator::onCall(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  size_t at = 0;
  static const Operand none;
  const Operand& returns = operands.at(0).kind == Operand::Kind::list ? operands[at++] : none;
  const Operand& target = operands.at(at++);
  const Operand& parameters =
      at < operands.size() && operands[at].kind == Operand::Kind::list ? operands[at++] : none;
  std::vector<Value*> arguments = argumentPointers(instruction, returns);
  std::vector<Value*> inputs = argumentPointers(instruction, parameters);
  FunctionId callee =
      target.kind == Operand::Kind::symbol ? program_.findFunction(id_.module, target.text) : FunctionId{};
  if (target.kind == Operand::Kind::symbol && !callee.valid()) {
    builtinCall(instruction, target.text, arguments, inputs);
  } else {
    std::vector<Value*> all{thread_};
    all.insert(all.end(), arguments.begin(), arguments.end());
    all.insert(all.end(), inputs.begin(), inputs.end());
    std::vector<llvm::Type*> types(all.size(), builder_.getPtrTy());
    auto* type = llvm::FunctionType::get(builder_.getVoidTy(), types, false);
    Value* code = nullptr;
    if (callee.valid()) {
      const ptx::Function& function = program_.function(callee);
      if (function.entry || function.returns.size() + function.parameters.size() + 1 != all.size())
        unsupported(instruction, "the arguments do not fit the function");
      std::string name = functionName(program_, callee);
      llvm::Function* known = module_.getFunction(name);
      if (known == nullptr)
        known = llvm::Function::Create(type, llvm::Function::InternalLinkage, name, module_);
      code = known;
    } else {
      code = call("gpupool.functionCode", builder_.getPtrTy(), {read(target, 64)});
    }
    builder_.CreateCall(type, code, all)->setDoesNotThrow();
  }
  for (size_t i = 0; i < returns.parts.size(); ++i) {
    const Operand& one = returns.parts[i];
    if (one.kind != Operand::Kind::reg) continue;
    unsigned bits = std::max(8u, unsigned{source_.registers[static_cast<size_t>(one.index)].bits});
    write(one, builder_.CreateLoad(integer(bits), arguments[i]));
  }
  checked_.clear();
}

void Translator::builtinCall(const Instruction& instruction, std::string_view name,
                             const std::vector<Value*>& returns, const std::vector<Value*>& arguments) {
  auto input = [&](size_t i, unsigned bits) { return builder_.CreateLoad(integer(bits), arguments.at(i)); };
  auto answer = [&](Value* value) {
    if (!returns.empty()) builder_.CreateStore(value, returns[0]);
  };
  if (name == "vprintf" && arguments.size() == 2)
    answer(call("gpupool.printf", integer(32), {thread_, input(0, 64), input(1, 64)}));
  else if (name == "malloc" && arguments.size() == 1)
    answer(call("gpupool.malloc", integer(64), {thread_, input(0, 64)}));
  else if (name == "free" && arguments.size() == 1)
    call("gpupool.free", builder_.getVoidTy(), {thread_, input(0, 64)});
  else if (name == "cudaGraphSetConditional" && arguments.size() == 2)
    call("gpupool.setCondition", builder_.getVoidTy(), {input(0, 64), input(1, 32)});
  else if (name == "__assertfail" && arguments.size() == 5)
    call("gpupool.assert", builder_.getVoidTy(),
         {thread_, input(0, 64), input(1, 64), input(2, 32), input(3, 64)});
  else
    throw Problem{CompileError::Kind::unresolved, instruction.line,
                  "undefined function " + std::string(name)};
}

}  // namespace gpupool::softgpu::codegen
