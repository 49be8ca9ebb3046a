#pragma once
// The memory that the two sides of one connection share with each other. All methods: any thread.

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "transports/descriptor.h"
#include "transports/transport.h"

namespace gpupool::transport {

// More regions than this at once from one peer is an attack or a leak.
inline constexpr uint32_t kMaxRegions = 1u << 16;

// What this side shares. Ids are slots, reused with the next generation.
class LocalRegions {
 public:
  // {0, 0} if there are too many.
  Region add(std::shared_ptr<SharedMemory> memory);
  bool remove(Region region);
  // Null: never shared, or no longer.
  std::shared_ptr<SharedMemory> find(Region region) const;
  void clear();

 private:
  struct Slot {
    uint32_t generation = 1;
    std::shared_ptr<SharedMemory> memory;
  };
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;  // id - 1
  std::vector<uint32_t> free_;
};

// What the peer announced.
class RemoteRegions {
 public:
  struct Entry {
    uint32_t generation = 0;
    bool withdrawn = true;
    size_t size = 0;
    std::shared_ptr<Descriptor> descriptor;  // shm
    std::shared_ptr<SharedMemory> mapping;   // of this process, once somebody needed one
    std::optional<uint64_t> fileOffset;      // a file's: it is mapped at a fixed address only
  };

  // False: the announcement makes no sense (protocol violation).
  bool announce(Region region, size_t size, Descriptor descriptor, std::shared_ptr<SharedMemory> mapping,
                std::optional<uint64_t> fileOffset = {});
  bool withdraw(Region region);
  // Waits for the announcement. Empty: stale, never announced before the deadline, or stopped.
  std::optional<Entry> wait(Region region, Deadline deadline);
  // Keeps a mapping for later transfers, unless the region went away or has one (which is returned).
  std::shared_ptr<SharedMemory> remember(Region region, std::shared_ptr<SharedMemory> mapping);
  // Ends every wait, now and later, that would still have to wait.
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<uint32_t, Entry> entries_;
  bool stopped_ = false;
};

// [offset, offset + bytes) lies within a region of that size.
constexpr bool within(size_t size, uint64_t offset, size_t bytes) {
  return offset <= size && bytes <= size - offset;
}

}  // namespace gpupool::transport
