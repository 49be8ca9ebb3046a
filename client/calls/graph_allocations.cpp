// Allocation and free nodes of graphs, and allocation in captures (client/memory/pools.h). The memory is the
// graph's from the node's creation on (client/graphs.h); on the device they are empty nodes.
#include "client/calls/graph_nodes.h"
#include "client/memory/pools.h"

namespace gpupool::client {
namespace {

CUresult addEmpty(CUgraphNode* out, const Place& place, CUcontext context, std::shared_ptr<NodeInfo> info) {
  return createNode(out, place, [&](CUgraphNode& node) {
    CUresult made = Session::get().await<"cuGraphAddEmptyNode">(context, &node, place.graph,
                                                                place.dependencies, place.count);
    if (made == CUDA_SUCCESS) rememberNode(toId(place.graph), node, std::move(info));
    return made;
  });
}

// Puts an empty node of meaning `info` behind what the stream captured so far.
CUresult captureEmpty(const StreamRef& ref, std::shared_ptr<NodeInfo> info) {
  CUstreamCaptureStatus state{};
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  std::vector<CUgraphNode> before(4096);
  std::vector<CUgraphEdgeData> edges(before.size());
  size_t count = before.size();
  CUresult status = Session::get().await<"sessionCaptureInfo">(ref.context, ref.wire, &state, &id, &graph,
                                                               before.data(), edges.data(), &count);
  if (status == CUDA_SUCCESS && state != CU_STREAM_CAPTURE_STATUS_ACTIVE)
    status = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (status != CUDA_SUCCESS) return status;
  count = std::min(count, before.size());  // a worker's word
  CUgraphNode node = nullptr;
  status = addEmpty(&node, {graph, before.data(), count}, ref.context, std::move(info));
  if (status != CUDA_SUCCESS) return status;
  return Session::get().await<"cuStreamUpdateCaptureDependencies_v2">(
      ref.context, ref.wire, &node, static_cast<const CUgraphEdgeData*>(nullptr), size_t{1},
      unsigned{CU_STREAM_SET_CAPTURE_DEPENDENCIES});
}

}  // namespace

CUresult addAllocation(CUgraphNode* out, const Place& place, CUDA_MEM_ALLOC_NODE_PARAMS_v1* params) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr || params->bytesize == 0 || params->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE)
    return CUDA_ERROR_INVALID_VALUE;
  if (params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (params->poolProps.location.id != context->device) return CUDA_ERROR_NOT_SUPPORTED;
  auto info = std::make_shared<NodeInfo>();
  GraphHold hold;
  uint64_t address = 0;
  status = allocateForGraph(*context, params->bytesize, address, hold);
  if (status != CUDA_SUCCESS) return status;
  params->dptr = address;
  info->type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  info->allocation = *params;
  status = addEmpty(out, place, context->handle, info);
  if (status == CUDA_SUCCESS) holdForGraph(toId(place.graph), {hold});
  return status;
}

CUresult addFree(CUgraphNode* out, const Place& place, CUdeviceptr address) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (!isGraphMemory(address)) return CUDA_ERROR_INVALID_VALUE;
  auto info = std::make_shared<NodeInfo>();
  info->type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  info->freed = address;
  return addEmpty(out, place, context->handle, info);
}

CUresult captureAllocation(const StreamRef& ref, CUmemoryPool, size_t bytes, CUdeviceptr* out) {
  Context* context = contexts().find(ref.context);
  if (context == nullptr) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  GraphHold hold;
  uint64_t address = 0;
  CUresult status = allocateForGraph(*context, bytes, address, hold);
  if (status != CUDA_SUCCESS) return status;
  auto info = std::make_shared<NodeInfo>();
  info->type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  info->allocation.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  info->allocation.poolProps.location = {CU_MEM_LOCATION_TYPE_DEVICE, context->device};
  info->allocation.bytesize = bytes;
  info->allocation.dptr = address;
  status = captureEmpty(ref, info);
  if (status != CUDA_SUCCESS) return status;
  captureHolds(*ref.stream, std::move(hold));
  *out = address;
  return CUDA_SUCCESS;
}

CUresult captureFree(const StreamRef& ref, CUdeviceptr address) {
  if (!isGraphMemory(address)) return CUDA_ERROR_INVALID_VALUE;  // as natively: only what a graph allocated
  auto info = std::make_shared<NodeInfo>();
  info->type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  info->freed = address;
  return captureEmpty(ref, info);
}

CUresult freeGraphMemory(const StreamRef&, CUdeviceptr address) {
  return isGraphMemory(address) ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

namespace custom {

CUresult cuGraphAddMemAllocNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                                CUDA_MEM_ALLOC_NODE_PARAMS_v1* p) {
  return addAllocation(out, {graph, before, n}, p);
}
CUresult cuGraphAddMemFreeNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                               CUdeviceptr address) {
  return addFree(out, {graph, before, n}, address);
}
CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS_v1* p) {
  auto info = recallNode(node);
  if (p == nullptr || info == nullptr || info->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
    return CUDA_ERROR_INVALID_VALUE;
  *p = info->allocation;
  return CUDA_SUCCESS;
}
CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr* address) {
  auto info = recallNode(node);
  if (address == nullptr || info == nullptr || info->type != CU_GRAPH_NODE_TYPE_MEM_FREE)
    return CUDA_ERROR_INVALID_VALUE;
  *address = info->freed;
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
