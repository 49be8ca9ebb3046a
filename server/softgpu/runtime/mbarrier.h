#pragma once
// mbarrier objects (PTX ISA 9.0, 9.7.13.15): 64 bits of shared memory, opaque to programs. Only the block's
// own OS thread touches shared memory, so plain accesses do.

#include <cstdint>

#include "server/softgpu/runtime/context.h"

namespace gpupool::softgpu::runtime {

enum class MbarrierOperation : uint32_t {
  init,           // operand: threads that arrive in a phase
  arrive,         // operand: how many at once; the state before
  arriveDrop,     // and they take no part in later phases
  expect,         // operand: bytes to come
  completeBytes,  // operand: bytes that came
  testState,      // operand: the state of an arrive; 1 when its phase is over
  testParity,     // operand: the phase's parity
  tryState,       // the same, letting other threads run before answering 0
  tryParity,
};

uint64_t mbarrier(ThreadContext* thread, uint32_t operation, uint64_t* object, uint64_t operand);

// cp.async.bulk: both ends are checked; the bytes are complete when it returns.
void bulkCopy(uint64_t to, uint64_t from, uint64_t bytes);

}  // namespace gpupool::softgpu::runtime
