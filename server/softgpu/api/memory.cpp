// Driver manual: Memory Management: device, pinned, registered and managed memory.
#include "server/softgpu/api/memory.h"

#include <sys/mman.h>

#include <mutex>

#include "server/softgpu/address_plan.h"
#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/graph_memory.h"
#include "server/softgpu/api/pool.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kPitchAlignment = 512;

uint64_t pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Anonymous memory, apart from the process's own, so that a wild host pointer faults in a kernel. Null on
// failure.
AllocationPtr mapHost(uint64_t bytes, Allocation::Kind kind, unsigned flags, Context& context) {
  static std::atomic<uint64_t> cursor{addressPlan().host};
  uint64_t size = pages(bytes);
  if (size < bytes) return nullptr;
  uint64_t hint = cursor.fetch_add(size + kPage);
  void* got =
      mmap(reinterpret_cast<void*>(hint), size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  auto allocation = std::make_shared<Allocation>();
  allocation->kind = kind;
  allocation->base = reinterpret_cast<uint64_t>(got);
  allocation->size = bytes;
  allocation->device = context.device;
  allocation->contextId = context.id;
  allocation->context = context.handle;
  allocation->flags = flags;
  markVisible(allocation->base, bytes);
  addresses().insert(allocation);
  return allocation;
}

CUresult allocate(CUdeviceptr* out, size_t bytes) {
  SOFT_CONTEXT(context);
  if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(forbidDuringCapture(*context));
  auto allocation =
      allocateDevice(context->deviceObject(), bytes, 0, Allocation::Kind::device, context.get());
  if (!allocation) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = allocation->base;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu;
using namespace gpupool::softgpu::api;
using Kind = Allocation::Kind;

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  SOFT_CONTEXT(context);
  if (free) *free = context->deviceObject().freeBytes();
  if (total) *total = context->deviceObject().totalBytes();
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) { return allocate(out, bytes); }

CUresult cuMemAllocPitch_v2(CUdeviceptr* out, size_t* pitch, size_t width, size_t height,
                            unsigned int element) {
  SOFT_CONTEXT(context);
  if (!out || !pitch || !width || !height) return CUDA_ERROR_INVALID_VALUE;
  if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
  size_t row = (width + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment;
  if (row < width || height > SIZE_MAX / row) return CUDA_ERROR_OUT_OF_MEMORY;
  SOFT_TRY(allocate(out, row * height));
  *pitch = row;
  return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  SOFT_CONTEXT(context);
  if (!address) return CUDA_SUCCESS;
  SOFT_TRY(forbidDuringCapture(*context));
  auto allocation = addresses().at(address);
  if (!allocation || allocation->host() || allocation->kind == Kind::mapped ||
      allocation->kind == Kind::global) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // As natively: free waits for the device that may still use the memory.
  auto owner = allocation->context ? table<Context>().find(allocation->context) : nullptr;
  if (owner && owner != context) owner->synchronize();
  SOFT_TRY(context->synchronize());
  if (allocation->kind == Kind::graph) return freeGraphMemory(address);
  if (allocation->kind == Kind::pool && allocation->freeing) return CUDA_ERROR_INVALID_VALUE;
  allocation = addresses().take(address);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  freeAllocation(*allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  SOFT_CONTEXT(context);
  auto allocation = addresses().find(address);
  if (!allocation) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = allocation->base;
  if (size) *size = allocation->size;
  return CUDA_SUCCESS;
}

CUresult cuMemAllocHost_v2(void** out, size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned int flags) {
  SOFT_CONTEXT(context);
  constexpr unsigned kKnown =
      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (!out || !bytes || (flags & ~kKnown)) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(forbidDuringCapture(*context));
  auto allocation = mapHost(bytes, Kind::pinned, flags | CU_MEMHOSTALLOC_DEVICEMAP, *context);
  if (!allocation) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<void*>(allocation->base);
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* pointer) {
  SOFT_CONTEXT(context);
  if (!pointer) return CUDA_SUCCESS;
  SOFT_TRY(forbidDuringCapture(*context));
  auto base = reinterpret_cast<uint64_t>(pointer);
  auto allocation = addresses().at(base);
  if (!allocation || allocation->kind != Kind::pinned) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(context->synchronize());
  allocation = addresses().take(base);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  freeAllocation(*allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  SOFT_CONTEXT(context);
  constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                              CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
  auto base = reinterpret_cast<uint64_t>(pointer);
  if (!pointer || !bytes || base + bytes < base || (flags & ~kKnown)) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_MEMHOSTREGISTER_IOMEMORY) return CUDA_ERROR_NOT_SUPPORTED;
  SOFT_TRY(forbidDuringCapture(*context));
  if (!addresses().overlapping(base, bytes).empty()) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  // Only memory that is there can be pinned: mincore knows without touching it.
  uint64_t first = base / kPage * kPage, last = pages(base + bytes);
  std::vector<unsigned char> resident((last - first) / kPage);
  if (mincore(reinterpret_cast<void*>(first), last - first, resident.data())) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = std::make_shared<Allocation>();
  allocation->kind = Kind::registered;
  allocation->base = base;
  allocation->size = bytes;
  allocation->device = context->device;
  allocation->contextId = context->id;
  allocation->context = context->handle;
  allocation->flags = flags | CU_MEMHOSTREGISTER_DEVICEMAP;
  markVisible(base, bytes);
  addresses().insert(allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void* pointer, size_t bytes, unsigned int flags) {
  return cuMemHostRegister_v2(pointer, bytes, flags);
}

CUresult cuMemHostUnregister(void* pointer) {
  SOFT_CONTEXT(context);
  if (!pointer) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(forbidDuringCapture(*context));
  auto base = reinterpret_cast<uint64_t>(pointer);
  auto allocation = addresses().at(base);
  if (!allocation || allocation->kind != Kind::registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  SOFT_TRY(context->synchronize());
  allocation = addresses().take(base);
  if (!allocation) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  freeAllocation(*allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* pointer, unsigned int flags) {
  SOFT_CONTEXT(context);
  if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
  auto address = reinterpret_cast<uint64_t>(pointer);
  auto allocation = addresses().find(address);
  if (!allocation || (!allocation->host() && allocation->kind != Kind::managed))
    return CUDA_ERROR_INVALID_VALUE;
  *out = address;
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int* flags, void* pointer) {
  SOFT_CONTEXT(context);
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  auto allocation = addresses().find(reinterpret_cast<uint64_t>(pointer));
  if (!allocation || !allocation->host()) return CUDA_ERROR_INVALID_VALUE;
  *flags = allocation->flags;
  return CUDA_SUCCESS;
}

CUresult cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned int flags) {
  SOFT_CONTEXT(context);
  if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(forbidDuringCapture(*context));
  auto allocation = mapHost(bytes, Kind::managed, flags, *context);
  if (!allocation) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = allocation->base;
  return CUDA_SUCCESS;
}
