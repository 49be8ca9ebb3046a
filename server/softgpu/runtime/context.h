#pragma once
// What generated code and the runtime share while a grid runs. Generated code reads these structures by
// offset (codegen/layout.h): standard layout only.
//
// A block lives on one OS thread from start to end. Its CUDA threads run on fibers: a fiber runs thread after
// thread to the end, and only when one has to wait does another fiber go on with the rest. So a kernel that
// never waits is a plain loop on one fiber.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "server/softgpu/engine.h"

namespace gpupool::softgpu::runtime {

struct BlockContext;
struct Fiber;
struct Grid;
class Worker;

constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kBarriers = 17;  // the sixteen of PTX, and the cluster's
constexpr uint32_t kWords = kMaxThreads / 64;

// Of the CUDA thread a fiber runs now.
struct ThreadContext {
  BlockContext* block = nullptr;
  uint32_t tid[3] = {};
  uint32_t linear = 0;
  uint64_t localTop = 0;  // the next free byte of local memory; grows upwards
  uint64_t localBase = 0;
  uint64_t localEnd = 0;
  int32_t spinBudget = 0;      // backward branches of waiting loops left before spin() is called
  uint32_t warpPredicate = 0;  // the second result of a warp operation
  uint64_t stackLimit = 0;     // recursive functions fault below it
};

struct Lane {  // what a thread brought to a warp operation, and what it takes away
  uint8_t operation = 0;
  uint32_t mask = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint64_t value = 0;
  uint64_t result = 0;
  uint32_t predicate = 0;
};

struct WarpGroup {
  uint32_t mask = 0;
  uint32_t arrived = 0;
};

struct Warp {
  uint32_t exited = 0;         // lanes; those beyond the block's last thread are exited from the start
  uint32_t waitingActive = 0;  // lanes inside activemask
  uint32_t groupCount = 0;
  WarpGroup groups[kWarpSize];
};

struct Barrier {
  uint32_t arrived = 0;
  uint32_t expected = 0;  // 0: every thread that has not exited
  uint32_t count = 0;     // of true predicates (bar.red)
  bool used = false;
  uint64_t waiting[kWords] = {};
  uint64_t present[kWords] = {};  // arrived, waiting or not
};

struct BlockContext {
  // ---- read by generated code; constant while the block runs, but for nextThread
  const std::byte* parameters = nullptr;
  uint64_t sharedBase = 0;
  uint32_t sharedBytes = 0;    // static and dynamic
  uint32_t sharedLimit = 0;    // the end of what the block may touch: hardware allots 128 bytes at a time
  uint32_t dynamicOffset = 0;  // of the dynamic part
  uint32_t dynamicBytes = 0;
  uint32_t block[3] = {};
  uint32_t grid[3] = {};
  uint32_t size[3] = {};
  uint32_t threads = 0;
  uint32_t nextThread = 0;
  uint32_t multiprocessor = 0;
  uint64_t gridId = 0;
  uint64_t workspace = 0;  // of a cooperative grid (%envreg1:%envreg2)

  // ---- the runtime's
  Grid* owner = nullptr;
  Worker* worker = nullptr;
  uint64_t sharedCapacity = 0;
  uint32_t live = 0;      // threads that have not exited
  uint32_t fibers = 0;    // in use
  uint32_t yields = 0;    // since the scheduler last had its turn
  bool spinning = false;  // left by a yield, not because it is done
  bool activePending = false;
  uint64_t ready[kWords] = {};
  Fiber* fiberOf[kMaxThreads] = {};
  Lane lanes[kMaxThreads];
  Warp warps[kMaxThreads / kWarpSize];
  Barrier barriers[kBarriers];
};

using Entry = void (*)(ThreadContext*, BlockContext*);

// What run() needs to know of a compiled kernel.
struct KernelCode {
  Entry entry = nullptr;
  uint32_t staticSharedBytes = 0;
  uint32_t dynamicAlignment = 16;
  uint32_t localBytes = 0;  // of the entry and its deepest chain of calls, or the recursion allowance
  bool recursive = false;   // recursion or indirect calls: larger stacks
};

struct Grid {
  const KernelCode* code = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t threads = 1;
  uint32_t dynamicSharedBytes = 0;
  const std::byte* parameters = nullptr;  // in visible memory
  uint64_t workspace = 0;
  uint64_t id = 0;
  uint64_t blocks = 1;
  std::atomic<uint64_t> nextBlock{0};
  std::atomic<Outcome> outcome{Outcome::ok};

  void fail(Outcome what) {
    Outcome none = Outcome::ok;
    outcome.compare_exchange_strong(none, what);
  }
  bool failed() const { return outcome.load(std::memory_order_relaxed) != Outcome::ok; }
};

}  // namespace gpupool::softgpu::runtime
