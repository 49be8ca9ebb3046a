#pragma once
// How the opaque handles of an application look, here and on the wire.
//
// The client mints every handle that only API calls see; the worker keys its tables by the same value. A
// handle looks like an address (47 bits, 16-byte aligned) because programs hash, align and tag them as
// addresses, but never is one:
//
//   bit 46      always 1
//   bits 40-45  kind
//   bits 28-39  generation, counts the reuses of an index
//   bits  4-27  index, from 1
//   bits  0-3   zero
//
// The values 0, 1 and 2 that CUDA gives to its special streams are no handles. No state, any thread.

#include <cstdint>

namespace gpupool::handles {

enum class Kind : uint8_t {
  none = 0,
  context = 1,
  stream = 2,
  event = 3,
  module = 4,
  library = 5,
  kernel = 6,
  function = 7,
  graph = 8,
  graphNode = 9,
  graphExec = 10,
  array = 11,
  mipmap = 12,
  memPool = 13,
  memAllocation = 14,  // CUmemGenericAllocationHandle
  externalMemory = 15,
  externalSemaphore = 16,
  linkState = 17,
  textureReference = 18,
  surfaceReference = 19,
  userObject = 20,
  greenContext = 21,
  asyncCallback = 22,
  logsCallback = 23,
  graphicsResource = 24,
  resourceDescription = 25,  // CUdevResourceDesc
};
inline constexpr unsigned kKindCount = 26;

inline constexpr uint64_t kHandleBit = uint64_t{1} << 46;
inline constexpr unsigned kIndexBits = 24, kGenerationBits = 12, kKindBits = 6;
inline constexpr uint32_t kMaxIndex = (uint32_t{1} << kIndexBits) - 1;
inline constexpr uint32_t kMaxGeneration = (uint32_t{1} << kGenerationBits) - 1;

constexpr uint64_t makeHandle(Kind kind, uint32_t index, uint32_t generation) {
  return kHandleBit | uint64_t{static_cast<uint8_t>(kind)} << 40 |
         uint64_t{generation & kMaxGeneration} << 28 | uint64_t{index & kMaxIndex} << 4;
}

// Kind::none for anything that makeHandle cannot have returned.
constexpr Kind kindOf(uint64_t handle) {
  const uint64_t kind = handle >> 40 & ((1u << kKindBits) - 1);
  if (handle >> 46 != 1 || (handle & 15) != 0 || kind >= kKindCount) return Kind::none;
  return static_cast<Kind>(kind);
}
constexpr uint32_t indexOf(uint64_t handle) { return handle >> 4 & kMaxIndex; }
constexpr uint32_t generationOf(uint64_t handle) { return handle >> 28 & kMaxGeneration; }

static_assert(kindOf(makeHandle(Kind::stream, 7, 3)) == Kind::stream);
static_assert(indexOf(makeHandle(Kind::stream, kMaxIndex, 3)) == kMaxIndex);
static_assert(generationOf(makeHandle(Kind::stream, 7, kMaxGeneration)) == kMaxGeneration);
static_assert(kindOf(0) == Kind::none && kindOf(2) == Kind::none);

}  // namespace gpupool::handles
