#include "server/softgpu/runtime/fiber.h"

#if !defined(__x86_64__)
#error "the software GPU's fibers are written for x86-64"
#endif

extern "C" [[noreturn]] void gpupoolFiberMain(gpupool::softgpu::runtime::Fiber* fiber);

asm(R"(
.text
.p2align 4
.globl gpupoolSwitchStack
.hidden gpupoolSwitchStack
.type gpupoolSwitchStack, @function
gpupoolSwitchStack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpupoolSwitchStack, .-gpupoolSwitchStack

.p2align 4
.globl gpupoolJumpStack
.hidden gpupoolJumpStack
.type gpupoolJumpStack, @function
gpupoolJumpStack:
  movq %rdi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpupoolJumpStack, .-gpupoolJumpStack

.p2align 4
.globl gpupoolCallOnStack
.hidden gpupoolCallOnStack
.type gpupoolCallOnStack, @function
gpupoolCallOnStack:
  pushq %rbx
  movq %rsp, %rbx
  movq %rdx, %rsp
  andq $-16, %rsp
  movq %rdi, %rax
  movq %rsi, %rdi
  call *%rax
  movq %rbx, %rsp
  popq %rbx
  ret
.size gpupoolCallOnStack, .-gpupoolCallOnStack

.p2align 4
.globl gpupoolFiberStart
.hidden gpupoolFiberStart
.type gpupoolFiberStart, @function
gpupoolFiberStart:
  movq %r12, %rdi
  xorl %ebp, %ebp
  call gpupoolFiberMain
  ud2
.size gpupoolFiberStart, .-gpupoolFiberStart
.section .note.GNU-stack,"",@progbits
.text
)");

namespace gpupool::softgpu::runtime {

void prepare(Fiber& fiber) {
  // Different fibers start at different cache sets; a stack a page boundary apart would put all tops in the
  // same one.
  auto* top = reinterpret_cast<uint64_t*>(fiber.stackTop);
  *--top = 0;
  *--top = 0;  // keeps the stack at 16 bytes before the call in gpupoolFiberStart
  *--top = reinterpret_cast<uint64_t>(&gpupoolFiberStart);
  *--top = 0;                                   // rbp
  *--top = 0;                                   // rbx
  *--top = reinterpret_cast<uint64_t>(&fiber);  // r12
  *--top = 0;                                   // r13
  *--top = 0;                                   // r14
  *--top = 0;                                   // r15
  fiber.stackPointer = top;
}

}  // namespace gpupool::softgpu::runtime
