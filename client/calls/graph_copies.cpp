// Copy and memset nodes of graphs.
#include "client/calls/graph_nodes.h"
#include "client/memory/registered.h"

namespace gpupool::client {
namespace {

struct CopyNode {
  CUDA_MEMCPY3D_v2 copy{};
  CUcontext context = nullptr;
  std::vector<GraphHold> holds;
  std::shared_ptr<NodeInfo> info = std::make_shared<NodeInfo>();

  CUresult read(const CUDA_MEMCPY3D_v2* params, CUcontext given) {
    CUresult status;
    Context* now = currentContext(status);
    if (status != CUDA_SUCCESS) return status;
    if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
    context = given != nullptr ? contexts().given(given) : now->handle;
    copy = *params;
    info->type = CU_GRAPH_NODE_TYPE_MEMCPY;
    info->copy = *params;
    info->context = context;
    return localiseCopy(copy, context, holds);
  }
};

}  // namespace

CUresult addCopy(CUgraphNode* out, const Place& place, const CUDA_MEMCPY3D_v2* params, CUcontext given) {
  CopyNode node;
  CUresult status = node.read(params, given);
  if (status != CUDA_SUCCESS) return status;
  return createNode(out, place, [&](CUgraphNode& made) {
    CUresult result = Session::get().await<"cuGraphAddMemcpyNode">(
        node.context, &made, place.graph, place.dependencies, place.count, &node.copy, node.context);
    if (result == CUDA_SUCCESS) {
      holdForGraph(toId(place.graph), node.holds);
      rememberNode(toId(place.graph), made, node.info);
    }
    return result;
  });
}

CUresult setCopy(CUgraphNode handle, const CUDA_MEMCPY3D_v2* params) {
  CopyNode node;
  CUresult status = node.read(params, nullptr);
  if (status == CUDA_SUCCESS)
    status = Session::get().await<"cuGraphMemcpyNodeSetParams">(node.context, handle, &node.copy);
  if (status != CUDA_SUCCESS) return status;
  auto before = recallNode(handle);
  uint64_t graph = before == nullptr ? 0 : before->graph;
  if (graph != 0)
    holdForGraph(graph, node.holds);
  else
    node.info->holds = node.holds;  // a captured node: which graph it is in is not known here
  node.info->graph = graph;
  rememberNode(0, handle, node.info);
  return CUDA_SUCCESS;
}

CUresult setExecCopy(CUgraphExec exec, CUgraphNode handle, const CUDA_MEMCPY3D_v2* params, CUcontext given) {
  CopyNode node;
  CUresult status = node.read(params, given);
  if (status == CUDA_SUCCESS)
    status = Session::get().await<"cuGraphExecMemcpyNodeSetParams">(node.context, exec, handle, &node.copy,
                                                                    node.context);
  if (status == CUDA_SUCCESS) holdForGraph(toId(exec), node.holds);
  return status;
}

CUresult addMemset(CUgraphNode* out, const Place& place, const CUDA_MEMSET_NODE_PARAMS_v1* params,
                   CUcontext given) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  given = given == nullptr ? context->handle : contexts().given(given);
  mirrorArena(params->dst);
  return createNode(out, place, [&](CUgraphNode& node) {
    return Session::get().await<"cuGraphAddMemsetNode">(context->handle, &node, place.graph,
                                                        place.dependencies, place.count, params, given);
  });
}

CUresult setMemset(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS_v1* params) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  mirrorArena(params->dst);
  return Session::get().await<"cuGraphMemsetNodeSetParams">(context->handle, node, params);
}

CUresult setExecMemset(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS_v1* params,
                       CUcontext given) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  given = given == nullptr ? context->handle : contexts().given(given);
  mirrorArena(params->dst);
  return Session::get().await<"cuGraphExecMemsetNodeSetParams">(context->handle, exec, node, params, given);
}

namespace {

CUresult getCopy(CUgraphNode node, CUDA_MEMCPY3D_v2& params) {
  auto info = recallNode(node);
  if (info != nullptr && info->type != CU_GRAPH_NODE_TYPE_MEMCPY) return CUDA_ERROR_INVALID_VALUE;
  if (info != nullptr) {
    params = info->copy;
    return CUDA_SUCCESS;
  }
  CUresult status;
  Context* context = currentContext(status);
  if (status == CUDA_SUCCESS)
    status = Session::get().await<"cuGraphMemcpyNodeGetParams">(context->handle, node, &params);
  if (status != CUDA_SUCCESS) return status;
  auto source = reinterpret_cast<uint64_t>(params.srcHost),
       destination = reinterpret_cast<uint64_t>(params.dstHost);
  if (params.srcMemoryType == CU_MEMORYTYPE_HOST)
    params.srcHost = reinterpret_cast<const void*>(originalAddress(source));
  if (params.dstMemoryType == CU_MEMORYTYPE_HOST)
    params.dstHost = reinterpret_cast<void*>(originalAddress(destination));
  return CUDA_SUCCESS;
}

}  // namespace

namespace custom {

CUresult cuGraphAddMemcpyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                              const CUDA_MEMCPY3D_v2* p, CUcontext context) {
  return addCopy(out, {graph, before, n}, p, context);
}
CUresult cuGraphAddMemsetNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                              const CUDA_MEMSET_NODE_PARAMS_v1* p, CUcontext context) {
  return addMemset(out, {graph, before, n}, p, context);
}
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D_v2* p) {
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : getCopy(node, *p);
}
CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D_v2* p) { return setCopy(node, p); }
CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS_v1* p) {
  return setMemset(node, p);
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D_v2* p,
                                        CUcontext context) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setExecCopy(exec, node, p, context);
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_MEMSET_NODE_PARAMS_v1* p, CUcontext context) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setExecMemset(exec, node, p, context);
}

}  // namespace custom
}  // namespace gpupool::client
