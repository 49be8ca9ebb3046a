#pragma once
// Nodes of graphs, by what they do. The generic calls (cuGraphAddNode, cuGraphNodeSetParams) are made of
// these.

#include "client/entry.h"
#include "client/graphs.h"

namespace gpupool::client {

// Where a node goes: its graph and the nodes it depends on.
struct Place {
  CUgraph graph;
  const CUgraphNode* dependencies;
  size_t count;
  bool valid() const { return graph != nullptr && (count == 0 || dependencies != nullptr); }
};

// The calling thread's context; null, and why in `status`.
inline Context* currentContext(CUresult& status) {
  Context* context = nullptr;
  status = contexts().resolve(nullptr, &context);
  return status == CUDA_SUCCESS ? context : nullptr;
}

// Mints a node, lets `send` create it and gives it to the caller.
template <class Send>
CUresult createNode(CUgraphNode* out, const Place& place, Send&& send) {
  if (out == nullptr || !place.valid()) return CUDA_ERROR_INVALID_VALUE;
  auto node = mintPlain<CUgraphNode>();
  if (node == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult status = send(node);
  if (status == CUDA_SUCCESS)
    *out = node;
  else
    dropPlain(node);
  return status;
}

// In the functions that set, exec null means the node itself.

// ---- kernels (graph_kernels.cpp)
using KernelParams = CUDA_KERNEL_NODE_PARAMS_v2;
// What every version of a kernel node's parameters has.
template <class To, class From>
To commonParams(const From& p) {
  To q{};
  q.func = p.func;
  q.gridDimX = p.gridDimX, q.gridDimY = p.gridDimY, q.gridDimZ = p.gridDimZ;
  q.blockDimX = p.blockDimX, q.blockDimY = p.blockDimY, q.blockDimZ = p.blockDimZ;
  q.sharedMemBytes = p.sharedMemBytes;
  q.kernelParams = p.kernelParams;
  q.extra = p.extra;
  return q;
}
CUresult addKernel(CUgraphNode* out, const Place& place, const KernelParams* params);
CUresult setKernel(CUgraphExec exec, CUgraphNode node, const KernelParams* params);

// ---- copies and memsets (graph_copies.cpp)
CUresult addCopy(CUgraphNode* out, const Place& place, const CUDA_MEMCPY3D_v2* params, CUcontext context);
CUresult setCopy(CUgraphNode node, const CUDA_MEMCPY3D_v2* params);
CUresult setExecCopy(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D_v2* params, CUcontext context);
CUresult addMemset(CUgraphNode* out, const Place& place, const CUDA_MEMSET_NODE_PARAMS_v1* params,
                   CUcontext context);
CUresult setMemset(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS_v1* params);
CUresult setExecMemset(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS_v1* params,
                       CUcontext context);

// ---- host functions (graph_host_functions.cpp)
CUresult addHost(CUgraphNode* out, const Place& place, const CUDA_HOST_NODE_PARAMS_v1* params);
CUresult setHost(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS_v1* params);

// ---- graphs inside graphs (graph_inner.cpp)
CUresult addChild(CUgraphNode* out, const Place& place, CUgraph child);
// CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE: the graph itself becomes the node's.
CUresult moveChild(CUgraphNode* out, const Place& place, CUgraph child);
CUresult addConditional(CUgraphNode* out, const Place& place, CUDA_CONDITIONAL_NODE_PARAMS& params);

// ---- stream memory operations (graph_memory_operations.cpp)
CUresult addMemoryOperations(CUgraphNode* out, const Place& place,
                             const CUDA_BATCH_MEM_OP_NODE_PARAMS_v1* params);
CUresult setMemoryOperations(CUgraphExec exec, CUgraphNode node,
                             const CUDA_BATCH_MEM_OP_NODE_PARAMS_v1* params);

// ---- memory of graphs (graph_allocations.cpp)
CUresult addAllocation(CUgraphNode* out, const Place& place, CUDA_MEM_ALLOC_NODE_PARAMS_v1* params);
CUresult addFree(CUgraphNode* out, const Place& place, CUdeviceptr address);

}  // namespace gpupool::client
