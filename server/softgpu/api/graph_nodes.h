#pragma once
// The content of graph nodes: an operation from the parameters an application gives, the same for new nodes,
// changed nodes and executable graphs.

#include "server/softgpu/api/copy.h"
#include "server/softgpu/api/event.h"
#include "server/softgpu/api/graph.h"
#include "server/softgpu/api/launch.h"
#include "server/softgpu/api/memop.h"

namespace gpupool::softgpu::api {

// `context` null: the current one.
CUresult makeKernel(const CUDA_KERNEL_NODE_PARAMS* parameters, OperationPtr& operation);
CUresult makeCopy(const CUDA_MEMCPY3D* parameters, CUcontext context, OperationPtr& operation);
CUresult makeMemset(const CUDA_MEMSET_NODE_PARAMS* parameters, CUcontext context, OperationPtr& operation);
CUresult makeHost(const CUDA_HOST_NODE_PARAMS* parameters, OperationPtr& operation);
CUresult makeChild(CUgraph graph, OperationPtr& operation);
CUresult makeEventRecord(CUevent event, OperationPtr& operation);
CUresult makeEventWait(CUevent event, OperationPtr& operation);
CUresult makeMemOps(const CUDA_BATCH_MEM_OP_NODE_PARAMS* parameters, OperationPtr& operation);
// Any of the above, as cuGraphAddNode describes them.
CUresult makeAny(CUgraphNodeParams* parameters, OperationPtr& operation);

CUDA_KERNEL_NODE_PARAMS fromV1(const CUDA_KERNEL_NODE_PARAMS_v1& parameters);

// The node and its operation as T; 1 if it is another kind of node.
template <class T>
CUresult nodeOperation(CUgraphNode handle, GraphNodePtr& node, const T*& operation) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  node = table<GraphNode>().find(handle);
  operation = node ? dynamic_cast<const T*>(node->operation.get()) : nullptr;
  return operation ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace gpupool::softgpu::api
