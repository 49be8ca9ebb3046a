#pragma once
// What every address means: the map of device memory, mapped physical memory, pinned and registered host
// memory and managed memory (driver manual: Memory Management, Unified Addressing). Device pointers are host
// addresses.
//
// Sizes in bytes. Any thread. Lifetimes: the map owns allocations; tasks in flight do not keep them alive, as
// on a GPU. unmapMutex() keeps copies from faulting: memory is taken away only under its exclusive lock, and
// a copy looks its range up again under the shared lock if anything was taken away since it was submitted.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "server/softgpu/api/context.h"

namespace gpupool::softgpu::api {

struct MemoryPool;
struct Physical;

struct Allocation {
  enum class Kind { device, pool, graph, mapped, pinned, registered, managed, global };
  Kind kind = Kind::device;
  uint64_t base = 0;
  uint64_t size = 0;
  int device = 0;
  uint64_t contextId = 0;  // freed with that context; 0: lives on its own
  CUcontext context = nullptr;
  unsigned flags = 0;
  uint64_t id = 0;                        // CU_POINTER_ATTRIBUTE_BUFFER_ID
  bool readable = true, writable = true;  // mapped memory: as cuMemSetAccess left it
  std::atomic<uint64_t> openTo{0};        // mapped memory: bit d, device d has some access
  bool syncMemops = false;
  std::shared_ptr<MemoryPool> pool;
  std::shared_ptr<Physical> physical;
  std::atomic<bool> freeing{false};  // pool memory with a free in its stream

  bool host() const { return kind == Kind::pinned || kind == Kind::registered; }
  bool contains(uint64_t address, uint64_t bytes) const {
    return address >= base && address - base <= size && bytes <= size - (address - base);
  }
};
using AllocationPtr = std::shared_ptr<Allocation>;

class AddressMap {
 public:
  void insert(const AllocationPtr& allocation);
  AllocationPtr find(uint64_t address) const;  // the one that contains it
  AllocationPtr at(uint64_t base) const;       // the one that starts there
  AllocationPtr take(uint64_t base);           // removes it
  std::vector<AllocationPtr> overlapping(uint64_t address, uint64_t bytes) const;
  std::vector<AllocationPtr> takeIf(const std::function<bool(const Allocation&)>& predicate);
  // Every byte belongs to some allocation that may be read (or written).
  bool covers(uint64_t address, uint64_t bytes, bool write) const;

 private:
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, AllocationPtr> byBase_;
};

AddressMap& addresses();
std::shared_mutex& unmapMutex();
std::atomic<uint64_t>& unmapGeneration();

// Device memory from the device's budget and heap, entered in the map. Null: out of memory.
AllocationPtr allocateDevice(Device& device, uint64_t bytes, uint64_t alignment, Allocation::Kind kind,
                             Context* owner);
// Takes memory of any kind but `mapped` away at once. The caller removed it from the map.
void freeAllocation(Allocation& allocation);

// The bytes [address, address + bytes) as this context may use them; CUDA_ERROR_INVALID_VALUE otherwise.
CUresult checkDeviceRange(uint64_t address, uint64_t bytes, bool write);
// Not known to the driver: pageable host memory.
bool isPageable(uint64_t address);

}  // namespace gpupool::softgpu::api
