#pragma once
// Device memory is the client's to place (docs/design.md): each device owns a window of addresses; extents of
// physical memory are mapped into it by the worker, and blocks are handed out of extents here, without the
// wire.
//
// Blocks are multiples of 512 bytes. Small requests share 64 MiB extents, large ones get an extent of their
// own. Extents that became free are kept up to kCacheBytes (of a small lease less) until nothing was freed
// for kKeepTime, and given back when memory runs out: natively other processes can have at once what one has
// freed. An allocation for which there is no room waits for what others may be keeping: for a little more
// than kKeepTime, not in a protected program, and not for 10 s after it was in vain. A memory pool that
// allocates holds its mutex meanwhile. Threads: any; one mutex per device, held while a new extent is
// awaited, so that two threads do not map the same memory twice.

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "schema/cuda.h"

namespace gpupool::client {

class DeviceMemory {
 public:
  static constexpr size_t kGranularity = 512;
  static constexpr size_t kExtentUnit = size_t{2} << 20;
  static constexpr size_t kSharedExtent = size_t{64} << 20;  // of small blocks, at most
  static constexpr size_t kCacheBytes = size_t{512} << 20;
  static constexpr std::chrono::milliseconds kKeepTime{250};

  // context: the one whose device this is; the worker maps in it.
  CUresult allocate(CUcontext context, size_t bytes, uint64_t& address);
  void release(CUcontext context, uint64_t address);
  // Gives fully free extents back until at most `keep` bytes of them remain.
  void trim(CUcontext context, size_t keep);
  // The context was reset: the worker's memory is given back.
  void reset(CUcontext context);
  // By what this process knows itself.
  void info(size_t& freeBytes, size_t& totalBytes) const;
  // The same less what the lease's other sessions have, of which the worker is asked.
  CUresult leaseInfo(CUcontext context, size_t& freeBytes, size_t& totalBytes) const;
  // Physical memory the application manages itself (cuMemCreate): counted against the limit, mapped
  // elsewhere.
  CUresult charge(CUcontext context, size_t bytes);
  void release(size_t bytes);
  // A range of the window for the application's own mappings; no physical memory. 0: no room.
  uint64_t reserveAddresses(size_t bytes, size_t alignment);
  void releaseAddresses(uint64_t address, size_t bytes);

  void start(CUdevice device, uint64_t window, uint64_t windowBytes, uint64_t limit);

 private:
  struct Extent {
    size_t bytes = 0;
    size_t used = 0;
  };
  using Clock = std::chrono::steady_clock;
  CUresult tryAllocate(CUcontext context, size_t bytes, uint64_t& address);
  bool othersMayKeep(CUcontext context, size_t bytes) const;
  CUresult grow(CUcontext context, size_t bytes);
  uint64_t takeFree(size_t bytes);
  void addFree(uint64_t address, size_t bytes);
  size_t trimLocked(CUcontext context, size_t keep);  // what remains
  void trimLater();
  void trimWhenIdle();
  void trimAll();
  std::map<uint64_t, Extent>::iterator extentOf(uint64_t address);

  mutable std::mutex mutex_;
  Clock::time_point freed_;     // when something was freed last
  bool waiting_ = false;        // a thread waits until that is kKeepTime ago
  Clock::time_point notAgain_;  // until then an allocation does not wait for others: the last one did in vain
  // The last one for small blocks; the next has twice as much. What is free in it no large block can have.
  size_t sharedExtent_ = 0;
  CUdevice device_ = 0;  // the application's number, as everywhere but in frames (client/devices.h)
  uint64_t limit_ = 0;
  size_t mapped_ = 0;                     // bytes of extents
  size_t used_ = 0;                       // bytes of blocks handed out
  size_t charged_ = 0;                    // bytes of cuMemCreate
  std::map<uint64_t, size_t> addresses_;  // unused parts of the window
  std::map<uint64_t, Extent> extents_;
  std::map<uint64_t, size_t> blocks_;  // handed out
  std::map<uint64_t, size_t> free_;    // by address; never spans extents
  std::set<std::pair<size_t, uint64_t>> freeBySize_;
};

DeviceMemory& deviceMemory(CUdevice device);
void startDeviceMemory();

}  // namespace gpupool::client
