#pragma once
// Every allocation of the application by address, of device and host memory. Answers pointer attributes, and
// tells the copy functions what kind of memory a pointer points to. Threads: any; readers share the lock.

#include <cstdint>
#include <map>
#include <shared_mutex>

#include "schema/cuda.h"

namespace gpupool::client {

struct Allocation {
  enum class Kind : uint8_t {
    device,      // cuMemAlloc and pools
    pinned,      // cuMemHostAlloc: one address on both sides
    managed,     // cuMemAllocManaged: the same, host-resident
    registered,  // cuMemHostRegister: the application's pages; the device has a mirror
    symbol,      // a module's global
    managedSymbol,
    mapped,  // a range the application mapped itself (virtual memory management)
  };
  uint64_t address = 0;
  size_t bytes = 0;
  Kind kind = Kind::device;
  int device = 0;
  CUcontext context = nullptr;
  unsigned flags = 0;
  uint64_t deviceAddress = 0;  // where the device sees it
  uint64_t bufferId = 0;
  CUmemoryPool pool = nullptr;
  // mapped: the devices (bits) that may read it and write it; everybody the other kinds.
  uint32_t readers = ~0u, writers = ~0u;
  int openedOn = -1;     // a handle of another process (cuIpcOpenMemHandle): the device that it was opened on
  bool ofGraph = false;  // lives as long as the graphs that hold it: freeing it gives nothing back
};

class Allocations {
 public:
  void add(Allocation allocation);
  bool remove(uint64_t address, Allocation* out = nullptr);
  // Of a mapping at `address`.
  void setAccess(uint64_t address, int device, bool reads, bool writes);
  // The allocation that holds `address`.
  bool find(uint64_t address, Allocation& out) const;
  // Every byte of [address, + bytes) is managed memory, of one allocation or of several side by side.
  bool isManaged(uint64_t address, size_t bytes) const;
  template <class F>
  void forEach(F&& f) const {
    std::shared_lock lock(mutex_);
    for (auto& [address, allocation] : byAddress_) f(allocation);
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, Allocation> byAddress_;
  uint64_t nextBufferId_ = 1;
};

Allocations& allocations();

}  // namespace gpupool::client
