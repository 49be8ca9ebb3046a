#pragma once
// One OS thread's means to run blocks: fibers, shared memory, a scheduler. A worker is used by one thread at
// a time.

#include <bit>
#include <csignal>
#include <memory>
#include <vector>

#include "server/softgpu/runtime/context.h"
#include "server/softgpu/runtime/fiber.h"

namespace gpupool::softgpu::runtime {

class Worker {
 public:
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;

  // Takes blocks of `grid` and runs them until none is left or the grid failed.
  void execute(Grid& grid);

  // The worker whose fiber this thread is running; null outside.
  static Worker* current();

  // What a fiber that starts now is to run.
  BlockContext* block() const { return block_; }
  Entry entry() const { return grid_->code->entry; }

  // ---- called on a fiber
  // The fiber's thread waits (its ready bit is clear) or yields (set): goes on with other threads.
  void leave(Fiber& fiber);
  void yield(Fiber& fiber);
  [[noreturn]] void finish(Fiber& fiber);
  // Ends the grid.
  [[noreturn]] void abandon(Outcome outcome);
  // function(argument) on the OS thread's own stack: for code too big for a fiber's.
  void callOnHost(void (*function)(void*), void* argument);

  // From the signal handler: whether a fault now is the kernel's; then where to go on.
  bool onFiber() const { return running_ && !onHost_; }
  void redirect(Outcome outcome, ucontext_t* context);

 private:
  enum class Turn { done, spinning, stuck };

  bool prepareFibers(const KernelCode& code);
  BlockContext* beginBlock(Grid& grid, uint64_t index);
  bool giveShared(BlockContext& block, uint64_t bytes);
  void resetWarps(BlockContext& block);
  Turn turn(BlockContext& block);
  void endBlock(BlockContext* block);
  Fiber* next(BlockContext& block, uint32_t after, bool preferNew);
  Fiber* newFiber();
  void releaseFiber(Fiber* fiber);
  void allocateFiberChunk();
  void freeFibers();
  static bool anyReady(const BlockContext& block);

  struct Chunk {
    uint64_t stacks = 0;
    uint64_t stackBytes = 0;
    uint64_t local = 0;
    uint64_t localBytes = 0;
    std::unique_ptr<Fiber[]> fibers;
  };
  std::vector<Chunk> chunks_;
  Fiber* freeFibers_ = nullptr;
  uint64_t stackStride_ = 0;
  uint64_t localStride_ = 0;
  std::vector<std::unique_ptr<BlockContext>> blocks_;
  std::vector<BlockContext*> freeBlocks_;

  void* scheduler_ = nullptr;  // where the scheduler stopped when it switched to a fiber
  Fiber* fiber_ = nullptr;
  BlockContext* block_ = nullptr;
  Grid* grid_ = nullptr;
  bool running_ = false;
  bool onHost_ = false;
  bool abandoned_ = false;
  std::unique_ptr<std::byte[]> signalStack_;
};

// Where almost every barrier ends: the neighbour in the same word of the ready set goes on.
inline void Worker::leave(Fiber& fiber) {
  BlockContext& block = *fiber.thread.block;
  uint32_t linear = fiber.thread.linear;
  block.fiberOf[linear] = &fiber;
  uint32_t after = linear + 1;
  uint64_t bits = after % 64 != 0 ? block.ready[linear / 64] >> (after % 64) : 0;
  Fiber* to = bits != 0 ? block.fiberOf[after + static_cast<uint32_t>(std::countr_zero(bits))]
                        : next(block, linear, false);
  if (to == &fiber) return;
  fiber_ = to;
  gpupoolSwitchStack(&fiber.stackPointer, to != nullptr ? to->stackPointer : scheduler_);
}

// Makes the SIGSEGV and SIGBUS handlers ours; faults that are not a kernel's go to the handler before.
void installFaultHandler();

// Lends workers, one per concurrent caller, and lets the shared threads help with a grid. Returns when it is
// done.
void runGrid(Grid& grid);

unsigned coreCount();

}  // namespace gpupool::softgpu::runtime
