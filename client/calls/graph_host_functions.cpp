// Host function nodes of graphs.
#include "client/calls/graph_nodes.h"
#include "client/memory/registered.h"

namespace gpupool::client {
namespace {

uint64_t keepFunction(const CUDA_HOST_NODE_PARAMS_v1& params) {
  Session::HostFunction function;
  function.function = params.fn;
  function.data = params.userData;
  function.once = false;  // it runs with every launch of its graph
  carryBytes(function, true);
  return Session::get().addHostFunction(function);
}

CUresult getHost(CUgraphNode node, CUDA_HOST_NODE_PARAMS_v1& params) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  uint64_t id = 0;
  status = Session::get().await<"sessionGraphGetHostNode">(context->handle, node, &id);
  if (status != CUDA_SUCCESS) return status;
  Session::HostFunction function;
  if (!Session::get().findHostFunction(id, function)) return CUDA_ERROR_INVALID_VALUE;
  params = {function.function, function.data};
  return CUDA_SUCCESS;
}

}  // namespace

CUresult addHost(CUgraphNode* out, const Place& place, const CUDA_HOST_NODE_PARAMS_v1* params) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr || params->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return createNode(out, place, [&](CUgraphNode& node) {
    return Session::get().await<"sessionGraphAddHostNode">(
        context->handle, &node, place.graph, place.dependencies, place.count, keepFunction(*params));
  });
}

CUresult setHost(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS_v1* params) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr || params->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Session::get().await<"sessionGraphSetHostNode">(context->handle, exec, node, keepFunction(*params));
}

namespace custom {

CUresult cuGraphAddHostNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                            const CUDA_HOST_NODE_PARAMS_v1* p) {
  return addHost(out, {graph, before, n}, p);
}
CUresult cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS_v1* p) {
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : getHost(node, *p);
}
CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS_v1* p) {
  return setHost(nullptr, node, p);
}
CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS_v1* p) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setHost(exec, node, p);
}

}  // namespace custom
}  // namespace gpupool::client
