#include "server/softgpu/runtime/mbarrier.h"

#include <bit>
#include <cstring>

#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/memory.h"

namespace gpupool::softgpu::runtime {
namespace {

struct State {
  uint64_t phase : 1;
  uint64_t expected : 20;  // arrivals of a phase
  uint64_t pending : 20;   // still missing in this one
  int64_t bytes : 23;      // announced and not yet there
};
static_assert(sizeof(State) == 8);

void advance(State& state) {
  if (state.pending != 0 || state.bytes != 0) return;
  state.phase ^= 1;
  state.pending = state.expected;
}

}  // namespace

uint64_t mbarrier(ThreadContext* thread, uint32_t operationCode, uint64_t* object, uint64_t operand) {
  auto operation = static_cast<MbarrierOperation>(operationCode);
  auto state = std::bit_cast<State>(*object);
  const uint64_t before = *object;
  uint64_t answer = before;
  switch (operation) {
    case MbarrierOperation::init:
      if (operand == 0 || operand >= (1u << 20)) faultInstruction();
      state = {0, operand, operand, 0};
      break;
    case MbarrierOperation::arriveDrop:
      if (operand > state.expected) faultInstruction();
      state.expected -= operand;
      [[fallthrough]];
    case MbarrierOperation::arrive:
      if (operand > state.pending) faultInstruction();
      state.pending -= operand;
      advance(state);
      break;
    case MbarrierOperation::expect:
      state.bytes += static_cast<int64_t>(operand);
      break;
    case MbarrierOperation::completeBytes:
      state.bytes -= static_cast<int64_t>(operand);
      advance(state);
      break;
    case MbarrierOperation::testState:
    case MbarrierOperation::tryState:
      answer = std::bit_cast<State>(operand).phase != state.phase;
      break;
    case MbarrierOperation::testParity:
    case MbarrierOperation::tryParity:
      answer = (operand & 1) != state.phase;
      break;
  }
  *object = std::bit_cast<uint64_t>(state);
  bool waits = operation == MbarrierOperation::tryState || operation == MbarrierOperation::tryParity;
  if (waits && answer == 0) {
    spin(thread);
    state = std::bit_cast<State>(*object);
    uint64_t phase =
        operation == MbarrierOperation::tryState ? std::bit_cast<State>(operand).phase : operand & 1;
    answer = phase != state.phase;
  }
  return answer;
}

void bulkCopy(uint64_t to, uint64_t from, uint64_t bytes) {
  if (((to | from | bytes) & 15) != 0) faultAddress((to | from | bytes) & 15, 16);
  if (bytes == 0) return;
  for (uint64_t end : {to, to + bytes - 1, from, from + bytes - 1})
    if (!isVisible(end)) faultAddress(end, 0);
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

}  // namespace gpupool::softgpu::runtime
