// Asynchronous copies, all done at once, and the barrier objects that announce them (PTX ISA 9.0, 9.7.9.25
// and 9.7.13.15).
#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/runtime/context.h"
#include "server/softgpu/runtime/mbarrier.h"

namespace gpupool::softgpu::codegen {

using runtime::MbarrierOperation;

llvm::Value* Translator::mbarrierCall(MbarrierOperation operation, Value* object, Value* operand) {
  return call("gpupool.mbarrier", integer(64),
              {thread_, constant(static_cast<unsigned>(operation)), object,
               builder_.CreateZExtOrTrunc(operand, integer(64))});
}

void Translator::onMbarrier(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  if (instruction.has("inval")) return;
  if (instruction.has("pending_count")) unsupported(instruction);
  size_t at = 0;
  while (at < operands.size() && operands[at].kind != Operand::Kind::address) ++at;
  if (at == operands.size()) unsupported(instruction);
  Value* object = address(instruction, operands[at], spaceOf(instruction), 8).pointer;
  bool hasOperand = at + 1 < operands.size();
  auto operand = [&](unsigned bits) { return hasOperand ? read(operands[at + 1], bits) : constant(1, bits); };
  checked_.clear();
  if (instruction.has("init")) {
    mbarrierCall(MbarrierOperation::init, object, operand(32));
  } else if (instruction.has("arrive") || instruction.has("arrive_drop")) {
    bool drop = instruction.has("arrive_drop");
    bool expect = instruction.has("expect_tx");
    if (expect) mbarrierCall(MbarrierOperation::expect, object, operand(32));
    Value* state = mbarrierCall(drop ? MbarrierOperation::arriveDrop : MbarrierOperation::arrive, object,
                                expect ? constant(1) : operand(32));
    if (at > 0) write(operands[0], state);
  } else if (instruction.has("expect_tx") || instruction.has("complete_tx")) {
    mbarrierCall(instruction.has("expect_tx") ? MbarrierOperation::expect : MbarrierOperation::completeBytes,
                 object, operand(32));
  } else if (instruction.has("test_wait") || instruction.has("try_wait")) {
    bool tries = instruction.has("try_wait");
    bool parity = instruction.has("parity");
    auto operation = parity ? (tries ? MbarrierOperation::tryParity : MbarrierOperation::testParity)
                            : (tries ? MbarrierOperation::tryState : MbarrierOperation::testState);
    Value* done = mbarrierCall(operation, object, operand(parity ? 32 : 64));
    write(operands.at(0), builder_.CreateICmpNE(done, constant(0, 64)));
  } else {
    unsupported(instruction);
  }
}

void Translator::onCp(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  if (!instruction.has("async")) unsupported(instruction);
  if (instruction.has("commit_group") || instruction.has("wait_group") || instruction.has("wait_all")) return;
  if (instruction.has(
          "mbarrier")) {  // the copies before are complete: .noinc arrives, the other form comes to nothing
    if (!instruction.has("noinc")) return;
    Value* object = address(instruction, operands.at(0), spaceOf(instruction), 8).pointer;
    mbarrierCall(MbarrierOperation::arrive, object, constant(1));
    return;
  }
  if (instruction.has("bulk")) return bulk(instruction);
  copy(instruction);
}

// cp.async.bulk between global and shared memory; tensor maps have no translation.
void Translator::bulk(const Instruction& instruction) {
  const auto& operands = instruction.operands;
  bool toShared = false;
  bool fromShared = false;
  bool named = false;
  for (auto word : instruction.modifiers) {
    if (word == "tensor" || word == "reduce" || word == "prefetch" || word.starts_with("multicast"))
      unsupported(instruction);
    if (word.starts_with("shared") && !named)
      toShared = true, named = true;
    else if (word.starts_with("shared"))
      fromShared = true;
    if (word == "global") named = true;
  }
  if (operands.size() < 3) unsupported(instruction);
  checked_.clear();
  auto place = [&](const Operand& operand, bool shared) -> Value* {
    if (shared) return builder_.CreatePtrToInt(sharedPointer(operand, 16), integer(64));
    return baseOf(operand, 64);
  };
  Value* size = read(operands[2], 32);
  if (toShared || fromShared) {  // the last piece lies in the block's memory too
    const Operand& shared = operands[toShared ? 0 : 1];
    Value* limit = blockField(offsetof(runtime::BlockContext, sharedLimit), integer(32));
    Value* end = builder_.CreateAdd(baseOf(shared, 64), builder_.CreateZExt(size, integer(64)));
    faultIf(builder_.CreateICmpUGT(end, builder_.CreateZExt(limit, integer(64))), end, 0);
  }
  call(
      "gpupool.bulkCopy", builder_.getVoidTy(),
      {place(operands[0], toShared), place(operands[1], fromShared), builder_.CreateZExt(size, integer(64))});
  if (!instruction.has("mbarrier::complete_tx::bytes")) return;
  Value* object = address(instruction, operands.at(3), ptx::Space::shared, 8).pointer;
  mbarrierCall(MbarrierOperation::completeBytes, object, size);
}

}  // namespace gpupool::softgpu::codegen
