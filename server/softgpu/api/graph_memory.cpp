// Driver manual: graph memory nodes.
#include "server/softgpu/api/graph_memory.h"

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/pool.h"

namespace gpupool::softgpu::api {
namespace {

// Addresses of graph allocations; `live` ones are kept alive here, whatever happens to their graphs.
struct Registry {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<GraphMemory>> known;
  std::map<uint64_t, std::shared_ptr<GraphMemory>> live;
  std::atomic<uint64_t> used[kMaxDevices] = {}, high[kMaxDevices] = {};
};
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

std::shared_ptr<GraphMemory> findMemory(uint64_t address) {
  std::lock_guard lock(registry().mutex);
  auto found = registry().known.find(address);
  return found == registry().known.end() ? nullptr : found->second.lock();
}

}  // namespace

GraphMemory::~GraphMemory() {
  if (!allocation) return;
  auto& all = registry();
  {
    std::lock_guard lock(all.mutex);
    all.known.erase(allocation->base);
  }
  all.used[device] -= allocation->size;
  if (addresses().take(allocation->base)) freeAllocation(*allocation);
}

void setGraphMemoryLive(const std::shared_ptr<GraphMemory>& memory, bool live) {
  std::shared_ptr<GraphMemory> dropped;
  std::lock_guard lock(registry().mutex);
  memory->live = live;
  auto& entry = registry().live[memory->allocation->base];
  dropped.swap(entry);
  if (live) {
    entry = memory;
  } else {
    registry().live.erase(memory->allocation->base);
  }
}

CUresult AllocOperation::run(Context&) const { return CUDA_SUCCESS; }

CUresult FreeOperation::run(Context&) const { return CUDA_SUCCESS; }

CUresult makeAllocOperation(int device, uint64_t bytes, std::shared_ptr<AllocOperation>& out) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  auto operation = std::make_shared<AllocOperation>();
  operation->memory = std::make_shared<GraphMemory>();
  operation->memory->device = device;
  auto allocation = allocateDevice(*devices()[size_t(device)], bytes, 0, Allocation::Kind::graph, nullptr);
  if (!allocation) return CUDA_ERROR_OUT_OF_MEMORY;
  operation->memory->allocation = allocation;
  operation->parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  operation->parameters.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  operation->parameters.bytesize = bytes;
  operation->parameters.dptr = allocation->base;
  auto& all = registry();
  uint64_t now = all.used[device] += bytes;
  if (now > all.high[device]) all.high[device] = now;
  std::lock_guard lock(all.mutex);
  all.known[allocation->base] = operation->memory;
  out = operation;
  return CUDA_SUCCESS;
}

CUresult makeFreeOperation(CUdeviceptr address, std::shared_ptr<FreeOperation>& out) {
  auto memory = findMemory(address);
  if (!memory || memory->freed.exchange(true)) return CUDA_ERROR_INVALID_VALUE;
  out = std::make_shared<FreeOperation>();
  out->memory = memory;
  out->address = address;
  return CUDA_SUCCESS;
}

CUresult captureAllocation(Stream& stream, int device, uint64_t bytes, CUdeviceptr* out) {
  std::shared_ptr<AllocOperation> operation;
  SOFT_TRY(makeAllocOperation(device, bytes, operation));
  SOFT_TRY(submitOperation(stream, operation, Submit::asynchronous));
  *out = operation->parameters.dptr;
  return CUDA_SUCCESS;
}

CUresult captureFree(Stream& stream, CUdeviceptr address) {
  std::shared_ptr<FreeOperation> operation;
  SOFT_TRY(makeFreeOperation(address, operation));
  return submitOperation(stream, operation, Submit::asynchronous);
}

CUresult freeGraphMemory(CUdeviceptr address) {
  auto memory = findMemory(address);
  if (!memory || !memory->live) return CUDA_ERROR_INVALID_VALUE;
  setGraphMemoryLive(memory, false);
  return CUDA_SUCCESS;
}

uint64_t graphMemoryUsed(int device, bool high) {
  return high ? registry().high[device].load() : registry().used[device].load();
}

void resetGraphMemoryHigh(int device) { registry().high[device] = registry().used[device].load(); }

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuDeviceGraphMemTrim(CUdevice device) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  return findDevice(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void* value) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (!value || attribute > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) return CUDA_ERROR_INVALID_VALUE;
  bool high =
      attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
  *static_cast<uint64_t*>(value) = graphMemoryUsed(device, high);
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void* value) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  bool high =
      attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
  if (!value || !high || *static_cast<uint64_t*>(value)) return CUDA_ERROR_INVALID_VALUE;
  resetGraphMemoryHigh(device);
  return CUDA_SUCCESS;
}
