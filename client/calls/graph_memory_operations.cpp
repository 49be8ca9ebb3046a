// Nodes of stream memory operations: values that are written and waited for.
#include "client/calls/graph_nodes.h"
#include "client/memory/registered.h"

namespace gpupool::client {
namespace {

constexpr unsigned kMostOperations = 256;  // of one node, as CUDA documents

CUresult readOperations(const CUDA_BATCH_MEM_OP_NODE_PARAMS_v1* params, CUcontext current,
                        std::shared_ptr<NodeInfo>& info) {
  if (params == nullptr || params->paramArray == nullptr || params->count == 0 ||
      params->count > kMostOperations || params->flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  info = std::make_shared<NodeInfo>();
  info->type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
  info->context = params->ctx != nullptr ? contexts().given(params->ctx) : current;
  info->operations.assign(params->paramArray, params->paramArray + params->count);
  for (const CUstreamBatchMemOpParams& operation : info->operations)
    if (operation.operation != CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES &&
        operation.operation != CU_STREAM_MEM_OP_BARRIER)
      mirrorArena(operation.waitValue.address);  // all have it at one place
  return CUDA_SUCCESS;
}

// A node the driver made: of a clone.
CUresult fetchOperations(CUgraphNode node, std::shared_ptr<NodeInfo>& info) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  info = std::make_shared<NodeInfo>();
  info->type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
  info->operations.resize(kMostOperations);
  size_t count = info->operations.size();
  status = Session::get().await<"sessionGraphGetMemOps">(context->handle, node, &info->context,
                                                         info->operations.data(), &count);
  if (status != CUDA_SUCCESS) return status;
  info->operations.resize(std::min(count, info->operations.size()));
  rememberNode(0, node, info);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult addMemoryOperations(CUgraphNode* out, const Place& place,
                             const CUDA_BATCH_MEM_OP_NODE_PARAMS_v1* params) {
  CUresult status;
  Context* context = currentContext(status);
  std::shared_ptr<NodeInfo> info;
  if (status == CUDA_SUCCESS) status = readOperations(params, context->handle, info);
  if (status != CUDA_SUCCESS) return status;
  return createNode(out, place, [&](CUgraphNode& node) {
    const auto& operations = info->operations;
    CUresult made = Session::get().await<"sessionGraphAddMemOps">(
        context->handle, &node, place.graph, place.dependencies, place.count, info->context,
        operations.data(), operations.size());
    if (made == CUDA_SUCCESS) rememberNode(toId(place.graph), node, info);
    return made;
  });
}

CUresult setMemoryOperations(CUgraphExec exec, CUgraphNode node,
                             const CUDA_BATCH_MEM_OP_NODE_PARAMS_v1* params) {
  CUresult status;
  Context* context = currentContext(status);
  std::shared_ptr<NodeInfo> info;
  if (status == CUDA_SUCCESS) status = readOperations(params, context->handle, info);
  if (status != CUDA_SUCCESS) return status;
  const auto& operations = info->operations;
  status = Session::get().await<"sessionGraphSetMemOps">(context->handle, exec, node, info->context,
                                                         operations.data(), operations.size());
  if (status == CUDA_SUCCESS && exec == nullptr) rememberNode(0, node, info);
  return status;
}

namespace custom {

CUresult cuGraphAddBatchMemOpNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                                  const CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  return addMemoryOperations(out, {graph, before, n}, p);
}
CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode node, CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto info = recallNode(node);
  CUresult status = info != nullptr ? CUDA_SUCCESS : fetchOperations(node, info);
  if (status != CUDA_SUCCESS) return status;
  if (info->type != CU_GRAPH_NODE_TYPE_BATCH_MEM_OP) return CUDA_ERROR_INVALID_VALUE;
  // The array is the node's, as natively.
  *p = {info->context, static_cast<unsigned>(info->operations.size()), info->operations.data(), 0};
  return CUDA_SUCCESS;
}
CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  return setMemoryOperations(nullptr, node, p);
}
CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                            const CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setMemoryOperations(exec, node, p);
}

}  // namespace custom
}  // namespace gpupool::client
