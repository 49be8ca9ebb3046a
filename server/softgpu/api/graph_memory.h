#pragma once
// Memory nodes of graphs (driver manual: cuGraphAddMemAllocNode). The address belongs to the node for its
// life and its memory is charged for as long; a launch makes it live, a free node or cuMemFreeAsync makes it
// dead.

#include <memory>

#include "server/softgpu/api/graph.h"
#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {

// The memory of one allocation node, shared by clones and executable graphs of it.
struct GraphMemory {
  AllocationPtr allocation;
  int device = 0;
  std::atomic<bool> live{false};
  std::atomic<bool> freed{false};  // a free node for it exists
  ~GraphMemory();
};

struct AllocOperation : Operation {
  std::shared_ptr<GraphMemory> memory;
  CUDA_MEM_ALLOC_NODE_PARAMS parameters{};
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_MEM_ALLOC; }
  CUresult run(Context& context) const override;
};

struct FreeOperation : Operation {
  std::shared_ptr<GraphMemory> memory;
  CUdeviceptr address = 0;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_MEM_FREE; }
  CUresult run(Context& context) const override;
};

CUresult makeAllocOperation(int device, uint64_t bytes, std::shared_ptr<AllocOperation>& operation);
CUresult makeFreeOperation(CUdeviceptr address, std::shared_ptr<FreeOperation>& operation);

CUresult captureAllocation(Stream& stream, int device, uint64_t bytes, CUdeviceptr* out);
CUresult captureFree(Stream& stream, CUdeviceptr address);
// cuMemFreeAsync and cuMemFree of an address that a launched graph left allocated.
CUresult freeGraphMemory(CUdeviceptr address);
// At the launch of a graph without a free node for it: allocated until freed, even if the graph goes.
void setGraphMemoryLive(const std::shared_ptr<GraphMemory>& memory, bool live);
uint64_t graphMemoryUsed(int device, bool high);
void resetGraphMemoryHigh(int device);

}  // namespace gpupool::softgpu::api
