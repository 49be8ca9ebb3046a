#pragma once
// A piece of address space handed out in blocks, committed page by page. No accounting: that is Device's
// budget.

#include <cstdint>
#include <map>
#include <mutex>
#include <set>

namespace gpupool::softgpu::api {

class VaHeap {
 public:
  // Reserves `bytes` at `hint`, or anywhere if that is taken.
  VaHeap(uint64_t hint, uint64_t bytes);

  // A block of `bytes`, readable and writable; 0 if address space or memory for page tables is out. Any
  // thread.
  uint64_t allocate(uint64_t bytes, uint64_t alignment);
  // Gives it back, its pages to the system. `bytes` as asked for.
  void free(uint64_t address, uint64_t bytes);

  uint64_t base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

  static uint64_t rounded(uint64_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }
  static constexpr uint64_t kGrain = 512;

 private:
  void insertFree(uint64_t address, uint64_t bytes);
  void eraseFree(std::map<uint64_t, uint64_t>::iterator block);
  void decommit(uint64_t address, uint64_t bytes);

  uint64_t base_ = 0, bytes_ = 0;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;               // address -> bytes, coalesced
  std::set<std::pair<uint64_t, uint64_t>> bySize_;  // (bytes, address)
};

// Reserves address space PROT_NONE: at `hint` exactly if it is free, else near it; 0 if there is none.
uint64_t reserveAddresses(uint64_t hint, uint64_t bytes, bool exactly);

}  // namespace gpupool::softgpu::api
