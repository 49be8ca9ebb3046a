// Nodes of graphs by name: kernels, copies, memsets, host functions, allocations, and the generic calls over
// all of them. Rows that need nothing of the client (empty, event and child nodes' queries, dependencies) are
// generated.
#include "client/code.h"
#include "client/entry.h"
#include "client/graphs.h"
#include "client/memory/host.h"
#include "client/memory/pools.h"

namespace gpupool::client {
namespace {

using schema::LaunchShape;

// Where a node goes: graph and what it waits for.
struct Place {
  CUgraph graph;
  const CUgraphNode* dependencies;
  size_t count;
  bool valid() const { return graph != nullptr && (count == 0 || dependencies != nullptr); }
};

Context* currentContext(CUresult& status) {
  Context* context = nullptr;
  status = contexts().resolve(nullptr, &context);
  return status == CUDA_SUCCESS ? context : nullptr;
}

// Mints a node, lets `send` create it and gives it to the caller.
template <class Send>
CUresult create(CUgraphNode* out, const Place& place, Send&& send) {
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

// ---- kernels
// -------------------------------------------------------------------------------------------------------------

using KernelParams = CUDA_KERNEL_NODE_PARAMS_v2;

KernelParams current(const CUDA_KERNEL_NODE_PARAMS_v1& p) {
  KernelParams q{};
  q.func = p.func;
  q.gridDimX = p.gridDimX, q.gridDimY = p.gridDimY, q.gridDimZ = p.gridDimZ;
  q.blockDimX = p.blockDimX, q.blockDimY = p.blockDimY, q.blockDimZ = p.blockDimZ;
  q.sharedMemBytes = p.sharedMemBytes;
  q.kernelParams = p.kernelParams;
  q.extra = p.extra;
  return q;
}
CUDA_KERNEL_NODE_PARAMS_v1 legacy(const KernelParams& p) {
  CUDA_KERNEL_NODE_PARAMS_v1 q{};
  q.func = p.func != nullptr ? p.func : reinterpret_cast<CUfunction>(p.kern);
  q.gridDimX = p.gridDimX, q.gridDimY = p.gridDimY, q.gridDimZ = p.gridDimZ;
  q.blockDimX = p.blockDimX, q.blockDimY = p.blockDimY, q.blockDimZ = p.blockDimZ;
  q.sharedMemBytes = p.sharedMemBytes;
  q.kernelParams = p.kernelParams;
  q.extra = p.extra;
  return q;
}

// Points into the packed parameters, one pointer a parameter, as the driver's own kernelParams.
CUresult pointInto(NodeInfo& info, CUfunction handle, Context& context) {
  Function* function = findFunction(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  CUresult status = describe(handle, *function, context.handle, context.device);
  if (status != CUDA_SUCCESS) return status;
  for (const auto& field : function->layout) {
    size_t end = size_t{field.offset} + field.size;
    if (info.parameters.size() < end) info.parameters.resize(end);
  }
  info.pointers.clear();
  for (const auto& field : function->layout) info.pointers.push_back(info.parameters.data() + field.offset);
  return CUDA_SUCCESS;
}

struct KernelNode {
  CUfunction handle = nullptr;
  LaunchShape shape;
  std::vector<std::byte> packed;
  std::shared_ptr<NodeInfo> info = std::make_shared<NodeInfo>();

  const unsigned char* data() const { return reinterpret_cast<const unsigned char*>(packed.data()); }

  CUresult read(const KernelParams* params, Context& context) {
    if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
    handle = params->func != nullptr ? params->func : reinterpret_cast<CUfunction>(params->kern);
    if (handle == nullptr || (params->kernelParams != nullptr && params->extra != nullptr))
      return CUDA_ERROR_INVALID_VALUE;
    shape = {{params->gridDimX, params->gridDimY, params->gridDimZ},
             {params->blockDimX, params->blockDimY, params->blockDimZ},
             params->sharedMemBytes,
             0};
    CUresult status =
        packParameters(handle, params->kernelParams, params->extra, context.handle, context.device, packed);
    if (status != CUDA_SUCCESS) return status;
    info->type = CU_GRAPH_NODE_TYPE_KERNEL;
    info->function = params->func;
    info->kernel = params->kern;
    info->context = params->ctx != nullptr ? params->ctx : context.handle;
    info->shape = shape;
    info->parameters = packed;
    return pointInto(*info, handle, context);
  }
};

CUresult addKernel(CUgraphNode* out, const Place& place, const KernelParams* params) {
  CUresult status;
  Context* context = currentContext(status);
  KernelNode kernel;
  if (status == CUDA_SUCCESS) status = kernel.read(params, *context);
  if (status != CUDA_SUCCESS) return status;
  return create(out, place, [&](CUgraphNode& node) {
    CUresult made = Session::get().await<"sessionGraphAddKernelNode">(
        context->handle, &node, place.graph, place.dependencies, place.count, kernel.handle,
        kernel.info->context, kernel.shape, kernel.data(), kernel.packed.size());
    if (made == CUDA_SUCCESS) rememberNode(toId(place.graph), node, kernel.info);
    return made;
  });
}

// exec null: the node itself.
CUresult setKernel(CUgraphExec exec, CUgraphNode node, const KernelParams* params) {
  CUresult status;
  Context* context = currentContext(status);
  KernelNode kernel;
  if (status == CUDA_SUCCESS) status = kernel.read(params, *context);
  if (status != CUDA_SUCCESS) return status;
  status = Session::get().await<"sessionGraphSetKernelNode">(context->handle, exec, node, kernel.handle,
                                                             kernel.info->context, kernel.shape,
                                                             kernel.data(), kernel.packed.size());
  if (status == CUDA_SUCCESS && exec == nullptr) rememberNode(0, node, kernel.info);
  return status;
}

// A node the driver made while capturing: what the worker tells of it.
CUresult fetchKernel(CUgraphNode node, std::shared_ptr<NodeInfo>& out) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  auto info = std::make_shared<NodeInfo>();
  std::vector<unsigned char> room(kMaxParameterBytes);
  size_t bytes = room.size();
  CUfunction function = nullptr;
  status = Session::get().await<"sessionGraphGetKernelNode">(context->handle, node, &function, &info->context,
                                                             &info->shape, room.data(), &bytes);
  if (status != CUDA_SUCCESS) return status;
  info->type = CU_GRAPH_NODE_TYPE_KERNEL;
  auto first = reinterpret_cast<const std::byte*>(room.data());
  info->parameters.assign(first, first + std::min(bytes, room.size()));
  info->function = function;
  if (kindOf(toId(function)) ==
      Kind::kernel) {  // launched by its kernel; natively the node names the function
    status = custom::cuKernelGetFunction(&info->function, reinterpret_cast<CUkernel>(function));
    if (status != CUDA_SUCCESS) return status;
  }
  status = pointInto(*info, function, *context);
  if (status != CUDA_SUCCESS) return status;
  rememberNode(0, node, info);
  out = std::move(info);
  return CUDA_SUCCESS;
}

CUresult getKernel(CUgraphNode node, KernelParams& params) {
  auto info = recallNode(node);
  if (info == nullptr) {
    CUresult status = fetchKernel(node, info);
    if (status != CUDA_SUCCESS) return status;
  }
  if (info->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  params = {};
  params.func = info->function;
  params.kern = info->kernel;
  params.ctx = info->context;
  params.gridDimX = info->shape.grid[0], params.gridDimY = info->shape.grid[1],
  params.gridDimZ = info->shape.grid[2];
  params.blockDimX = info->shape.block[0], params.blockDimY = info->shape.block[1],
  params.blockDimZ = info->shape.block[2];
  params.sharedMemBytes = info->shape.sharedBytes;
  params.kernelParams = info->pointers.empty() ? nullptr : info->pointers.data();
  return CUDA_SUCCESS;
}

// ---- copies and memsets
// --------------------------------------------------------------------------------------------------

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
    context = given != nullptr ? given : now->handle;
    copy = *params;
    info->type = CU_GRAPH_NODE_TYPE_MEMCPY;
    info->copy = *params;
    info->context = context;
    return localiseCopy(copy, context, holds);
  }
};

CUresult addCopy(CUgraphNode* out, const Place& place, const CUDA_MEMCPY3D_v2* params, CUcontext given) {
  CopyNode node;
  CUresult status = node.read(params, given);
  if (status != CUDA_SUCCESS) return status;
  return create(out, place, [&](CUgraphNode& made) {
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

CUresult addMemset(CUgraphNode* out, const Place& place, const CUDA_MEMSET_NODE_PARAMS_v1* params,
                   CUcontext given) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (given == nullptr) given = context->handle;
  return create(out, place, [&](CUgraphNode& node) {
    return Session::get().await<"cuGraphAddMemsetNode">(context->handle, &node, place.graph,
                                                        place.dependencies, place.count, params, given);
  });
}

CUresult setExecMemset(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS_v1* params,
                       CUcontext given) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (given == nullptr) given = context->handle;
  return Session::get().await<"cuGraphExecMemsetNodeSetParams">(context->handle, exec, node, params, given);
}

// ---- host functions
// ------------------------------------------------------------------------------------------------------

uint64_t keepFunction(const CUDA_HOST_NODE_PARAMS_v1& params) {
  Session::HostFunction function;
  function.function = params.fn;
  function.data = params.userData;
  function.once = false;  // it runs with every launch of its graph
  carryBytes(function);
  return Session::get().addHostFunction(function);
}

CUresult addHost(CUgraphNode* out, const Place& place, const CUDA_HOST_NODE_PARAMS_v1* params) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (params == nullptr || params->fn == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return create(out, place, [&](CUgraphNode& node) {
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

// ---- child graphs
// --------------------------------------------------------------------------------------------------------

CUresult addChild(CUgraphNode* out, const Place& place, CUgraph child) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  if (child == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (allocates(holdsOf(toId(child)))) return CUDA_ERROR_NOT_SUPPORTED;
  return create(out, place, [&](CUgraphNode& node) {
    CUresult made = Session::get().await<"cuGraphAddChildGraphNode">(context->handle, &node, place.graph,
                                                                     place.dependencies, place.count, child);
    if (made == CUDA_SUCCESS) holdForGraph(toId(place.graph), holdsOf(toId(child)));
    return made;
  });
}

// ---- memory of graphs (client/graphs.h): on the device an empty node
// -----------------------------------------------------

CUresult addEmpty(CUgraphNode* out, const Place& place, CUcontext context, std::shared_ptr<NodeInfo> info) {
  return create(out, place, [&](CUgraphNode& node) {
    CUresult made = Session::get().await<"cuGraphAddEmptyNode">(context, &node, place.graph,
                                                                place.dependencies, place.count);
    if (made == CUDA_SUCCESS) rememberNode(toId(place.graph), node, std::move(info));
    return made;
  });
}

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

// ---- any node
// ------------------------------------------------------------------------------------------------------------

CUDA_MEMSET_NODE_PARAMS_v1 plain(const CUDA_MEMSET_NODE_PARAMS_v2& p) {
  return {p.dst, p.pitch, p.value, p.elementSize, p.width, p.height};
}
KernelParams plain(const CUDA_KERNEL_NODE_PARAMS_v3& p) {
  KernelParams q{};
  q.func = p.func;
  q.gridDimX = p.gridDimX, q.gridDimY = p.gridDimY, q.gridDimZ = p.gridDimZ;
  q.blockDimX = p.blockDimX, q.blockDimY = p.blockDimY, q.blockDimZ = p.blockDimZ;
  q.sharedMemBytes = p.sharedMemBytes;
  q.kernelParams = p.kernelParams;
  q.extra = p.extra;
  q.kern = p.kern;
  q.ctx = p.ctx;
  return q;
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
      if (params->graph.ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) return CUDA_ERROR_NOT_SUPPORTED;
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
    default:
      return CUDA_ERROR_NOT_SUPPORTED;  // external semaphores, batched memory operations, conditions
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
      return exec != nullptr ? setExecMemset(exec, node, &fill, params->memset.ctx)
                             : Generated<schema::RowOf<"cuGraphMemsetNodeSetParams">>::call(
                                   node, static_cast<const CUDA_MEMSET_NODE_PARAMS_v1*>(&fill));
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
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace

// ---- allocation in captures (client/memory/pools.h)
// ------------------------------------------------------------------------

namespace {

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

// ---- calls
// ---------------------------------------------------------------------------------------------------------------

namespace custom {

#define PLACE CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t n
CUresult cuGraphAddKernelNode_v2(PLACE, const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return addKernel(out, {graph, before, n}, p);
}
CUresult cuGraphAddKernelNode(PLACE, const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelParams kernel = current(*p);
  return addKernel(out, {graph, before, n}, &kernel);
}
CUresult cuGraphAddMemcpyNode(PLACE, const CUDA_MEMCPY3D_v2* p, CUcontext context) {
  return addCopy(out, {graph, before, n}, p, context);
}
CUresult cuGraphAddMemsetNode(PLACE, const CUDA_MEMSET_NODE_PARAMS_v1* p, CUcontext context) {
  return addMemset(out, {graph, before, n}, p, context);
}
CUresult cuGraphAddHostNode(PLACE, const CUDA_HOST_NODE_PARAMS_v1* p) {
  return addHost(out, {graph, before, n}, p);
}
CUresult cuGraphAddChildGraphNode(PLACE, CUgraph child) { return addChild(out, {graph, before, n}, child); }
CUresult cuGraphAddMemAllocNode(PLACE, CUDA_MEM_ALLOC_NODE_PARAMS_v1* p) {
  return addAllocation(out, {graph, before, n}, p);
}
CUresult cuGraphAddMemFreeNode(PLACE, CUdeviceptr address) {
  return addFree(out, {graph, before, n}, address);
}
CUresult cuGraphAddNode(PLACE, CUgraphNodeParams* p) { return addAny(out, {graph, before, n}, p); }
#undef PLACE
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
  Generated<schema::RowOf<"cuGraphDestroyNode">>::call(*out);
  *out = nullptr;
  return status;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : getKernel(node, *p);
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1* p) {
  KernelParams kernel{};
  CUresult status = p == nullptr ? CUDA_ERROR_INVALID_VALUE : getKernel(node, kernel);
  if (status == CUDA_SUCCESS) *p = legacy(kernel);
  return status;
}
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return setKernel(nullptr, node, p);
}
CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelParams kernel = current(*p);
  return setKernel(nullptr, node, &kernel);
}
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setKernel(exec, node, p);
}
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (exec == nullptr || p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelParams kernel = current(*p);
  return setKernel(exec, node, &kernel);
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D_v2* p) {
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : getCopy(node, *p);
}
CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D_v2* p) { return setCopy(node, p); }
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D_v2* p,
                                        CUcontext context) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setExecCopy(exec, node, p, context);
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_MEMSET_NODE_PARAMS_v1* p, CUcontext context) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setExecMemset(exec, node, p, context);
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

CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* p) { return setAny(nullptr, node, p); }
CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* p) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setAny(exec, node, p);
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
