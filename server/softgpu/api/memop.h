#pragma once
// Stream memory operations (driver manual: Stream Memory Operations).

#include <vector>

#include "server/softgpu/api/operation.h"

namespace gpupool::softgpu::api {

struct MemOpOperation : Operation {
  CUcontext context = nullptr;
  std::vector<CUstreamBatchMemOpParams> operations;
  unsigned flags = 0;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; }
  CUresult run(Context& context) const override;
};

// Known operations on addresses that exist and are aligned; CUDA_ERROR_INVALID_VALUE or NOT_SUPPORTED
// otherwise.
CUresult checkMemOps(const CUstreamBatchMemOpParams* operations, unsigned count);

}  // namespace gpupool::softgpu::api
