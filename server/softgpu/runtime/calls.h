#pragma once
// The functions generated code calls, and what the runtime's own files share of them. Generated code finds
// them by the names in runtime/symbols.cpp.

#include <cstdint>
#include <span>
#include <string_view>

#include "server/softgpu/runtime/context.h"

namespace gpupool::softgpu::runtime {

enum class WarpOperation : uint8_t {
  sync,
  up,
  down,
  butterfly,
  index,  // shfl
  all,
  any,
  uniform,
  ballot,  // vote
  matchAny,
  matchAll,
  addition,
  minimum,
  maximum,
  minimumSigned,
  maximumSigned,
  conjunction,
  disjunction,
  exclusion,  // redux
  elect,
  multiply,  // value: the address of a MatrixProduct
  rows,      // value: the address of a MatrixRows
};

enum class BarrierOperation : uint8_t { sync, arrive, countTrue, conjunction, disjunction };

// ---- threads of a block (sync.cpp)
// Barrier `id` for `count` threads (0: all); the result of bar.red.
uint32_t barrier(ThreadContext* thread, uint32_t id, uint32_t count, uint32_t operation, uint32_t predicate);
// Meets the threads of `mask` in this warp. shfl: b is the lane or delta, c as in PTX. The second result goes
// to ThreadContext::warpPredicate.
uint64_t warp(ThreadContext* thread, uint32_t operation, uint32_t mask, uint64_t value, uint32_t b,
              uint32_t c);
// The lanes of this warp that execute the same instruction once nothing else of the block can run.
uint32_t activeMask(ThreadContext* thread, uint32_t site);
void threadExit(ThreadContext* thread);
void spin(ThreadContext* thread);
// True when a thread waited in activeMask and is ready now.
bool releaseActive(BlockContext& block);

// ---- the ends (fault.cpp)
[[noreturn]] void faultAddress(uint64_t address, uint64_t bytes);  // illegal, or misaligned for `bytes`
[[noreturn]] void faultTrap();
[[noreturn]] void faultInstruction();
[[noreturn]] void faultStack();

// ---- functions kernels call (device_functions.cpp)
uint32_t devicePrintf(ThreadContext* thread, uint64_t format, uint64_t arguments);
[[noreturn]] void deviceAssert(ThreadContext* thread, uint64_t message, uint64_t file, uint32_t line,
                               uint64_t function);
uint64_t deviceMalloc(ThreadContext* thread, uint64_t bytes);
void deviceFree(ThreadContext* thread, uint64_t address);

// ---- all of them, for the linker
struct Symbol {
  std::string_view name;
  void* address;
};
std::span<const Symbol> symbols();
std::span<const Symbol> mathSymbols();

}  // namespace gpupool::softgpu::runtime
