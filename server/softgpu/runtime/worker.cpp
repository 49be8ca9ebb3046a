#include "server/softgpu/runtime/worker.h"

#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/memory.h"

namespace gpupool::softgpu::runtime {
namespace {

constexpr uint64_t kStackBytes = 64 << 10;
constexpr uint64_t kRecursiveStackBytes = 512 << 10;
constexpr uint64_t kStackReserve =
    16 << 10;  // what a runtime function may need below a recursive function's limit
constexpr uint32_t kFibersPerChunk = 256;
constexpr size_t kSignalStackBytes = 64 << 10;
constexpr size_t kMaxResidentBlocks = 1 << 20;

// Read by the signal handler: initial-exec, so that reading it never allocates.
__attribute__((tls_model("initial-exec"))) thread_local Worker* currentWorker = nullptr;

}  // namespace

Worker* Worker::current() { return currentWorker; }

Worker::Worker() : signalStack_(new std::byte[kSignalStackBytes]) {}

Worker::~Worker() {
  freeFibers();
  for (auto& block : blocks_) unmapVisible(block->sharedBase, block->sharedCapacity);
}

// ---- fibers ----
void Worker::freeFibers() {
  for (Chunk& chunk : chunks_) {
    munmap(reinterpret_cast<void*>(chunk.stacks), chunk.stackBytes);
    unmapVisible(chunk.local, chunk.localBytes);
  }
  chunks_.clear();
  freeFibers_ = nullptr;
}

bool Worker::prepareFibers(const KernelCode& code) {
  uint64_t stack = code.recursive ? kRecursiveStackBytes : kStackBytes;
  uint64_t local = (uint64_t{code.localBytes} + 255) & ~uint64_t{255};
  if (stack > stackStride_ || local > localStride_) {
    freeFibers();
    stackStride_ = std::max(stack, stackStride_);
    localStride_ = std::max(local, localStride_);
  }
  if (freeFibers_ == nullptr) allocateFiberChunk();
  return freeFibers_ != nullptr;
}

void Worker::allocateFiberChunk() {
  Chunk chunk;
  // One page more than a power of two apart, and each stack with a guard page below while there are few of
  // them: every guard costs the process two mappings of the 65,530 it may have.
  uint64_t stride = stackStride_ + 4096;
  bool guarded = chunks_.size() < 16;
  chunk.stackBytes = stride * kFibersPerChunk;
  void* stacks = mmap(nullptr, chunk.stackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (stacks == MAP_FAILED) return;
  chunk.stacks = reinterpret_cast<uint64_t>(stacks);
  chunk.localBytes = localStride_ * kFibersPerChunk;
  if (chunk.localBytes != 0) {
    chunk.local = mapVisible(chunk.localBytes);
    if (chunk.local == 0) {
      munmap(stacks, chunk.stackBytes);
      return;
    }
  }
  chunk.fibers = std::make_unique<Fiber[]>(kFibersPerChunk);
  for (uint32_t i = kFibersPerChunk; i-- > 0;) {
    Fiber& fiber = chunk.fibers[i];
    fiber.stackBase = chunk.stacks + i * stride;
    if (guarded) mprotect(reinterpret_cast<void*>(fiber.stackBase), 4096, PROT_NONE);
    // Tops at different cache sets: threads of a block touch the same depth of their stacks one after the
    // other.
    fiber.stackTop = fiber.stackBase + stride - uint64_t{i % 16} * 256;
    fiber.thread.stackLimit = fiber.stackBase + 4096 + kStackReserve;
    fiber.thread.localBase = chunk.local + i * localStride_;
    fiber.thread.localEnd = fiber.thread.localBase + localStride_;
    releaseFiber(&fiber);
  }
  chunks_.push_back(std::move(chunk));
}

Fiber* Worker::newFiber() {
  if (freeFibers_ == nullptr) allocateFiberChunk();
  Fiber* fiber = freeFibers_;
  if (fiber == nullptr) return nullptr;
  freeFibers_ = fiber->nextFree;
  prepare(*fiber);
  return fiber;
}

void Worker::releaseFiber(Fiber* fiber) {
  fiber->nextFree = freeFibers_;
  freeFibers_ = fiber;
}

// ---- blocks ----
bool Worker::giveShared(BlockContext& block, uint64_t bytes) {
  if (block.sharedCapacity >= bytes && block.sharedBase != 0) return true;
  unmapVisible(block.sharedBase, block.sharedCapacity);
  block.sharedCapacity = std::max<uint64_t>((bytes + 4095) & ~uint64_t{4095}, 64 << 10);
  block.sharedBase = mapVisible(block.sharedCapacity);
  return block.sharedBase != 0;
}

void Worker::resetWarps(BlockContext& block) {
  uint32_t warps = (block.threads + kWarpSize - 1) / kWarpSize;
  for (uint32_t i = 0; i < warps; ++i) {
    block.warps[i].exited = block.warps[i].waitingActive = block.warps[i].groupCount = 0;
  }
  if (uint32_t rest = block.threads % kWarpSize) block.warps[warps - 1].exited = ~0u << rest;
  for (Barrier& barrier : block.barriers)
    if (barrier.used) barrier = Barrier{};
  std::memset(block.ready, 0, sizeof block.ready);
}

BlockContext* Worker::beginBlock(Grid& grid, uint64_t index) {
  if (freeBlocks_.empty()) {
    blocks_.push_back(std::make_unique<BlockContext>());
    freeBlocks_.push_back(blocks_.back().get());
  }
  BlockContext* block = freeBlocks_.back();
  const KernelCode& code = *grid.code;
  uint32_t alignment = std::max(code.dynamicAlignment, 16u);
  block->dynamicOffset = (code.staticSharedBytes + alignment - 1) & ~(alignment - 1);
  block->dynamicBytes = grid.dynamicSharedBytes;
  block->sharedBytes =
      grid.dynamicSharedBytes != 0 ? block->dynamicOffset + grid.dynamicSharedBytes : code.staticSharedBytes;
  block->sharedLimit = (block->sharedBytes + 127) & ~127u;
  if (!giveShared(*block, block->sharedLimit)) return nullptr;
  freeBlocks_.pop_back();
  block->parameters = grid.parameters;
  uint64_t rows = index / grid.grid[0];
  block->block[0] = static_cast<uint32_t>(index % grid.grid[0]);
  block->block[1] = static_cast<uint32_t>(rows % grid.grid[1]);
  block->block[2] = static_cast<uint32_t>(rows / grid.grid[1]);
  std::copy_n(grid.grid, 3, block->grid);
  std::copy_n(grid.block, 3, block->size);
  block->threads = block->live = grid.threads;
  block->nextThread = block->fibers = block->yields = 0;
  block->spinning = block->activePending = false;
  block->gridId = grid.id;
  block->workspace = grid.workspace;
  block->owner = &grid;
  block->worker = this;
  resetWarps(*block);
  return block;
}

void Worker::endBlock(BlockContext* block) { freeBlocks_.push_back(block); }

// ---- the scheduler ----
bool Worker::anyReady(const BlockContext& block) {
  uint64_t any = 0;
  for (uint64_t word : block.ready) any |= word;
  return any != 0;
}

// The next fiber of the block to run: a ready thread after `after`, cyclically, or a new fiber for threads
// that have not started. Null: nothing can run.
Fiber* Worker::next(BlockContext& block, uint32_t after, bool preferNew) {
  bool more = block.nextThread < block.threads;
  if (more && preferNew) {
    if (Fiber* fiber = newFiber()) return ++block.fibers, fiber;
  }
  uint32_t start = (after + 1) % kMaxThreads;
  uint32_t word = start / 64;
  uint64_t bits = block.ready[word] & (~uint64_t{0} << (start % 64));
  for (uint32_t step = 0; step <= kWords; ++step) {
    if (bits != 0) {
      uint32_t thread = word * 64 + static_cast<uint32_t>(std::countr_zero(bits));
      return block.fiberOf[thread];
    }
    word = (word + 1) % kWords;
    bits = block.ready[word];
  }
  if (more) {
    if (Fiber* fiber = newFiber()) return ++block.fibers, fiber;
    block.owner->fail(Outcome::outOfMemory);
  }
  return nullptr;
}

void Worker::yield(Fiber& fiber) {
  BlockContext& block = *fiber.thread.block;
  if (block.owner->failed()) abandon(Outcome::ok);
  uint32_t linear = fiber.thread.linear;
  block.fiberOf[linear] = &fiber;
  block.ready[linear / 64] |= uint64_t{1} << (linear % 64);
  Fiber* to = nullptr;
  if (++block.yields <= 2 * block.threads) to = next(block, linear, true);
  if (to == &fiber) to = nullptr;
  if (to == nullptr) {
    block.spinning = true;
    fiber_ = nullptr;
    gpupoolSwitchStack(&fiber.stackPointer, scheduler_);
  } else {
    fiber_ = to;
    gpupoolSwitchStack(&fiber.stackPointer, to->stackPointer);
  }
  block.ready[linear / 64] &= ~(uint64_t{1} << (linear % 64));
}

void Worker::finish(Fiber& fiber) {
  BlockContext& block = *block_;
  --block.fibers;
  releaseFiber(&fiber);
  Fiber* to = next(block, fiber.thread.linear, false);
  fiber_ = to;
  gpupoolJumpStack(to != nullptr ? to->stackPointer : scheduler_);
}

void Worker::abandon(Outcome outcome) {
  if (outcome != Outcome::ok) grid_->fail(outcome);
  abandoned_ = true;
  fiber_ = nullptr;
  gpupoolJumpStack(scheduler_);
}

void Worker::callOnHost(void (*function)(void*), void* argument) {
  onHost_ = true;
  gpupoolCallOnStack(function, argument, scheduler_);
  onHost_ = false;
}

// Runs the block until nothing of it can run, or its threads only spin.
Worker::Turn Worker::turn(BlockContext& block) {
  block_ = &block;
  block.spinning = false;
  block.yields = 0;
  Fiber* to = next(block, kMaxThreads - 1, false);
  while (to != nullptr) {
    fiber_ = to;
    running_ = true;
    gpupoolSwitchStack(&scheduler_, to->stackPointer);
    running_ = false;
    if (abandoned_) return Turn::done;
    bool woken = releaseActive(block);
    if (block.spinning && !woken) return Turn::spinning;
    block.spinning = false;
    to = next(block, kMaxThreads - 1, false);
  }
  return block.fibers == 0 && block.nextThread >= block.threads ? Turn::done : Turn::stuck;
}

void Worker::execute(Grid& grid) {
  stack_t mine{};
  stack_t before{};
  mine.ss_sp = signalStack_.get();
  mine.ss_size = kSignalStackBytes;
  sigaltstack(&mine, &before);
  Worker* outer = currentWorker;
  currentWorker = this;
  grid_ = &grid;
  abandoned_ = false;
  if (!prepareFibers(*grid.code)) grid.fail(Outcome::outOfMemory);
  std::vector<BlockContext*> resident;
  size_t at = 0;
  size_t spinning = 0;  // consecutive turns that ended so
  while (!grid.failed()) {
    if (spinning >= resident.size() && resident.size() < kMaxResidentBlocks) {
      // Every block here waits for something: perhaps for a block that has not begun.
      uint64_t index = grid.nextBlock.fetch_add(1, std::memory_order_relaxed);
      if (index < grid.blocks) {
        BlockContext* block = beginBlock(grid, index);
        if (block == nullptr) {
          grid.fail(Outcome::outOfMemory);
          break;
        }
        resident.push_back(block);
        at = resident.size() - 1;
      } else if (resident.empty()) {
        break;
      } else {
        sched_yield();
      }
      spinning = 0;
    }
    at %= resident.size();
    Turn result = turn(*resident[at]);
    if (abandoned_ || grid.failed()) break;
    if (result == Turn::spinning) {
      ++spinning;
      ++at;
    } else if (result == Turn::stuck) {
      grid.fail(Outcome::launchFailed);
    } else {
      endBlock(resident[at]);
      resident[at] = resident.back();
      resident.pop_back();
      spinning = 0;
    }
  }
  if (grid.failed()) {  // fibers of blocks that did not end are taken back wholesale
    freeFibers_ = nullptr;
    for (Chunk& chunk : chunks_)
      for (uint32_t i = kFibersPerChunk; i-- > 0;) releaseFiber(&chunk.fibers[i]);
    for (BlockContext* block : resident) endBlock(block);
  }
  grid_ = nullptr;
  currentWorker = outer;
  sigaltstack(&before, nullptr);
}

void Worker::redirect(Outcome outcome, ucontext_t* context) {
  grid_->fail(outcome);
  abandoned_ = true;
  fiber_ = nullptr;
  // As gpupoolJumpStack(scheduler_), called from nowhere.
  context->uc_mcontext.gregs[REG_RDI] = static_cast<greg_t>(reinterpret_cast<uint64_t>(scheduler_));
  context->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(reinterpret_cast<uint64_t>(scheduler_));
  context->uc_mcontext.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uint64_t>(&gpupoolJumpStack));
}

}  // namespace gpupool::softgpu::runtime

extern "C" [[noreturn]] __attribute__((used)) void gpupoolFiberMain(gpupool::softgpu::runtime::Fiber* fiber) {
  using gpupool::softgpu::runtime::Worker;
  Worker* worker = Worker::current();
  fiber->thread.block = worker->block();
  worker->entry()(&fiber->thread, worker->block());
  worker->finish(*fiber);
}
