#include <cmath>
#include <cstring>
#include <ctime>
#include <vector>

#include "server/softgpu/engine.h"
#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/function_slots.h"
#include "server/softgpu/runtime/matrix.h"
#include "server/softgpu/runtime/mbarrier.h"
#include "server/softgpu/runtime/texture.h"
#include "server/softgpu/runtime/worker.h"

namespace gpupool::softgpu::runtime {
namespace {

uint64_t globalTimer() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void* functionCode(uint64_t value) {
  void* code = codeOfFunction(value);
  if (code == nullptr) faultInstruction();
  return code;
}

// exit inside a device function: the thread is over, its fiber starts again with the next one.
[[noreturn]] void exitThread(ThreadContext* thread) {
  threadExit(thread);
  Fiber& fiber = *fiberOf(thread);
  prepare(fiber);
  gpupoolJumpStack(fiber.stackPointer);
}

template <typename Function>
void* address(Function function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

std::span<const Symbol> symbols() {
  static const std::vector<Symbol> table = {
      {"gpupool.barrier", address(barrier)},
      {"gpupool.warp", address(warp)},
      {"gpupool.activeMask", address(activeMask)},
      {"gpupool.threadExit", address(threadExit)},
      {"gpupool.exitThread", address(exitThread)},
      {"gpupool.spin", address(spin)},
      {"gpupool.mbarrier", address(mbarrier)},
      {"gpupool.loadFragment", address(loadFragment)},
      {"gpupool.storeFragment", address(storeFragment)},
      {"gpupool.bulkCopy", address(bulkCopy)},
      {"gpupool.faultAddress", address(faultAddress)},
      {"gpupool.faultTrap", address(faultTrap)},
      {"gpupool.faultInstruction", address(faultInstruction)},
      {"gpupool.functionCode", address(functionCode)},
      {"gpupool.globalTimer", address(globalTimer)},
      {"gpupool.printf", address(devicePrintf)},
      {"gpupool.assert", address(deviceAssert)},
      {"gpupool.malloc", address(deviceMalloc)},
      {"gpupool.free", address(deviceFree)},
      {"gpupool.setCondition", address(setCondition)},
      {"gpupool.fetchTexture", address(fetch)},
      {"gpupool.surfaceStore", address(store)},
      {"gpupool.surfaceLoad", address(load)},
      // What LLVM itself may call.
      {"memcpy", address(static_cast<void* (*)(void*, const void*, size_t)>(std::memcpy))},
      {"memmove", address(static_cast<void* (*)(void*, const void*, size_t)>(std::memmove))},
      {"memset", address(static_cast<void* (*)(void*, int, size_t)>(std::memset))},
      {"fma", address(static_cast<double (*)(double, double, double)>(std::fma))},
      {"fmaf", address(static_cast<float (*)(float, float, float)>(std::fma))},
      {"floor", address(static_cast<double (*)(double)>(std::floor))},
      {"floorf", address(static_cast<float (*)(float)>(std::floor))},
      {"ceil", address(static_cast<double (*)(double)>(std::ceil))},
      {"ceilf", address(static_cast<float (*)(float)>(std::ceil))},
      {"trunc", address(static_cast<double (*)(double)>(std::trunc))},
      {"truncf", address(static_cast<float (*)(float)>(std::trunc))},
      {"roundeven", address(static_cast<double (*)(double)>(std::nearbyint))},
      {"roundevenf", address(static_cast<float (*)(float)>(std::nearbyint))},
  };
  return table;
}

}  // namespace gpupool::softgpu::runtime
