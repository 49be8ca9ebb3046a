// The values behind conditional graph nodes: a fixed table, so that a kernel sets one without a lock.
#include <atomic>
#include <mutex>
#include <vector>

#include "server/softgpu/engine.h"

namespace gpupool::softgpu {
namespace {

constexpr uint32_t kConditions = 1 << 16;

// Upper half: which use of the slot its handle names; lower half: the value.
std::atomic<uint64_t> slots[kConditions];

struct Free {
  std::mutex mutex;
  std::vector<uint32_t> indices;  // used before
  uint32_t fresh = 0;             // from here on, never used
};
Free& unused() {
  static auto* const instance = new Free;
  return *instance;
}

// handle = use << 32 | index + 1
std::atomic<uint64_t>* slotOf(uint64_t handle) {
  const auto index = static_cast<uint32_t>(handle) - 1;
  return index < kConditions ? &slots[index] : nullptr;
}
bool names(uint64_t handle, uint64_t state) { return handle >> 32 == state >> 32; }

}  // namespace

uint64_t createCondition() {
  std::lock_guard lock(unused().mutex);
  uint32_t index = 0;
  if (!unused().indices.empty()) {
    index = unused().indices.back();
    unused().indices.pop_back();
  } else if (unused().fresh < kConditions) {
    index = unused().fresh++;
  } else {
    return 0;
  }
  const uint64_t use = slots[index].load() >> 32;
  slots[index].store(use << 32);
  return use << 32 | (index + 1);
}

void destroyCondition(uint64_t handle) {
  std::lock_guard lock(unused().mutex);
  std::atomic<uint64_t>* slot = slotOf(handle);
  if (slot == nullptr || !names(handle, *slot)) return;
  slot->store(((handle >> 32) + 1) << 32);
  unused().indices.push_back(static_cast<uint32_t>(handle) - 1);
}

void setCondition(uint64_t handle, uint32_t value) {
  std::atomic<uint64_t>* slot = slotOf(handle);
  if (slot == nullptr) return;
  uint64_t state = slot->load();
  while (names(handle, state) && !slot->compare_exchange_weak(state, handle >> 32 << 32 | value)) {
  }
}

uint32_t conditionValue(uint64_t handle) {
  std::atomic<uint64_t>* slot = slotOf(handle);
  if (slot == nullptr) return 0;
  const uint64_t state = *slot;
  return names(handle, state) ? static_cast<uint32_t>(state) : 0;
}

}  // namespace gpupool::softgpu
