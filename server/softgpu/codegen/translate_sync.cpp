// Barriers, fences and what the threads of a warp do together (PTX ISA 9.0, chapter 9.7.13).
#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/calls.h"

namespace gpupool::softgpu::codegen {

using runtime::BarrierOperation;
using runtime::WarpOperation;

namespace {
constexpr uint32_t kClusterBarrier = runtime::kBarriers - 1;
constexpr unsigned code(WarpOperation operation) { return static_cast<unsigned>(operation); }
}  // namespace

llvm::Value* Translator::warpCall(unsigned operation, Value* mask, Value* value, Value* b, Value* c) {
  if (b == nullptr) b = constant(0);
  if (c == nullptr) c = constant(0);
  checked_.clear();
  return call("gpupool.warp", integer(64),
              {thread_, constant(operation), mask, builder_.CreateZExtOrTrunc(value, integer(64)), b, c});
}

llvm::Value* Translator::activeMaskHere(const Instruction&) {
  auto site = static_cast<uint64_t>(id_.module) << 28 ^ static_cast<uint64_t>(id_.function) << 16 ^
              static_cast<uint64_t>(current_);
  return call("gpupool.activeMask", integer(32), {thread_, constant(site & 0xFFFFFFFF)});
}

void Translator::onBar(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  auto meet = [&](Value* id, Value* count, BarrierOperation operation, Value* predicate) {
    return call("gpupool.barrier", integer(32),
                {thread_, id, count, constant(static_cast<unsigned>(operation)), predicate});
  };
  Value* zero = constant(0);
  if (instruction.has("cluster")) {
    if (instruction.has("wait")) meet(constant(kClusterBarrier), zero, BarrierOperation::sync, zero);
    return;
  }
  if (instruction.has("warp")) {
    warpCall(code(WarpOperation::sync), read(operands.at(0), 32), zero);
    return;
  }
  bool isReduction = instruction.has("red");
  size_t at = isReduction ? 1 : 0;
  size_t inputs = operands.size() - at - (isReduction ? 1 : 0);
  Value* id = read(operands.at(at), 32);
  Value* count = inputs > 1 ? read(operands.at(at + 1), 32) : zero;
  if (isReduction) {
    bool isCount = instruction.has("popc");
    BarrierOperation operation = isCount                  ? BarrierOperation::countTrue
                                 : instruction.has("and") ? BarrierOperation::conjunction
                                                          : BarrierOperation::disjunction;
    Value* predicate = builder_.CreateZExt(readPredicate(operands.back()), integer(32));
    Value* result = meet(id, count, operation, predicate);
    write(operands[0], isCount ? result : builder_.CreateICmpNE(result, zero));
  } else if (instruction.has("arrive")) {
    meet(id, count, BarrierOperation::arrive, zero);
  } else if (instruction.has("sync")) {
    meet(id, count, BarrierOperation::sync, zero);
  } else {
    unsupported(instruction);
  }
}

void Translator::onMembar(const Instruction& instruction) {
  if (instruction.has("proxy") || instruction.has("mbarrier_init")) return;
  bool heavy = instruction.has("gl") || instruction.has("sys") || instruction.has("sc");
  builder_.CreateFence(heavy ? llvm::AtomicOrdering::SequentiallyConsistent
                             : llvm::AtomicOrdering::AcquireRelease);
}

void Translator::onShfl(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  WarpOperation operation = instruction.has("up")     ? WarpOperation::up
                            : instruction.has("down") ? WarpOperation::down
                            : instruction.has("bfly") ? WarpOperation::butterfly
                            : instruction.has("idx")  ? WarpOperation::index
                                                      : WarpOperation::sync;
  if (operation == WarpOperation::sync) unsupported(instruction);
  Value* value = read(operands.at(1), 32);
  Value* b = read(operands.at(2), 32);
  Value* c = read(operands.at(3), 32);
  Value* mask = instruction.has("sync") ? read(operands.at(4), 32) : activeMaskHere(instruction);
  Value* result = builder_.CreateTrunc(warpCall(code(operation), mask, value, b, c), integer(32));
  if (operands[0].kind != Operand::Kind::pair) return write(operands[0], result);
  write(operands[0].parts[0], result);
  Value* predicate = threadField(offsetof(runtime::ThreadContext, warpPredicate), integer(32));
  write(operands[0].parts[1], builder_.CreateICmpNE(predicate, constant(0)));
}

void Translator::onVote(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  bool isBallot = instruction.has("ballot");
  WarpOperation operation = isBallot                 ? WarpOperation::ballot
                            : instruction.has("all") ? WarpOperation::all
                            : instruction.has("any") ? WarpOperation::any
                                                     : WarpOperation::uniform;
  Value* predicate = builder_.CreateZExt(readPredicate(operands.at(1)), integer(32));
  Value* mask = instruction.has("sync") ? read(operands.at(2), 32) : activeMaskHere(instruction);
  Value* result = builder_.CreateTrunc(warpCall(code(operation), mask, predicate), integer(32));
  write(operands[0], isBallot ? result : builder_.CreateICmpNE(result, constant(0)));
}

void Translator::onMatch(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  bool all = instruction.has("all");
  Value* value = read(operands.at(1), typeAt(instruction).bits);
  Value* result = warpCall(code(all ? WarpOperation::matchAll : WarpOperation::matchAny),
                           read(operands.at(2), 32), value);
  result = builder_.CreateTrunc(result, integer(32));
  if (operands[0].kind != Operand::Kind::pair) return write(operands[0], result);
  write(operands[0].parts[0], result);
  Value* predicate = threadField(offsetof(runtime::ThreadContext, warpPredicate), integer(32));
  write(operands[0].parts[1], builder_.CreateICmpNE(predicate, constant(0)));
}

void Translator::onActivemask(const Instruction& instruction) {
  checked_.clear();
  write(instruction.operands[0], activeMaskHere(instruction));
}

void Translator::onRedux(const Instruction& instruction) {
  Type type = typeAt(instruction);
  if (type.isReal()) unsupported(instruction);
  bool isSigned = type.isSigned();
  WarpOperation operation =
      instruction.has("add")   ? WarpOperation::addition
      : instruction.has("min") ? (isSigned ? WarpOperation::minimumSigned : WarpOperation::minimum)
      : instruction.has("max") ? (isSigned ? WarpOperation::maximumSigned : WarpOperation::maximum)
      : instruction.has("and") ? WarpOperation::conjunction
      : instruction.has("or")  ? WarpOperation::disjunction
      : instruction.has("xor") ? WarpOperation::exclusion
                               : WarpOperation::sync;
  if (operation == WarpOperation::sync) unsupported(instruction);
  const auto& operands = instruction.operands;
  Value* result = warpCall(code(operation), read(operands.at(2), 32), read(operands.at(1), 32));
  write(operands[0], builder_.CreateTrunc(result, integer(32)));
}

void Translator::onElect(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  Value* result = warpCall(code(WarpOperation::elect), read(operands.at(1), 32), constant(0));
  Value* predicate = threadField(offsetof(runtime::ThreadContext, warpPredicate), integer(32));
  if (operands[0].kind != Operand::Kind::pair) unsupported(instruction);
  write(operands[0].parts[0], builder_.CreateTrunc(result, integer(32)));
  write(operands[0].parts[1], builder_.CreateICmpNE(predicate, constant(0)));
}

}  // namespace gpupool::softgpu::codegen
