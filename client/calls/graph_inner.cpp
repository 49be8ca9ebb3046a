// Nodes that contain graphs: child graphs and conditional nodes.
#include "client/calls/graph_nodes.h"

namespace gpupool::client {

static constexpr unsigned kMaxBodies = 1 << 16;  // of one node; a reply names them all

CUresult addChild(CUgraphNode* out, const Place& place, CUgraph child) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (child == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (allocates(holdsOf(toId(child)))) return CUDA_ERROR_NOT_SUPPORTED;
  return createNode(out, place, [&](CUgraphNode& node) {
    CUresult made = Session::get().await<"cuGraphAddChildGraphNode">(context->handle, &node, place.graph,
                                                                     place.dependencies, place.count, child);
    if (made == CUDA_SUCCESS) holdForGraph(toId(place.graph), holdsOf(toId(child)));
    return made;
  });
}

CUresult moveChild(CUgraphNode* out, const Place& place, CUgraph child) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (child == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return createNode(out, place, [&](CUgraphNode& node) {
    CUresult made = Session::get().await<"sessionGraphMoveChild">(context->handle, &node, place.graph,
                                                                  place.dependencies, place.count, child);
    if (made != CUDA_SUCCESS) return made;
    auto info = std::make_shared<NodeInfo>();
    info->type = CU_GRAPH_NODE_TYPE_GRAPH;
    info->inner = {child};
    rememberNode(toId(place.graph), node, std::move(info));
    return made;
  });
}

// The body graphs have names of the worker's; the array that names them is the node's.
CUresult addConditional(CUgraphNode* out, const Place& place, CUDA_CONDITIONAL_NODE_PARAMS& params) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  auto info = std::make_shared<NodeInfo>();
  info->type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  if (params.size > kMaxBodies) return CUDA_ERROR_OUT_OF_MEMORY;
  info->inner.resize(params.size);
  return createNode(out, place, [&](CUgraphNode& node) {
    size_t count = params.size;
    CUresult made = Session::get().await<"sessionGraphAddConditional">(
        context->handle, &node, place.graph, place.dependencies, place.count, params.handle,
        static_cast<unsigned>(params.type), contexts().given(params.ctx), info->inner.data(), &count);
    if (made != CUDA_SUCCESS) return made;
    params.phGraph_out = info->inner.data();
    rememberNode(toId(place.graph), node, info);
    return made;
  });
}

namespace custom {

CUresult cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                                  CUgraph child) {
  return addChild(out, {graph, before, n}, child);
}
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  CUresult status;
  Context* context = currentContext(status);
  GraphExec* known = graphExecs.find(toId(exec));
  if (status != CUDA_SUCCESS) return status;
  if (known == nullptr || node == nullptr || child == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t key = mix(mix(toId(child), graphRevision.load()), context->version.load());
  if (known->settings.accepted(toId(node), key))
    return Session::get().post<"cuGraphExecChildGraphNodeSetParams">(context->handle, exec, node, child);
  status = Session::get().await<"cuGraphExecChildGraphNodeSetParams">(context->handle, exec, node, child);
  if (status == CUDA_SUCCESS) known->settings.accept(toId(node), key);
  return status;
}
CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* out, CUgraph graph, CUcontext context,
                                        unsigned value, unsigned flags) {
  return Generated<schema::RowOf<"cuGraphConditionalHandleCreate">>::call(
      out, graph, contexts().given(context), value, flags);
}

}  // namespace custom
}  // namespace gpupool::client
