#pragma once
// Host functions: run on the stream's thread, no lock held. CUDA calls inside answer
// CUDA_ERROR_NOT_PERMITTED.

#include "server/softgpu/api/operation.h"

namespace gpupool::softgpu::api {

struct HostOperation : Operation {
  CUDA_HOST_NODE_PARAMS parameters{};
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_HOST; }
  CUresult run(Context& context) const override;
};

// Whether this thread is inside a host function.
bool& insideCallback();

}  // namespace gpupool::softgpu::api
