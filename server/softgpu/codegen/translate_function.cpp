// The frame around a function's instructions: prologue, thread loop, basic blocks, local memory.
#include <algorithm>
#include <stdexcept>

#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/context.h"

namespace gpupool::softgpu::codegen {

using runtime::BlockContext;
using runtime::ThreadContext;

namespace {
constexpr int32_t kSpinBudget = 256;
}

std::string functionName(const Program& program, FunctionId id) {
  const ptx::Function& function = program.function(id);
  return std::string(function.name) + (function.visible ? "" : "." + std::to_string(id.module));
}

Translator::Translator(const Program& program, FunctionId id, const SharedLayout& shared,
                       llvm::Module& module, HostFeatures features)
    : program_(program),
      id_(id),
      source_(program.function(id)),
      facts_(program.facts.at(id)),
      shared_(shared),
      module_(module),
      context_(module.getContext()),
      features_(features),
      builder_(module.getContext()) {}

const std::unordered_map<std::string_view, Translator::Handler>& Translator::handlers() {
  using T = Translator;
  static const std::unordered_map<std::string_view, Handler> table = {
      {"mov", &T::onMov},
      {"ld", &T::onLd},
      {"ldu", &T::onLd},
      {"st", &T::onSt},
      {"cvta", &T::onCvta},
      {"cvt", &T::onCvt},
      {"atom", &T::onAtom},
      {"red", &T::onAtom},
      {"prefetch", &T::onNothing},
      {"prefetchu", &T::onNothing},
      {"discard", &T::onNothing},
      {"applypriority", &T::onNothing},
      {"pmevent", &T::onNothing},
      {"setmaxnreg", &T::onNothing},
      {"griddepcontrol", &T::onNothing},
      {"isspacep", &T::onIsspacep},
      {"cp", &T::onCp},
      {"mbarrier", &T::onMbarrier},
      {"mma", &T::onMma},
      {"wmma", &T::onMma},
      {"ldmatrix", &T::onLdmatrix},
      {"stmatrix", &T::onLdmatrix},
      {"alloca", &T::onAlloca},
      {"stacksave", &T::onStacksave},
      {"stackrestore", &T::onStackrestore},
      {"mapa", &T::onMapa},
      {"getctarank", &T::onGetctarank},
      {"createpolicy", &T::onCreatepolicy},
      {"add", &T::onAdd},
      {"sub", &T::onAdd},
      {"mul", &T::onMul},
      {"mad", &T::onMad},
      {"fma", &T::onFma},
      {"div", &T::onDiv},
      {"rem", &T::onRem},
      {"abs", &T::onAbs},
      {"neg", &T::onNeg},
      {"min", &T::onMinMax},
      {"max", &T::onMinMax},
      {"addc", &T::onAddc},
      {"subc", &T::onAddc},
      {"madc", &T::onMadc},
      {"and", &T::onLogic},
      {"or", &T::onLogic},
      {"xor", &T::onLogic},
      {"not", &T::onNot},
      {"cnot", &T::onCnot},
      {"shl", &T::onShift},
      {"shr", &T::onShift},
      {"shf", &T::onShf},
      {"lop3", &T::onLop3},
      {"popc", &T::onPopc},
      {"clz", &T::onClz},
      {"brev", &T::onBrev},
      {"bfind", &T::onBfind},
      {"bfe", &T::onBfe},
      {"bfi", &T::onBfi},
      {"bmsk", &T::onBmsk},
      {"szext", &T::onSzext},
      {"fns", &T::onFns},
      {"prmt", &T::onPrmt},
      {"sad", &T::onSad},
      {"dp4a", &T::onDp4a},
      {"dp2a", &T::onDp2a},
      {"mul24", &T::onMul24},
      {"mad24", &T::onMul24},
      {"vadd2", &T::onVideo},
      {"vsub2", &T::onVideo},
      {"vavrg2", &T::onVideo},
      {"vabsdiff2", &T::onVideo},
      {"vmin2", &T::onVideo},
      {"vmax2", &T::onVideo},
      {"vadd4", &T::onVideo},
      {"vsub4", &T::onVideo},
      {"vavrg4", &T::onVideo},
      {"vabsdiff4", &T::onVideo},
      {"vmin4", &T::onVideo},
      {"vmax4", &T::onVideo},
      {"setp", &T::onSetp},
      {"set", &T::onSet},
      {"selp", &T::onSelp},
      {"slct", &T::onSlct},
      {"testp", &T::onTestp},
      {"copysign", &T::onCopysign},
      {"rcp", &T::onRcp},
      {"sqrt", &T::onSqrt},
      {"rsqrt", &T::onRsqrt},
      {"sin", &T::onTranscendental},
      {"cos", &T::onTranscendental},
      {"lg2", &T::onTranscendental},
      {"ex2", &T::onTranscendental},
      {"tanh", &T::onTranscendental},
      {"bra", &T::onBra},
      {"brx", &T::onBrx},
      {"call", &T::onCall},
      {"ret", &T::onRet},
      {"exit", &T::onExit},
      {"trap", &T::onTrap},
      {"multimem", &T::onMultimem},
      {"brkpt", &T::onTrap},
      {"nanosleep", &T::onNanosleep},
      {"bar", &T::onBar},
      {"barrier", &T::onBar},
      {"membar", &T::onMembar},
      {"fence", &T::onMembar},
      {"shfl", &T::onShfl},
      {"vote", &T::onVote},
      {"match", &T::onMatch},
      {"activemask", &T::onActivemask},
      {"redux", &T::onRedux},
      {"elect", &T::onElect},
      {"tex", &T::onTex},
      {"sust", &T::onSust},
      {"suld", &T::onSuld},
  };
  return table;
}

void Translator::unsupported(const Instruction& instruction, std::string_view why) const {
  std::string text(instruction.opcode);
  for (auto modifier : instruction.modifiers) text.append(".").append(modifier);
  if (!why.empty()) text.append(": ").append(why);
  throw Problem{CompileError::Kind::unsupported, instruction.line, text};
}

llvm::BasicBlock* Translator::newBlock(const char* name) {
  return llvm::BasicBlock::Create(context_, name, function_);
}

void Translator::startBlock(llvm::BasicBlock* block) {
  builder_.SetInsertPoint(block);
  checked_.clear();
}

llvm::Function* Translator::run() {
  std::string name = functionName(program_, id_);
  function_ = module_.getFunction(name);
  if (function_ == nullptr) {
    size_t count = source_.entry ? 2 : 1 + source_.returns.size() + source_.parameters.size();
    std::vector<llvm::Type*> arguments(count, builder_.getPtrTy());
    auto* type = llvm::FunctionType::get(builder_.getVoidTy(), arguments, false);
    function_ = llvm::Function::Create(type, llvm::Function::InternalLinkage, name, module_);
  }
  function_->addFnAttr(llvm::Attribute::NoUnwind);
  function_->addFnAttr("no-trapping-math", "true");
  thread_ = function_->getArg(0);
  registers_.resize(source_.registers.size());
  variables_.resize(source_.variables.size());
  countWaits();
  prologue();
  translateBody();
  return function_;
}

void Translator::prologue() {
  entryBlock_ = newBlock("entry");
  llvm::BasicBlock* body = newBlock("body");
  exitBlock_ = newBlock("exit");
  faultBlock_ = newBlock("fault");
  builder_.SetInsertPoint(faultBlock_);
  faultAddress_ = builder_.CreatePHI(integer(64), 0);
  faultBytes_ = builder_.CreatePHI(integer(64), 0);
  call("gpupool.faultAddress", builder_.getVoidTy(), {faultAddress_, faultBytes_});
  builder_.CreateUnreachable();

  builder_.SetInsertPoint(entryBlock_);
  if (source_.entry) {
    block_ = function_->getArg(1);
    builder_.CreateBr(body);
    startBlock(body);
    kernelPrologue();
    return;
  }
  block_ = threadField(offsetof(ThreadContext, block), builder_.getPtrTy());
  builder_.CreateBr(body);
  startBlock(body);
  frameVariables();
  unsigned argument = 1;
  auto take = [&](int index) {
    const ptx::Variable& variable = source_.variables[static_cast<size_t>(index)];
    Value* memory = function_->getArg(argument++);
    if (variable.inRegister) return;
    variables_[static_cast<size_t>(index)] = memory;
  };
  for (int index : source_.returns) take(index);
  for (int index : source_.parameters) {
    const ptx::Variable& variable = source_.variables[static_cast<size_t>(index)];
    Value* memory = function_->getArg(argument);
    take(index);
    if (variable.inRegister) {
      builder_.CreateStore(builder_.CreateLoad(registerType(variable.type), memory),
                           registerSlot(variable.reg));
    } else if (variable.addressTaken) {
      Value* copy =
          pointer(builder_.CreateAdd(frame_, constant(frameOffsets_[static_cast<size_t>(index)], 64)));
      builder_.CreateMemCpy(copy, llvm::MaybeAlign(1), memory, llvm::MaybeAlign(1), variable.bytes);
      variables_[static_cast<size_t>(index)] = copy;
    }
  }
}

// The loop over the block's threads; the kernel's instructions follow inside it.
void Translator::kernelPrologue() {
  auto* i32 = integer(32);
  llvm::BasicBlock* loop = builder_.GetInsertBlock();
  Value* nextField =
      builder_.CreateConstGEP1_64(builder_.getInt8Ty(), block_, offsetof(BlockContext, nextThread));
  linear_ = builder_.CreateLoad(i32, nextField, "thread");
  Value* threads = blockField(offsetof(BlockContext, threads), i32);
  llvm::BasicBlock* one = newBlock("one");
  llvm::BasicBlock* done = newBlock("done");
  builder_.CreateCondBr(builder_.CreateICmpULT(linear_, threads), one, done);
  builder_.SetInsertPoint(done);
  builder_.CreateRetVoid();

  startBlock(one);
  builder_.CreateStore(builder_.CreateAdd(linear_, constant(1)), nextField);
  Value* sizeX = blockField(offsetof(BlockContext, size), i32);
  Value* sizeY = blockField(offsetof(BlockContext, size) + 4, i32);
  llvm::BasicBlock* flat = builder_.GetInsertBlock();
  llvm::BasicBlock* deep = newBlock("deep");
  llvm::BasicBlock* start = newBlock("start");
  builder_.CreateCondBr(builder_.CreateICmpEQ(sizeX, threads), start, deep);
  builder_.SetInsertPoint(deep);
  Value* x = builder_.CreateURem(linear_, sizeX);
  Value* row = builder_.CreateUDiv(linear_, sizeX);
  Value* y = builder_.CreateURem(row, sizeY);
  Value* z = builder_.CreateUDiv(row, sizeY);
  builder_.CreateBr(start);
  startBlock(start);
  Value* deepValues[3] = {x, y, z};
  for (unsigned axis = 0; axis < 3; ++axis) {
    auto* phi = builder_.CreatePHI(i32, 2);
    phi->addIncoming(axis == 0 ? linear_ : constant(0), flat);
    phi->addIncoming(deepValues[axis], deep);
    tids_[axis] = phi;
  }
  for (unsigned axis = 0; axis < 3; ++axis)
    builder_.CreateStore(tids_[axis], threadPointer(offsetof(ThreadContext, tid) + size_t{axis} * 4));
  builder_.CreateStore(linear_, threadPointer(offsetof(ThreadContext, linear)));
  Value* base = threadField(offsetof(ThreadContext, localBase), integer(64));
  builder_.CreateStore(base, threadPointer(offsetof(ThreadContext, localTop)));
  if (!waits_.empty() && waits_.back() != 0)
    builder_.CreateStore(constant(kSpinBudget), threadPointer(offsetof(ThreadContext, spinBudget)));
  builder_.SetInsertPoint(exitBlock_);
  if (facts_.synchronizesDeep) call("gpupool.threadExit", builder_.getVoidTy(), {thread_});
  builder_.CreateBr(loop);
  builder_.SetInsertPoint(start);
  frameVariables();
}

// Local memory: .local variables, and parameters whose address is taken.
void Translator::frameVariables() {
  frameOffsets_.assign(source_.variables.size(), 0);
  uint32_t bytes = 0;
  for (size_t i = 0; i < source_.variables.size(); ++i) {
    const ptx::Variable& variable = source_.variables[i];
    bool framed = variable.space == ptx::Space::local ||
                  (variable.space == ptx::Space::param && variable.addressTaken && !source_.entry);
    if (framed) {
      bytes = (bytes + variable.alignment - 1) & ~(variable.alignment - 1);
      frameOffsets_[i] = bytes;
      bytes += static_cast<uint32_t>(variable.bytes);
    } else if (variable.space == ptx::Space::param && !variable.inRegister &&
               std::find(source_.parameters.begin(), source_.parameters.end(), static_cast<int>(i)) ==
                   source_.parameters.end() &&
               std::find(source_.returns.begin(), source_.returns.end(), static_cast<int>(i)) ==
                   source_.returns.end()) {
      llvm::IRBuilder<> at(entryBlock_, entryBlock_->begin());
      auto* memory = at.CreateAlloca(llvm::ArrayType::get(integer(8), variable.bytes));
      memory->setAlignment(llvm::Align(std::max(16u, variable.alignment)));
      variables_[i] = memory;
    }
  }
  if (facts_.recursive) {
    Value* here = intrinsicCall(llvm::Intrinsic::frameaddress, {builder_.getPtrTy()}, {constant(0)});
    Value* limit = threadField(offsetof(ThreadContext, stackLimit), integer(64));
    faultIf(builder_.CreateICmpULT(builder_.CreatePtrToInt(here, integer(64)), limit), constant(0, 64), 0);
  }
  if (bytes == 0 && !facts_.allocates) return;
  bytes = (bytes + 15) & ~15u;
  frame_ = threadField(offsetof(ThreadContext, localTop), integer(64));
  Value* top = builder_.CreateAdd(frame_, constant(bytes, 64));
  Value* end = threadField(offsetof(ThreadContext, localEnd), integer(64));
  if (!source_.entry) faultIf(builder_.CreateICmpUGT(top, end), frame_, 0);
  builder_.CreateStore(top, threadPointer(offsetof(ThreadContext, localTop)));
  for (size_t i = 0; i < source_.variables.size(); ++i) {
    const ptx::Variable& variable = source_.variables[i];
    if (variable.space == ptx::Space::param && variable.addressTaken && !source_.entry)
      variables_[i] = pointer(builder_.CreateAdd(frame_, constant(frameOffsets_[i], 64)));
  }
}

void Translator::countWaits() {
  waits_.assign(source_.instructions.size() + 1, 0);
  for (size_t i = 0; i < source_.instructions.size(); ++i) {
    const Instruction& one = source_.instructions[i];
    bool waits = one.opcode == "atom" || one.opcode == "call" || one.opcode == "mbarrier" ||
                 (one.opcode == "ld" && (one.has("volatile") || one.has("relaxed") || one.has("acquire") ||
                                         one.has("mmio") || one.has("cv")));
    waits_[i + 1] = waits_[i] + waits;
  }
}

// A loop over [from, to] whose progress may depend on another thread.
bool Translator::isSpinLoop(int from, int to) const {
  return waits_[static_cast<size_t>(to) + 1] != waits_[static_cast<size_t>(from)];
}

void Translator::translateBody() {
  for (size_t i = 0; i < source_.labelled.size(); ++i)
    if (source_.labelled[i]) labels_[static_cast<int>(i)] = newBlock("label");
  for (size_t i = 0; i <= source_.instructions.size(); ++i) {
    if (auto label = labels_.find(static_cast<int>(i)); label != labels_.end()) {
      if (builder_.GetInsertBlock()->getTerminator() == nullptr) builder_.CreateBr(label->second);
      startBlock(label->second);
    }
    if (i == source_.instructions.size()) break;
    if (builder_.GetInsertBlock()->getTerminator() != nullptr) startBlock(newBlock("unreachable"));
    current_ = static_cast<int>(i);
    translate(source_.instructions[i]);
  }
  if (builder_.GetInsertBlock()->getTerminator() == nullptr) builder_.CreateBr(exitBlock_);
  if (!source_.entry) {
    startBlock(exitBlock_);
    unsigned argument = 1;
    for (int index : source_.returns) {
      const ptx::Variable& variable = source_.variables[static_cast<size_t>(index)];
      if (variable.inRegister)
        builder_.CreateStore(readRegister(variable.reg), function_->getArg(argument));
      else if (variable.addressTaken)
        builder_.CreateMemCpy(function_->getArg(argument), llvm::MaybeAlign(1),
                              variables_[static_cast<size_t>(index)], llvm::MaybeAlign(1), variable.bytes);
      ++argument;
    }
    if (frame_ != nullptr) builder_.CreateStore(frame_, threadPointer(offsetof(ThreadContext, localTop)));
    builder_.CreateRetVoid();
  }
  if (faultAddress_->getNumIncomingValues() == 0) {
    faultBlock_->eraseFromParent();
    faultBlock_ = nullptr;
  }
}

void Translator::translate(const Instruction& instruction) {
  auto handler = handlers().find(instruction.opcode);
  if (handler == handlers().end()) unsupported(instruction);
  try {
    predicated(instruction, handler->second);
  } catch (const std::out_of_range&) {
    throw Problem{CompileError::Kind::syntax, instruction.line,
                  std::string(instruction.opcode) + ": too few operands"};
  }
}

void Translator::predicated(const Instruction& instruction, Handler handler) {
  bool ownPredicate = instruction.opcode == "bra";
  if (instruction.predicate == ptx::kNoRegister || ownPredicate) return (this->*handler)(instruction);
  Value* predicate = readRegister(instruction.predicate);
  llvm::BasicBlock* then = newBlock("then");
  llvm::BasicBlock* after = newBlock("after");
  if (instruction.predicateNegated)
    builder_.CreateCondBr(predicate, after, then);
  else
    builder_.CreateCondBr(predicate, then, after);
  startBlock(then);
  (this->*handler)(instruction);
  if (builder_.GetInsertBlock()->getTerminator() == nullptr) builder_.CreateBr(after);
  startBlock(after);
}

}  // namespace gpupool::softgpu::codegen
