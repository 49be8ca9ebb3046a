#include "server/softgpu/runtime/function_slots.h"

#include <sys/mman.h>

#include <mutex>
#include <vector>

#include "base/reserve.h"
#include "server/softgpu/address_plan.h"

namespace gpupool::softgpu::runtime {
namespace {

constexpr size_t kSlots = 1 << 20;

struct Table {
  FunctionSlot* slots = nullptr;
  size_t used = 0;
  std::vector<FunctionSlot*> freed;
  std::mutex mutex;

  Table() {
    constexpr size_t kBytes = kSlots * sizeof(FunctionSlot);
    const uint64_t planned = addressPlan().functions;
    // Reserved first: elsewhere only if something else lies there.
    void* hint = reserveAt(planned, kBytes) ? reinterpret_cast<void*>(planned) : nullptr;
    void* memory =
        mmap(hint, kBytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (hint != nullptr ? MAP_FIXED : 0), -1, 0);
    if (memory != MAP_FAILED) slots = static_cast<FunctionSlot*>(memory);
  }
};

Table& table() {
  static Table* instance = new Table;
  return *instance;
}

}  // namespace

FunctionSlot* newFunctionSlot() {
  Table& all = table();
  std::lock_guard lock(all.mutex);
  if (!all.freed.empty()) {
    FunctionSlot* slot = all.freed.back();
    all.freed.pop_back();
    return slot;
  }
  if (all.slots == nullptr || all.used == kSlots) return nullptr;
  return &all.slots[all.used++];
}

void freeFunctionSlot(FunctionSlot* slot) {
  Table& all = table();
  std::lock_guard lock(all.mutex);
  slot->code = nullptr;
  all.freed.push_back(slot);
}

void* codeOfFunction(uint64_t value) {
  Table& all = table();
  auto base = reinterpret_cast<uint64_t>(all.slots);
  if (value < base || value >= base + kSlots * sizeof(FunctionSlot) || value % sizeof(FunctionSlot) != 0)
    return nullptr;
  return reinterpret_cast<FunctionSlot*>(value)->code;
}

}  // namespace gpupool::softgpu::runtime
