#pragma once
// Stacks that CUDA threads run on, and the switch between them (System V x86-64: six registers and the stack
// pointer; floating-point control never changes across a switch).

#include <cstdint>

#include "server/softgpu/runtime/context.h"

namespace gpupool::softgpu::runtime {

struct Fiber {
  void* stackPointer = nullptr;  // where it stopped
  uint64_t stackBase = 0;
  uint64_t stackTop = 0;
  Fiber* nextFree = nullptr;
  ThreadContext thread;  // generated code gets its address
};

inline Fiber* fiberOf(ThreadContext* thread) {
  return reinterpret_cast<Fiber*>(reinterpret_cast<char*>(thread) - offsetof(Fiber, thread));
}

extern "C" {
// Saves the running context under *save and continues at `next`.
void gpupoolSwitchStack(void** save, void* next);
// Continues at `next` and forgets the running context.
[[noreturn]] void gpupoolJumpStack(void* next);
// function(argument) on another stack, whose free part ends at `top`; then back.
void gpupoolCallOnStack(void (*function)(void*), void* argument, void* top);
// The first instruction of a new fiber.
void gpupoolFiberStart();
}

// Makes `fiber` start with fiberMain(fiber) when it is next switched to.
void prepare(Fiber& fiber);

}  // namespace gpupool::softgpu::runtime
