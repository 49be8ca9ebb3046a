#pragma once
// Kernel launches (driver manual: Execution Control).

#include <vector>

#include "server/softgpu/api/module.h"
#include "server/softgpu/api/operation.h"

namespace gpupool::softgpu::api {

struct KernelOperation : Operation {
  FunctionPtr function;
  CUDA_KERNEL_NODE_PARAMS parameters{};  // as a graph node reports it; kernelParams points into `packed`
  std::vector<std::byte> packed;         // the parameter buffer
  std::vector<void*> pointers;           // to each parameter in it
  bool cooperative = false;
  int priority = 0;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_KERNEL; }
  CUresult run(Context& context) const override;
};

// Validates the shape against the function, copies the parameters. `context` resolves CUkernel handles.
CUresult makeKernelOperation(const ContextPtr& context, const CUDA_KERNEL_NODE_PARAMS& parameters,
                             bool cooperative, std::shared_ptr<KernelOperation>& operation);

}  // namespace gpupool::softgpu::api
