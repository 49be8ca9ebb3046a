// Nodes of graphs by the generic calls, whose parameters say what a node does; what each kind needs is in the
// file of its kind (graph_nodes.h). Rows that need nothing of the client (empty and event nodes,
// dependencies) are generated.
#include "client/calls/graph_nodes.h"

namespace gpupool::client {
namespace {

CUDA_MEMSET_NODE_PARAMS_v1 plain(const CUDA_MEMSET_NODE_PARAMS_v2& p) {
  return {p.dst, p.pitch, p.value, p.elementSize, p.width, p.height};
}
KernelParams plain(const CUDA_KERNEL_NODE_PARAMS_v3& p) {
  auto q = commonParams<KernelParams>(p);
  q.kern = p.kern;
  q.ctx = p.ctx;
  return q;
}

CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 plain(const CUDA_BATCH_MEM_OP_NODE_PARAMS_v2& p) {
  return {p.ctx, p.count, p.paramArray, p.flags};
}

CUresult addAny(CUgraphNode* out, const Place& place, CUgraphNodeParams* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (params->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      KernelParams kernel = plain(params->kernel);
      return addKernel(out, place, &kernel);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return addCopy(out, place, &params->memcpy.copyParams, params->memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      CUDA_MEMSET_NODE_PARAMS_v1 fill = plain(params->memset);
      return addMemset(out, place, &fill, params->memset.ctx);
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      CUDA_HOST_NODE_PARAMS_v1 host{params->host.fn, params->host.userData};
      return addHost(out, place, &host);
    }
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      if (params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE)
        return moveChild(out, place, params->graph.graph);
      if (params->graph.ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) return CUDA_ERROR_INVALID_VALUE;
      CUresult status = addChild(out, place, params->graph.graph);
      if (status != CUDA_SUCCESS) return status;
      return Generated<schema::RowOf<"cuGraphChildGraphNodeGetGraph">>::call(*out, &params->graph.graph);
    }
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return Generated<schema::RowOf<"cuGraphAddEmptyNode">>::call(out, place.graph, place.dependencies,
                                                                   place.count);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return Generated<schema::RowOf<"cuGraphAddEventWaitNode">>::call(out, place.graph, place.dependencies,
                                                                       place.count, params->eventWait.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return Generated<schema::RowOf<"cuGraphAddEventRecordNode">>::call(
          out, place.graph, place.dependencies, place.count, params->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
      CUDA_MEM_ALLOC_NODE_PARAMS_v1 allocation{params->alloc.poolProps, params->alloc.accessDescs,
                                               params->alloc.accessDescCount, params->alloc.bytesize, 0};
      CUresult status = addAllocation(out, place, &allocation);
      if (status == CUDA_SUCCESS) params->alloc.dptr = allocation.dptr;
      return status;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return addFree(out, place, params->free.dptr);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
      CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 operations = plain(params->memOp);
      return addMemoryOperations(out, place, &operations);
    }
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return addConditional(out, place, params->conditional);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;  // external semaphores
  }
}

// exec null: the node itself.
CUresult setAny(CUgraphExec exec, CUgraphNode node, const CUgraphNodeParams* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (params->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      KernelParams kernel = plain(params->kernel);
      return setKernel(exec, node, &kernel);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return exec != nullptr ? setExecCopy(exec, node, &params->memcpy.copyParams, params->memcpy.copyCtx)
                             : setCopy(node, &params->memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      CUDA_MEMSET_NODE_PARAMS_v1 fill = plain(params->memset);
      return exec != nullptr ? setExecMemset(exec, node, &fill, params->memset.ctx) : setMemset(node, &fill);
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      CUDA_HOST_NODE_PARAMS_v1 host{params->host.fn, params->host.userData};
      return setHost(exec, node, &host);
    }
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return exec != nullptr ? Generated<schema::RowOf<"cuGraphExecEventRecordNodeSetEvent">>::call(
                                   exec, node, params->eventRecord.event)
                             : Generated<schema::RowOf<"cuGraphEventRecordNodeSetEvent">>::call(
                                   node, params->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return exec != nullptr ? Generated<schema::RowOf<"cuGraphExecEventWaitNodeSetEvent">>::call(
                                   exec, node, params->eventWait.event)
                             : Generated<schema::RowOf<"cuGraphEventWaitNodeSetEvent">>::call(
                                   node, params->eventWait.event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
      CUDA_BATCH_MEM_OP_NODE_PARAMS_v1 operations = plain(params->memOp);
      return setMemoryOperations(exec, node, &operations);
    }
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return exec != nullptr ? custom::cuGraphExecChildGraphNodeSetParams(exec, node, params->graph.graph)
                             : CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

namespace custom {

CUresult cuGraphAddNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                        CUgraphNodeParams* p) {
  return addAny(out, {graph, before, n}, p);
}
CUresult cuGraphAddNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* before,
                           const CUgraphEdgeData* edges, size_t n, CUgraphNodeParams* p) {
  if (edges == nullptr || n == 0) return addAny(out, {graph, before, n}, p);
  if (before == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = addAny(out, {graph, nullptr, 0}, p);
  if (status != CUDA_SUCCESS) return status;
  std::vector<CUgraphNode> to(n, *out);
  status = Generated<schema::RowOf<"cuGraphAddDependencies_v2">>::call(
      graph, before, static_cast<const CUgraphNode*>(to.data()), edges, n);
  if (status == CUDA_SUCCESS) return status;
  custom::cuGraphDestroyNode(*out);
  *out = nullptr;
  return status;
}

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* p) { return setAny(nullptr, node, p); }
CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* p) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setAny(exec, node, p);
}

CUresult cuGraphDestroyNode(CUgraphNode node) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (node == nullptr) return CUDA_ERROR_INVALID_VALUE;
  status = Session::get().await<"cuGraphDestroyNode">(context->handle, node);
  if (status != CUDA_SUCCESS) return status;
  forgetNode(node);
  dropPlain(node);
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (type == nullptr) return CUDA_ERROR_INVALID_VALUE;
  status = Session::get().await<"cuGraphNodeGetType">(context->handle, node, type);
  auto info = status == CUDA_SUCCESS && *type == CU_GRAPH_NODE_TYPE_EMPTY ? recallNode(node) : nullptr;
  if (info != nullptr) *type = info->type;
  return status;
}

}  // namespace custom
}  // namespace gpupool::client
