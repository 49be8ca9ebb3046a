#pragma once
// The software GPU's devices: their number, memory budget and attributes (driver manual: Device Management).
//
// Environment, read once at cuInit: GPUPOOL_SOFT_DEVICES=1..8, GPUPOOL_SOFT_MEMORY=<bytes>[KMG][iB] for each
// device, CUDA_VISIBLE_DEVICES (ordinals). GPUPOOL_SOFT_FAIL=<ordinal>:<launches>:<code>, for tests: in each
// process that device breaks with that CUresult at the kernel after so many (0:5:214: an uncorrectable memory
// error). GPUPOOL_SOFT_LOAD=waits, for tests: cuModuleLoad* keeps its context to itself until the device is
// idle, as drivers do now and then.

#include <atomic>
#include <memory>
#include <vector>

#include "server/softgpu/api/cuda_api.h"
#include "server/softgpu/api/heap.h"

namespace gpupool::softgpu::api {

struct Context;
struct MemoryPool;

inline constexpr int kMaxDevices = 8;
inline constexpr uint32_t kMultiprocessors = 4;
inline constexpr uint32_t kWarpSize = 32;
inline constexpr uint32_t kMaxThreadsPerBlock = 1024;
inline constexpr uint32_t kMaxThreadsPerMultiprocessor = 2048;
inline constexpr uint32_t kMaxBlocksPerMultiprocessor = 32;
inline constexpr uint32_t kSharedPerBlock = 48 << 10;
inline constexpr uint32_t kSharedPerBlockOptin = 227 << 10;
inline constexpr uint32_t kSharedPerMultiprocessor = 228 << 10;
inline constexpr uint32_t kReservedShared = 1 << 10;
inline constexpr uint32_t kComputeCapability = 90;
inline constexpr int kDriverVersion = 13000;

class Device {
 public:
  Device(int ordinal, int physical, uint64_t bytes);

  int ordinal() const { return ordinal_; }
  uint64_t totalBytes() const { return total_; }
  uint64_t freeBytes() const { return total_ - used_.load(); }
  const CUuuid& uuid() const { return uuid_; }
  int pciBus() const { return 1 + physical_; }
  std::string pciName() const;

  // The budget all kinds of device memory share; exact. False: out of memory.
  bool reserve(uint64_t bytes);
  void release(uint64_t bytes);

  VaHeap& heap() { return heap_; }  // cuMemAlloc, pools, arrays

  std::shared_ptr<Context> primary;  // one for the process's life; active or not
  std::shared_ptr<MemoryPool> defaultPool;
  std::shared_ptr<MemoryPool> pool() const { return std::atomic_load(&pool_); }
  void setPool(std::shared_ptr<MemoryPool> pool) { std::atomic_store(&pool_, std::move(pool)); }

 private:
  const int ordinal_, physical_;
  const uint64_t total_;
  std::atomic<uint64_t> used_{0};
  CUuuid uuid_{};
  VaHeap heap_;
  std::shared_ptr<MemoryPool> pool_;
};

// Module globals of all devices: apart from other memory, and one heap, so that their addresses depend on
// modules only, and not on which device a process has.
VaHeap& globalsHeap();

bool initialized();
const std::vector<std::unique_ptr<Device>>& devices();  // empty before cuInit
Device* findDevice(CUdevice device);                    // null: no such device, or not initialised
int deviceAttribute(const Device& device, CUdevice_attribute attribute, bool& known);

}  // namespace gpupool::softgpu::api
