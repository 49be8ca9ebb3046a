// Driver manual: Graph Management: adding nodes, their parameters.
#include "server/softgpu/api/graph_nodes.h"

#include <cstring>

#include "server/softgpu/api/callback.h"
#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/conditional.h"
#include "server/softgpu/api/graph_memory.h"

namespace gpupool::softgpu::api {

CUresult makeKernel(const CUDA_KERNEL_NODE_PARAMS* parameters, OperationPtr& out) {
  if (!parameters) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context;
  auto function = table<Function>().find(parameters->func);
  if (function) {
    context = function->context;
  } else {
    SOFT_TRY(namedContext(parameters->ctx, context));
  }
  std::shared_ptr<KernelOperation> operation;
  SOFT_TRY(makeKernelOperation(context, *parameters, false, operation));
  out = operation;
  return CUDA_SUCCESS;
}

CUresult makeCopy(const CUDA_MEMCPY3D* parameters, CUcontext context, OperationPtr& out) {
  if (!parameters) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr owner;
  SOFT_TRY(namedContext(context, owner));
  auto operation = std::make_shared<CopyOperation>();
  operation->parameters = *parameters;
  operation->context = owner->handle;
  SOFT_TRY(planCopy(*parameters, operation->plan));
  out = operation;
  return CUDA_SUCCESS;
}

CUresult makeMemset(const CUDA_MEMSET_NODE_PARAMS* parameters, CUcontext context, OperationPtr& out) {
  if (!parameters) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr owner;
  SOFT_TRY(namedContext(context, owner));
  SOFT_TRY(checkMemset(*parameters));
  auto operation = std::make_shared<MemsetOperation>();
  operation->parameters = *parameters;
  operation->context = owner->handle;
  out = operation;
  return CUDA_SUCCESS;
}

CUresult makeHost(const CUDA_HOST_NODE_PARAMS* parameters, OperationPtr& out) {
  if (!parameters || !parameters->fn) return CUDA_ERROR_INVALID_VALUE;
  auto operation = std::make_shared<HostOperation>();
  operation->parameters = *parameters;
  out = operation;
  return CUDA_SUCCESS;
}

CUresult makeChild(CUgraph handle, OperationPtr& out) {
  auto graph = table<Graph>().find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  auto operation = std::make_shared<ChildGraphOperation>();
  std::lock_guard lock(captureMutex());
  if (isUnique(*graph)) return CUDA_ERROR_NOT_SUPPORTED;
  operation->graphs.push_back(cloneGraph(*graph));
  operation->graphs[0]->child = true;
  out = operation;
  return CUDA_SUCCESS;
}

// CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE: the graph itself, which is the node's from now on.
static CUresult moveChild(CUgraph parentHandle, CUgraph handle, OperationPtr& out) {
  auto parent = table<Graph>().find(parentHandle), graph = table<Graph>().find(handle);
  std::lock_guard lock(captureMutex());
  if (!parent || !graph || graph->child || graph == parent) return CUDA_ERROR_INVALID_VALUE;
  if (hasNode(*graph, {CU_GRAPH_NODE_TYPE_CONDITIONAL})) return CUDA_ERROR_NOT_SUPPORTED;
  auto operation = std::make_shared<ChildGraphOperation>();
  graph->child = true;
  graph->parent = parent;
  operation->graphs.push_back(graph);
  out = operation;
  return CUDA_SUCCESS;
}

template <class T>
static CUresult makeEvent(CUevent handle, OperationPtr& out) {
  auto operation = std::make_shared<T>();
  operation->event = table<Event>().find(handle);
  if (!operation->event) return CUDA_ERROR_INVALID_HANDLE;
  out = operation;
  return CUDA_SUCCESS;
}

CUresult makeEventRecord(CUevent event, OperationPtr& out) {
  return makeEvent<EventRecordOperation>(event, out);
}
CUresult makeEventWait(CUevent event, OperationPtr& out) { return makeEvent<EventWaitOperation>(event, out); }

CUresult makeMemOps(const CUDA_BATCH_MEM_OP_NODE_PARAMS* parameters, OperationPtr& out) {
  if (!parameters || !parameters->count || parameters->count > 256 || !parameters->paramArray ||
      parameters->flags) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  SOFT_TRY(checkMemOps(parameters->paramArray, parameters->count));
  auto operation = std::make_shared<MemOpOperation>();
  operation->context = parameters->ctx;
  operation->operations.assign(parameters->paramArray, parameters->paramArray + parameters->count);
  out = operation;
  return CUDA_SUCCESS;
}

CUDA_KERNEL_NODE_PARAMS fromV1(const CUDA_KERNEL_NODE_PARAMS_v1& p) {
  return {p.func,      p.gridDimX,       p.gridDimY,     p.gridDimZ, p.blockDimX, p.blockDimY,
          p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra,    nullptr,     nullptr};
}

namespace {

CUDA_KERNEL_NODE_PARAMS_v1 toV1(const CUDA_KERNEL_NODE_PARAMS& p) {
  return {p.func,      p.gridDimX,  p.gridDimY,       p.gridDimZ,     p.blockDimX,
          p.blockDimY, p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra};
}

// Checks graph and dependencies first, as the driver does, then makes the content.
template <class Make>
CUresult add(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, size_t count, Make make) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto graph = table<Graph>().find(handle);
  if (!out || !graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<GraphNode*> after;
  SOFT_TRY(resolveNodes(*graph, dependencies, count, after));
  OperationPtr operation;
  SOFT_TRY(make(operation));
  *out = addNode(graph, operation, after)->handle;
  return CUDA_SUCCESS;
}

template <class T, class Make>
CUresult replace(CUgraphNode handle, Make make) {
  GraphNodePtr node;
  const T* old;
  SOFT_TRY(nodeOperation<T>(handle, node, old));
  OperationPtr operation;
  SOFT_TRY(make(operation));
  std::lock_guard lock(captureMutex());
  node->operation = operation;
  return CUDA_SUCCESS;
}

CUresult makeAlloc(CUDA_MEM_ALLOC_NODE_PARAMS* p, OperationPtr& out) {
  if (!p || p->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || p->poolProps.handleTypes ||
      p->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!findDevice(p->poolProps.location.id)) return CUDA_ERROR_INVALID_DEVICE;
  std::shared_ptr<AllocOperation> operation;
  SOFT_TRY(makeAllocOperation(p->poolProps.location.id, p->bytesize, operation));
  p->dptr = operation->parameters.dptr;
  out = operation;
  return CUDA_SUCCESS;
}

CUresult makeFree(CUdeviceptr address, OperationPtr& out) {
  std::shared_ptr<FreeOperation> operation;
  SOFT_TRY(makeFreeOperation(address, operation));
  out = operation;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult makeAny(CUgraphNodeParams* p, OperationPtr& out) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS kernel;
      static_assert(sizeof kernel == sizeof p->kernel);
      std::memcpy(&kernel, &p->kernel, sizeof kernel);
      return makeKernel(&kernel, out);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return makeCopy(&p->memcpy.copyParams, p->memcpy.copyCtx, out);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      auto& m = p->memset;
      CUDA_MEMSET_NODE_PARAMS memset{m.dst, m.pitch, m.value, m.elementSize, m.width, m.height};
      return makeMemset(&memset, m.ctx, out);
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
      CUDA_HOST_NODE_PARAMS host{p->host.fn, p->host.userData};
      return makeHost(&host, out);
    }
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return makeChild(p->graph.graph, out);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      out = std::make_shared<EmptyOperation>();
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return makeEventWait(p->eventWait.event, out);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return makeEventRecord(p->eventRecord.event, out);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
      auto& a = p->alloc;
      CUDA_MEM_ALLOC_NODE_PARAMS alloc{a.poolProps, a.accessDescs, a.accessDescCount, a.bytesize, 0};
      SOFT_TRY(makeAlloc(&alloc, out));
      a.dptr = alloc.dptr;
      return CUDA_SUCCESS;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return makeFree(p->free.dptr, out);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: {
      CUDA_BATCH_MEM_OP_NODE_PARAMS ops{p->memOp.ctx, p->memOp.count, p->memOp.paramArray, p->memOp.flags};
      return makeMemOps(&ops, out);
    }
    default:
      return CUDA_ERROR_NOT_SUPPORTED;  // external semaphores; a conditional node cannot change
  }
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;
using Nodes = const CUgraphNode*;

CUresult cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS* p) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeKernel(p, o); });
}
CUresult cuGraphAddKernelNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  auto q = fromV1(*p);
  return cuGraphAddKernelNode_v2(out, graph, after, count, &q);
}
CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS* p) {
  GraphNodePtr node;
  const KernelOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  *p = operation->parameters;
  return CUDA_SUCCESS;
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS_v1* p) {
  CUDA_KERNEL_NODE_PARAMS q;
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(cuGraphKernelNodeGetParams_v2(handle, &q));
  *p = toV1(q);
  return CUDA_SUCCESS;
}
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* p) {
  return replace<KernelOperation>(node, [&](OperationPtr& o) { return makeKernel(p, o); });
}
CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  auto q = fromV1(*p);
  return cuGraphKernelNodeSetParams_v2(node, &q);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                              const CUDA_MEMCPY3D* p, CUcontext context) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeCopy(p, context, o); });
}
CUresult cuGraphMemcpyNodeGetParams(CUgraphNode handle, CUDA_MEMCPY3D* p) {
  GraphNodePtr node;
  const CopyOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  *p = operation->parameters;
  return CUDA_SUCCESS;
}
CUresult cuGraphMemcpyNodeSetParams(CUgraphNode handle, const CUDA_MEMCPY3D* p) {
  GraphNodePtr node;
  const CopyOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  return replace<CopyOperation>(handle, [&](OperationPtr& o) { return makeCopy(p, operation->context, o); });
}

