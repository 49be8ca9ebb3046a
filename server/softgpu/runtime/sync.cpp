// Where threads of a block meet. Everything here runs on a fiber, on the block's one OS thread: no locks.
#include <algorithm>
#include <bit>

#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/matrix.h"
#include "server/softgpu/runtime/worker.h"

namespace gpupool::softgpu::runtime {
namespace {

constexpr int32_t kSpinBudgetAfterYield = 16;

void setBit(uint64_t* words, uint32_t bit) { words[bit / 64] |= uint64_t{1} << (bit % 64); }

// ---- barriers
// Threads that count as arrived when `expected` is explicit: hardware counts whole warps, and the exited
// lanes of a warp arrive with it.
uint32_t arrivedWithExited(const BlockContext& block, const Barrier& barrier) {
  uint32_t count = 0;
  for (uint32_t first = 0; first < block.threads; first += kWarpSize) {
    auto present = static_cast<uint32_t>(barrier.present[first / 64] >> (first % 64));
    if (present != 0)
      count += static_cast<uint32_t>(std::popcount(present | block.warps[first / kWarpSize].exited));
  }
  return count;
}

bool isComplete(const BlockContext& block, const Barrier& barrier) {
  if (barrier.arrived == 0) return false;
  if (barrier.expected == 0) return barrier.arrived >= block.live;
  if (barrier.arrived >= barrier.expected) return true;
  return block.live < block.threads && arrivedWithExited(block, barrier) >= barrier.expected;
}

void complete(BlockContext& block, Barrier& barrier) {
  for (uint32_t word = 0; word * 64 < block.threads; ++word) {
    block.ready[word] |= barrier.waiting[word];
    for (uint64_t bits = barrier.waiting[word]; barrier.count != 0 && bits != 0; bits &= bits - 1)
      block.lanes[word * 64 + static_cast<uint32_t>(std::countr_zero(bits))].result =
          uint64_t{barrier.arrived} << 32 | barrier.count;
    barrier.waiting[word] = barrier.present[word] = 0;
  }
  barrier.arrived = barrier.count = 0;
}

uint32_t barrierResult(BarrierOperation operation, uint64_t result) {
  auto count = static_cast<uint32_t>(result);
  switch (operation) {
    case BarrierOperation::countTrue:
      return count;
    case BarrierOperation::conjunction:
      return count == static_cast<uint32_t>(result >> 32) && count != 0;
    case BarrierOperation::disjunction:
      return count != 0;
    default:
      return 0;
  }
}

// ---- warps
uint64_t matchAny(const Lane* lanes, uint32_t members, uint64_t value) {
  uint32_t same = 0;
  for (uint32_t bits = members; bits != 0; bits &= bits - 1) {
    auto lane = static_cast<uint32_t>(std::countr_zero(bits));
    if (lanes[lane].value == value) same |= 1u << lane;
  }
  return same;
}

uint64_t reduce(const Lane* lanes, uint32_t members, WarpOperation operation) {
  auto result = static_cast<uint32_t>(lanes[std::countr_zero(members)].value);
  for (uint32_t bits = members & (members - 1); bits != 0; bits &= bits - 1) {
    auto value = static_cast<uint32_t>(lanes[std::countr_zero(bits)].value);
    switch (operation) {
      case WarpOperation::addition:
        result += value;
        break;
      case WarpOperation::minimum:
        result = std::min(result, value);
        break;
      case WarpOperation::maximum:
        result = std::max(result, value);
        break;
      case WarpOperation::minimumSigned:
        result = static_cast<uint32_t>(std::min(static_cast<int32_t>(result), static_cast<int32_t>(value)));
        break;
      case WarpOperation::maximumSigned:
        result = static_cast<uint32_t>(std::max(static_cast<int32_t>(result), static_cast<int32_t>(value)));
        break;
      case WarpOperation::conjunction:
        result &= value;
        break;
      case WarpOperation::disjunction:
        result |= value;
        break;
      default:
        result ^= value;
        break;
    }
  }
  return result;
}

// PTX ISA 9.7.9.6, shfl.sync: the source lane and whether it is in range.
void shuffle(Lane* lanes, uint32_t members, uint32_t self, WarpOperation operation) {
  Lane& mine = lanes[self];
  uint32_t clamp = mine.c & 31;
  uint32_t segment = (mine.c >> 8) & 31;
  uint32_t b = mine.b & 31;
  uint32_t maxLane = (self & segment) | (clamp & ~segment);
  uint32_t minLane = self & segment;
  int32_t from = 0;
  bool inRange = false;
  switch (operation) {
    case WarpOperation::up:
      from = static_cast<int32_t>(self) - static_cast<int32_t>(b);
      inRange = from >= static_cast<int32_t>(maxLane);
      break;
    case WarpOperation::down:
      from = static_cast<int32_t>(self + b);
      inRange = from <= static_cast<int32_t>(maxLane);
      break;
    case WarpOperation::butterfly:
      from = static_cast<int32_t>(self ^ b);
      inRange = from <= static_cast<int32_t>(maxLane);
      break;
    default:
      from = static_cast<int32_t>(minLane | (b & ~segment));
      inRange = from <= static_cast<int32_t>(maxLane);
      break;
  }
  if (!inRange) from = static_cast<int32_t>(self);
  mine.predicate = inRange;
  // Reading a lane that takes no part is undefined; its own value is the least surprising answer.
  bool present = ((members >> from) & 1) != 0;
  mine.result = present ? lanes[from].value : mine.value;
}

void completeWarp(Lane* lanes, uint32_t members) {
  auto shared = static_cast<WarpOperation>(lanes[std::countr_zero(members)].operation);
  if (shared == WarpOperation::multiply) return multiply(lanes, members);
  if (shared == WarpOperation::rows) return moveRows(lanes, members);
  for (uint32_t bits = members; bits != 0; bits &= bits - 1) {
    auto self = static_cast<uint32_t>(std::countr_zero(bits));
    Lane& lane = lanes[self];
    auto operation = static_cast<WarpOperation>(lane.operation);
    switch (operation) {
      case WarpOperation::sync:
        break;
      case WarpOperation::up:
      case WarpOperation::down:
      case WarpOperation::butterfly:
      case WarpOperation::index:
        shuffle(lanes, members, self, operation);
        break;
      case WarpOperation::all:
        lane.result = matchAny(lanes, members, 1) == members;
        break;
      case WarpOperation::any:
        lane.result = matchAny(lanes, members, 1) != 0;
        break;
      case WarpOperation::uniform:
        lane.result = matchAny(lanes, members, lane.value) == members;
        break;
      case WarpOperation::ballot:
        lane.result = matchAny(lanes, members, 1);
        break;
      case WarpOperation::matchAny:
        lane.result = matchAny(lanes, members, lane.value);
        break;
      case WarpOperation::matchAll:
        lane.predicate = matchAny(lanes, members, lane.value) == members;
        lane.result = lane.predicate != 0 ? members : 0;
        break;
      case WarpOperation::elect:
        lane.result = static_cast<uint32_t>(std::countr_zero(members));
        lane.predicate = lane.result == self;
        break;
      default:
        lane.result = reduce(lanes, members, operation);
        break;
    }
  }
}

// Whoever completes the group answers for all of it; the others take their results when they run again.
void releaseGroup(BlockContext& block, uint32_t warpIndex, uint32_t group) {
  Warp& warp = block.warps[warpIndex];
  uint32_t members = warp.groups[group].arrived;
  warp.groups[group] = warp.groups[--warp.groupCount];
  completeWarp(&block.lanes[size_t{warpIndex} * kWarpSize], members);
  block.ready[warpIndex / 2] |= uint64_t{members} << (warpIndex % 2 * 32);
}

}  // namespace

uint32_t barrier(ThreadContext* thread, uint32_t id, uint32_t count, uint32_t operationCode,
                 uint32_t predicate) {
  BlockContext& block = *thread->block;
  if (id >= kBarriers || count > kMaxThreads) faultInstruction();
  Barrier& barrier = block.barriers[id];
  auto operation = static_cast<BarrierOperation>(operationCode);
  uint32_t self = thread->linear;
  barrier.used = true;
  if (operation == BarrierOperation::sync && count == 0) {  // __syncthreads()
    barrier.expected = 0;
    if (++barrier.arrived >= block.live) {
      complete(block, barrier);
      return 0;
    }
    setBit(barrier.waiting, self);
    block.worker->leave(*fiberOf(thread));
    block.ready[self / 64] &= ~(uint64_t{1} << (self % 64));
    return 0;
  }
  barrier.expected = count;
  ++barrier.arrived;
  barrier.count += predicate != 0;
  setBit(barrier.present, self);
  Lane& lane = block.lanes[self];
  lane.result = 0;
  if (isComplete(block, barrier)) {
    uint64_t result = uint64_t{barrier.arrived} << 32 | barrier.count;
    complete(block, barrier);
    return barrierResult(operation, result);
  }
  if (operation == BarrierOperation::arrive) return 0;
  setBit(barrier.waiting, self);
  block.worker->leave(*fiberOf(thread));
  block.ready[self / 64] &= ~(uint64_t{1} << (self % 64));
  return barrierResult(operation, lane.result);
}

uint64_t warp(ThreadContext* thread, uint32_t operation, uint32_t mask, uint64_t value, uint32_t b,
              uint32_t c) {
  BlockContext& block = *thread->block;
  uint32_t self = thread->linear;
  uint32_t warpIndex = self / kWarpSize;
  Warp& warp = block.warps[warpIndex];
  uint32_t bit = 1u << (self % kWarpSize);
  Lane& lane = block.lanes[self];
  lane = {static_cast<uint8_t>(operation), mask, b, c, value, 0, 0};
  mask |= bit;
  uint32_t group = 0;
  while (group < warp.groupCount && warp.groups[group].mask != mask) ++group;
  if (group == warp.groupCount) warp.groups[warp.groupCount++] = {mask, 0};
  warp.groups[group].arrived |= bit;
  if ((mask & ~(warp.groups[group].arrived | warp.exited)) == 0) {
    releaseGroup(block, warpIndex, group);
  } else {
    block.worker->leave(*fiberOf(thread));
  }
  block.ready[self / 64] &= ~(uint64_t{1} << (self % 64));
  thread->warpPredicate = lane.predicate;
  return lane.result;
}

uint32_t activeMask(ThreadContext* thread, uint32_t site) {
  BlockContext& block = *thread->block;
  uint32_t self = thread->linear;
  Warp& warp = block.warps[self / kWarpSize];
  Lane& lane = block.lanes[self];
  lane.value = site;
  warp.waitingActive |= 1u << (self % kWarpSize);
  block.activePending = true;
  block.worker->leave(*fiberOf(thread));
  block.ready[self / 64] &= ~(uint64_t{1} << (self % 64));
  return static_cast<uint32_t>(lane.result);
}

bool releaseActive(BlockContext& block) {
  if (!block.activePending) return false;
  block.activePending = false;
  for (uint32_t index = 0; index * kWarpSize < block.threads; ++index) {
    Warp& warp = block.warps[index];
    Lane* lanes = &block.lanes[size_t{index} * kWarpSize];
    for (uint32_t bits = warp.waitingActive; bits != 0; bits &= bits - 1) {
      Lane& lane = lanes[std::countr_zero(bits)];
      lane.result = matchAny(lanes, warp.waitingActive, lane.value);
    }
    block.ready[index / 2] |= uint64_t{warp.waitingActive} << (index % 2 * 32);
    warp.waitingActive = 0;
  }
  return true;
}

void threadExit(ThreadContext* thread) {
  BlockContext& block = *thread->block;
  uint32_t warpIndex = thread->linear / kWarpSize;
  Warp& warp = block.warps[warpIndex];
  warp.exited |= 1u << (thread->linear % kWarpSize);
  --block.live;
  for (uint32_t group = 0; group < warp.groupCount;) {
    if ((warp.groups[group].mask & ~(warp.groups[group].arrived | warp.exited)) == 0)
      releaseGroup(block, warpIndex, group);
    else
      ++group;
  }
  for (Barrier& barrier : block.barriers)
    if (barrier.arrived != 0 && isComplete(block, barrier)) complete(block, barrier);
}

void spin(ThreadContext* thread) {
  thread->spinBudget = kSpinBudgetAfterYield;
  thread->block->worker->yield(*fiberOf(thread));
}

}  // namespace gpupool::softgpu::runtime
