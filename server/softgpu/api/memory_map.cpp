// The address map and device allocations of memory.h.
#include <sys/mman.h>

#include <mutex>

#include "server/softgpu/api/memory.h"
#include "server/softgpu/api/pool.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {
namespace {

std::atomic<uint64_t> nextBufferId{1};

}  // namespace

AddressMap& addresses() {
  static auto* const map = new AddressMap;
  return *map;
}
std::shared_mutex& unmapMutex() {
  static auto* const mutex = new std::shared_mutex;
  return *mutex;
}
std::atomic<uint64_t>& unmapGeneration() {
  static auto* const generation = new std::atomic<uint64_t>(0);
  return *generation;
}

void AddressMap::insert(const AllocationPtr& allocation) {
  if (!allocation->id) allocation->id = nextBufferId++;
  std::unique_lock lock(mutex_);
  byBase_[allocation->base] = allocation;
}

AllocationPtr AddressMap::find(uint64_t address) const {
  std::shared_lock lock(mutex_);
  auto after = byBase_.upper_bound(address);
  if (after == byBase_.begin()) return nullptr;
  auto& candidate = std::prev(after)->second;
  return address - candidate->base < candidate->size ? candidate : nullptr;
}

AllocationPtr AddressMap::at(uint64_t base) const {
  std::shared_lock lock(mutex_);
  auto found = byBase_.find(base);
  return found == byBase_.end() ? nullptr : found->second;
}

AllocationPtr AddressMap::take(uint64_t base) {
  std::unique_lock lock(mutex_);
  auto found = byBase_.find(base);
  if (found == byBase_.end()) return nullptr;
  auto taken = found->second;
  byBase_.erase(found);
  return taken;
}

std::vector<AllocationPtr> AddressMap::overlapping(uint64_t address, uint64_t bytes) const {
  std::vector<AllocationPtr> found;
  std::shared_lock lock(mutex_);
  auto i = byBase_.upper_bound(address);
  if (i != byBase_.begin()) --i;
  for (; i != byBase_.end() && i->first < address + bytes; ++i) {
    if (i->first + i->second->size > address) found.push_back(i->second);
  }
  return found;
}

std::vector<AllocationPtr> AddressMap::takeIf(const std::function<bool(const Allocation&)>& predicate) {
  std::vector<AllocationPtr> taken;
  std::unique_lock lock(mutex_);
  for (auto i = byBase_.begin(); i != byBase_.end();) {
    if (predicate(*i->second)) {
      taken.push_back(i->second);
      i = byBase_.erase(i);
    } else {
      ++i;
    }
  }
  return taken;
}

bool AddressMap::covers(uint64_t address, uint64_t bytes, bool write) const {
  if (address + bytes < address) return false;
  std::shared_lock lock(mutex_);
  auto i = byBase_.upper_bound(address);
  if (i == byBase_.begin()) return false;
  --i;
  const uint64_t end = address + bytes;
  while (true) {
    const Allocation& piece = *i->second;
    if (address < piece.base || address - piece.base >= piece.size) return false;
    if (write ? !piece.writable : !piece.readable) return false;
    address = piece.base + piece.size;
    if (address >= end) return true;
    if (++i == byBase_.end()) return false;
  }
}

AllocationPtr allocateDevice(Device& device, uint64_t bytes, uint64_t alignment, Allocation::Kind kind,
                             Context* owner) {
  uint64_t charged = VaHeap::rounded(bytes);
  if (charged < bytes) return nullptr;
  if (!device.reserve(charged)) {
    trimPools(device.ordinal());
    if (!device.reserve(charged)) return nullptr;
  }
  VaHeap& heap = kind == Allocation::Kind::global ? globalsHeap() : device.heap();
  uint64_t base = heap.allocate(bytes, alignment);
  if (!base) {
    device.release(charged);
    return nullptr;
  }
  auto allocation = std::make_shared<Allocation>();
  allocation->kind = kind;
  allocation->base = base;
  allocation->size = bytes;
  allocation->device = device.ordinal();
  if (owner) {
    allocation->contextId = owner->id;
    allocation->context = owner->handle;
  }
  addresses().insert(allocation);
  return allocation;
}

void freeAllocation(Allocation& allocation) {
  using Kind = Allocation::Kind;
  std::unique_lock lock(unmapMutex());
  ++unmapGeneration();
  switch (allocation.kind) {
    case Kind::registered:
      unmarkVisible(allocation.base, allocation.size);
      break;
    case Kind::pinned:
    case Kind::managed:
      unmarkVisible(allocation.base, allocation.size);
      munmap(reinterpret_cast<void*>(allocation.base), (allocation.size + 4095) / 4096 * 4096);
      break;
    case Kind::mapped:
      break;  // cuMemUnmap
    case Kind::pool:
      if (allocation.pool && allocation.pool->keep(allocation.base, VaHeap::rounded(allocation.size))) break;
      [[fallthrough]];
    default: {
      Device& device = *devices()[size_t(allocation.device)];
      VaHeap& heap = allocation.kind == Kind::global ? globalsHeap() : device.heap();
      heap.free(allocation.base, allocation.size);
      device.release(VaHeap::rounded(allocation.size));
    }
  }
}

CUresult checkDeviceRange(uint64_t address, uint64_t bytes, bool write) {
  return addresses().covers(address, bytes, write) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool isPageable(uint64_t address) { return !addresses().find(address); }

void releaseMemory(Context& context) {
  const uint64_t id = context.id;
  for (auto& allocation : addresses().takeIf([&](const Allocation& a) { return id && a.contextId == id; })) {
    freeAllocation(*allocation);
  }
}

}  // namespace gpupool::softgpu::api
