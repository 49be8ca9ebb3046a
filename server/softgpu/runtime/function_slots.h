#pragma once
// Values of function pointers. PTX code stores them anywhere and calls them from any kernel of the process,
// so they are addresses of slots that never move: the slot holds the code. The same loads and unloads give
// the same values in another process, for pointers lie in memory that is moved there.

#include <cstdint>

namespace gpupool::softgpu::runtime {

struct alignas(16) FunctionSlot {
  void* code;
};

// A slot without code yet; null when the table is full. Any thread.
FunctionSlot* newFunctionSlot();
void freeFunctionSlot(FunctionSlot* slot);
// Null: not a function.
void* codeOfFunction(uint64_t value);

}  // namespace gpupool::softgpu::runtime