CUresult cuGraphAddMemsetNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS* p, CUcontext context) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeMemset(p, context, o); });
}
CUresult cuGraphMemsetNodeGetParams(CUgraphNode handle, CUDA_MEMSET_NODE_PARAMS* p) {
  GraphNodePtr node;
  const MemsetOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  *p = operation->parameters;
  return CUDA_SUCCESS;
}
CUresult cuGraphMemsetNodeSetParams(CUgraphNode handle, const CUDA_MEMSET_NODE_PARAMS* p) {
  GraphNodePtr node;
  const MemsetOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  return replace<MemsetOperation>(handle,
                                  [&](OperationPtr& o) { return makeMemset(p, operation->context, o); });
}

CUresult cuGraphAddHostNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                            const CUDA_HOST_NODE_PARAMS* p) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeHost(p, o); });
}
CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS* p) {
  GraphNodePtr node;
  const HostOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  *p = operation->parameters;
  return CUDA_SUCCESS;
}
CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS* p) {
  return replace<HostOperation>(node, [&](OperationPtr& o) { return makeHost(p, o); });
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count, CUgraph child) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeChild(child, o); });
}
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph* graph) {
  GraphNodePtr node;
  const ChildGraphOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  *graph = operation->graphs[0]->handle;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count) {
  return add(out, graph, after, count, [](OperationPtr& o) {
    o = std::make_shared<EmptyOperation>();
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                                   CUevent event) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeEventRecord(event, o); });
}
CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode handle, CUevent* event) {
  GraphNodePtr node;
  const EventRecordOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!event) return CUDA_ERROR_INVALID_VALUE;
  *event = operation->event->handle;
  return CUDA_SUCCESS;
}
CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
  return replace<EventRecordOperation>(node, [&](OperationPtr& o) { return makeEventRecord(event, o); });
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count, CUevent event) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeEventWait(event, o); });
}
CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode handle, CUevent* event) {
  GraphNodePtr node;
  const EventWaitOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!event) return CUDA_ERROR_INVALID_VALUE;
  *event = operation->event->handle;
  return CUDA_SUCCESS;
}
CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
  return replace<EventWaitOperation>(node, [&](OperationPtr& o) { return makeEventWait(event, o); });
}

CUresult cuGraphAddBatchMemOpNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                                  const CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeMemOps(p, o); });
}
CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode handle, CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  GraphNodePtr node;
  const MemOpOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  // The array belongs to the node, as natively; it is only read.
  auto* list = const_cast<CUstreamBatchMemOpParams*>(operation->operations.data());
  *p = {operation->context, unsigned(operation->operations.size()), list, 0};
  return CUDA_SUCCESS;
}
CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  return replace<MemOpOperation>(node, [&](OperationPtr& o) { return makeMemOps(p, o); });
}

CUresult cuGraphAddMemAllocNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS* p) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeAlloc(p, o); });
}
CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS* p) {
  GraphNodePtr node;
  const AllocOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  *p = operation->parameters;
  return CUDA_SUCCESS;
}
CUresult cuGraphAddMemFreeNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count,
                               CUdeviceptr address) {
  return add(out, graph, after, count, [&](OperationPtr& o) { return makeFree(address, o); });
}
CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr* address) {
  GraphNodePtr node;
  const FreeOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!address) return CUDA_ERROR_INVALID_VALUE;
  *address = operation->address;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(CUgraphNode* out, CUgraph graph, Nodes after, size_t count, CUgraphNodeParams* p) {
  return add(out, graph, after, count, [&](OperationPtr& o) {
    if (p && p->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return makeConditional(graph, p->conditional, o);
    bool moves =
        p && p->type == CU_GRAPH_NODE_TYPE_GRAPH && p->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    return moves ? moveChild(graph, p->graph.graph, o) : makeAny(p, o);
  });
}
CUresult cuGraphAddNode_v2(CUgraphNode* out, CUgraph graph, Nodes after, const CUgraphEdgeData*, size_t count,
                           CUgraphNodeParams* p) {
  return cuGraphAddNode(out, graph, after, count, p);
}
CUresult cuGraphNodeSetParams(CUgraphNode handle, CUgraphNodeParams* p) {
  auto node = table<GraphNode>().find(handle);
  if (!node || !p || node->operation->type() != p->type) return CUDA_ERROR_INVALID_VALUE;
  return replace<Operation>(handle, [&](OperationPtr& o) { return makeAny(p, o); });
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from) {
  GraphNodePtr target, source;
  const KernelOperation *old, *model;
  SOFT_TRY(nodeOperation(to, target, old));
  SOFT_TRY(nodeOperation(from, source, model));
  auto changed = std::make_shared<KernelOperation>();
  SOFT_TRY(makeKernelOperation(old->function->context, old->parameters, model->cooperative, changed));
  changed->priority = model->priority;
  std::lock_guard lock(captureMutex());
  target->operation = changed;
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       CUkernelNodeAttrValue* value) {
  GraphNodePtr node;
  const KernelOperation* operation;
  SOFT_TRY(nodeOperation(handle, node, operation));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  *value = {};
  switch (int(attribute)) {
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
      value->cooperative = operation->cooperative;
      break;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      value->priority = operation->priority;
      break;
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      value->clusterDim.x = value->clusterDim.y = value->clusterDim.z = 0;
      break;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue* value) {
  GraphNodePtr node;
  const KernelOperation* old;
  SOFT_TRY(nodeOperation(handle, node, old));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  bool cooperative = old->cooperative;
  int priority = old->priority;
  switch (int(attribute)) {
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
      cooperative = value->cooperative != 0;
      break;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      priority = value->priority;
      break;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  std::shared_ptr<KernelOperation> changed;
  SOFT_TRY(makeKernelOperation(old->function->context, old->parameters, cooperative, changed));
  changed->priority = priority;
  std::lock_guard lock(captureMutex());
  node->operation = changed;
  return CUDA_SUCCESS;
}
