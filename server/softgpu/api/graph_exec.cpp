// Driver manual: Graph Management: executable graphs.
//
// A launch is one task: the operations in topological order. Branches run one after the other, which keeps
// every promise graphs make; a launch never overlaps another of the same executable graph.
#include <algorithm>
#include <map>

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/conditional.h"
#include "server/softgpu/api/graph_memory.h"
#include "server/softgpu/api/graph_nodes.h"

namespace gpupool::softgpu::api {
namespace {

struct GraphExec {
  using Handle = CUgraphExec;
  static constexpr Tag kTag = Tag::exec;
  Handle handle = nullptr;
  unsigned long long flags = 0;
  std::mutex mutex;  // the two below
  StepsPtr steps;
  FencePtr last;
};
using ExecPtr = std::shared_ptr<GraphExec>;

constexpr unsigned long long kKnownFlags = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                                           CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

CUresult findExec(CUgraphExec handle, ExecPtr& exec) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  exec = table<GraphExec>().find(handle);
  return exec ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

std::shared_ptr<Steps> makeSteps(const Graph& graph);

// Graphs inside as they are now: what an executable graph runs does not follow later changes.
OperationPtr freeze(const OperationPtr& operation) {
  auto* nested = dynamic_cast<const NestedOperation*>(operation.get());
  if (!nested || !nested->inner.empty()) return operation;
  std::vector<StepsPtr> inner;
  inner.reserve(nested->graphs.size());
  for (auto& graph : nested->graphs) inner.push_back(makeSteps(*graph));
  return nested->withInner(std::move(inner));
}

std::shared_ptr<Steps> makeSteps(const Graph& graph) {
  auto steps = std::make_shared<Steps>();
  std::map<const GraphNode*, size_t> position;
  for (auto& node : topologicalOrder(graph)) {
    Step step;
    step.node = node->handle;
    step.operation = freeze(node->operation);
    for (const GraphNode* before : node->dependencies) step.after.push_back(position[before]);
    std::sort(step.after.begin(), step.after.end());
    position[node.get()] = steps->size();
    steps->push_back(std::move(step));
  }
  return steps;
}

// False: a circle, here or inside.
bool complete(const Graph& graph, const Steps& steps) {
  if (steps.size() != graph.nodes.size()) return false;
  return std::all_of(graph.nodes.begin(), graph.nodes.end(), [&](const GraphNodePtr& node) {
    auto* nested = dynamic_cast<const NestedOperation*>(node->operation.get());
    return !nested || std::all_of(nested->graphs.begin(), nested->graphs.end(), [](const GraphPtr& inner) {
      return topologicalOrder(*inner).size() == inner->nodes.size();
    });
  });
}

CUresult instantiate(CUgraphExec* out, CUgraph handle, unsigned long long flags,
                     CUgraphInstantiateResult& why) {
  why = CUDA_GRAPH_INSTANTIATE_ERROR;
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags & ~kKnownFlags) return CUDA_ERROR_INVALID_VALUE;
  auto graph = table<Graph>().find(handle);
  if (!graph || !graph->parent.expired()) return CUDA_ERROR_INVALID_VALUE;
  auto exec = std::make_shared<GraphExec>();
  exec->flags = flags;
  std::lock_guard lock(captureMutex());
  bool unique = isUnique(*graph);
  if (unique && !graph->instantiated.expired()) return CUDA_ERROR_NOT_SUPPORTED;
  if (!conditionsUsed(*graph)) {
    why = CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED;
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!bodiesAllowed(*graph)) return CUDA_ERROR_NOT_SUPPORTED;
  exec->steps = makeSteps(*graph);
  if (!complete(*graph, *exec->steps)) {
    why = CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE;
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (unique) graph->instantiated = exec;
  *out = table<GraphExec>().add(exec);
  why = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return CUDA_SUCCESS;
}

// Memory that this launch allocates and does not free must not still be there from the last one.
CUresult claimMemory(const GraphExec& exec, const Steps& steps) {
  bool autoFree = exec.flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
  std::vector<std::shared_ptr<GraphMemory>> kept;
  for (const Step& step : steps) {
    auto* alloc = dynamic_cast<const AllocOperation*>(step.operation.get());
    if (!alloc || alloc->memory->freed) continue;
    if (alloc->memory->live && !autoFree) return CUDA_ERROR_INVALID_VALUE;
    kept.push_back(alloc->memory);
  }
  for (auto& memory : kept) setGraphMemoryLive(memory, true);
  return CUDA_SUCCESS;
}

// A graph that does what `steps` do. None of them is conditional.
GraphPtr graphOf(const Steps& steps) {
  auto graph = makeGraph();
  graph->child = true;
  std::vector<GraphNode*> nodes;
  for (const Step& step : steps) {
    std::vector<GraphNode*> after;
    after.reserve(step.after.size());
    for (size_t before : step.after) after.push_back(nodes[before]);
    OperationPtr operation = step.operation;
    if (!step.enabled) operation = std::make_shared<EmptyOperation>();
    if (auto* nested = dynamic_cast<const NestedOperation*>(operation.get())) {
      auto child = std::make_shared<ChildGraphOperation>();
      child->graphs.push_back(graphOf(*nested->inner[0]));
      operation = child;
    }
    nodes.push_back(addNode(graph, operation, after).get());
  }
  return graph;
}

bool hasConditions(const Steps& steps) {
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) {
    if (step.operation->type() == CU_GRAPH_NODE_TYPE_CONDITIONAL) return true;
    auto* nested = dynamic_cast<const NestedOperation*>(step.operation.get());
    return nested && hasConditions(*nested->inner[0]);
  });
}

// A launch inside a capture becomes a child graph, which cannot contain conditional nodes.
CUresult captureLaunch(const Steps& steps, Stream& stream) {
  if (hasConditions(steps)) return CUDA_ERROR_NOT_SUPPORTED;
  auto child = std::make_shared<ChildGraphOperation>();
  child->graphs.push_back(graphOf(steps));
  return submitOperation(stream, child, Submit::asynchronous);
}

CUresult launchGraph(const ExecPtr& exec, Stream& stream) {
  std::lock_guard lock(exec->mutex);
  auto steps = exec->steps;
  if (capturing(stream)) return captureLaunch(*steps, stream);
  bool captured = false;
  SOFT_TRY(captureWork(stream, captured, [] { return nullptr; }));
  SOFT_TRY(claimMemory(*exec, *steps));
  Task task;
  task.launch = true;
  if (exec->last && !exec->last->done()) task.after.push_back(exec->last);
  task.run = [steps, context = stream.context.get()] {
    assignConditions(*steps);
    return runSteps(*steps, *context);
  };
  exec->last = task.done;
  stream.submit(std::move(task), Submit::asynchronous);
  return CUDA_SUCCESS;
}

// Applies `apply` to the step of `node`, in `steps` or in a graph inside, if there is one.
template <class Change>
CUresult changeStep(StepsPtr& steps, CUgraphNode node, Change& apply, bool& found) {
  for (size_t i = 0; i < steps->size() && !found; ++i) {
    Step step = (*steps)[i];
    if (step.node == node) {
      found = true;
      SOFT_TRY(apply(step));
    } else if (auto* nested = dynamic_cast<const NestedOperation*>(step.operation.get())) {
      auto inner = nested->inner;
      for (StepsPtr& list : inner) SOFT_TRY(changeStep(list, node, apply, found));
      if (found) step.operation = nested->withInner(std::move(inner));
    }
    if (!found) continue;
    auto changed = std::make_shared<Steps>(*steps);
    (*changed)[i] = std::move(step);
    steps = std::move(changed);
  }
  return CUDA_SUCCESS;
}

// Replaces one node's operation (or its enabled flag) for later launches.
template <class Change>
CUresult change(CUgraphExec handle, CUgraphNode node, Change apply) {
  ExecPtr exec;
  SOFT_TRY(findExec(handle, exec));
  std::lock_guard lock(exec->mutex);
  bool found = false;
  SOFT_TRY(changeStep(exec->steps, node, apply, found));
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

template <class Make>
CUresult setOperation(CUgraphExec exec, CUgraphNode node, CUgraphNodeType type, Make make) {
  return change(exec, node, [&](Step& step) {
    if (step.operation->type() != type) return CUDA_ERROR_INVALID_VALUE;
    OperationPtr operation;
    SOFT_TRY(make(operation));
    step.operation = freeze(operation);
    return CUDA_SUCCESS;
  });
}

CUgraphExecUpdateResult compare(const Steps& current, const Steps& next, CUgraphNode& at);

// Two operations of one type.
CUgraphExecUpdateResult compareContent(const Operation& a, const Operation& b, CUgraphNode& at) {
  switch (a.type()) {
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return &a == &b ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      auto &f = static_cast<const KernelOperation&>(a), &g = static_cast<const KernelOperation&>(b);
      if (f.function->context != g.function->context)
        return CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
      return f.cooperative == g.cooperative ? CU_GRAPH_EXEC_UPDATE_SUCCESS
                                            : CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
    }
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      if (static_cast<const ConditionalOperation&>(a).kind !=
          static_cast<const ConditionalOperation&>(b).kind)
        return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
      [[fallthrough]];
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      auto &f = static_cast<const NestedOperation&>(a), &g = static_cast<const NestedOperation&>(b);
      if (f.inner.size() != g.inner.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
      for (size_t i = 0; i < f.inner.size(); ++i) {
        auto result = compare(*f.inner[i], *g.inner[i], at);
        if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return result;
      }
      return CU_GRAPH_EXEC_UPDATE_SUCCESS;
    }
    default:
      return CU_GRAPH_EXEC_UPDATE_SUCCESS;
  }
}

// at: the node of `next` that does not fit.
CUgraphExecUpdateResult compare(const Steps& current, const Steps& next, CUgraphNode& at) {
  if (current.size() != next.size()) {
    at = current.size() < next.size() ? next[current.size()].node : nullptr;
    return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  }
  for (size_t i = 0; i < next.size(); ++i) {
    const Step &a = current[i], &b = next[i];
    at = b.node;
    if (a.after != b.after) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    if (a.operation->type() != b.operation->type()) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    auto result = compareContent(*a.operation, *b.operation, at);
    if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return result;
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

// What `next` does, at the nodes that `current` was instantiated from.
std::shared_ptr<Steps> renamed(const Steps& current, const Steps& next) {
  auto steps = std::make_shared<Steps>(next);
  for (size_t i = 0; i < next.size(); ++i) {
    Step& step = (*steps)[i];
    step.node = current[i].node;
    step.enabled = current[i].enabled;
    auto* nested = dynamic_cast<const NestedOperation*>(step.operation.get());
    if (!nested) continue;
    std::vector<StepsPtr> inner;
    auto& before = static_cast<const NestedOperation&>(*current[i].operation).inner;
    inner.reserve(before.size());
    for (size_t j = 0; j < before.size(); ++j) inner.push_back(renamed(*before[j], *nested->inner[j]));
    step.operation = nested->withInner(std::move(inner));
  }
  return steps;
}

}  // namespace

CUresult runSteps(const Steps& steps, Context& context) {
  for (const Step& step : steps) {
    if (!step.enabled) continue;
    if (context.aborting) return CUDA_SUCCESS;
    if (CUresult failed = context.sticky; failed != CUDA_SUCCESS) return failed;
    SOFT_TRY(step.operation->run(context));
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  CUgraphInstantiateResult why;
  return instantiate(out, graph, flags, why);
}

CUresult cuGraphInstantiate_v2(CUgraphExec* out, CUgraph graph, CUgraphNode* errorNode, char* log,
                               size_t bytes) {
  if (errorNode) *errorNode = nullptr;
  if (log && bytes) *log = 0;
  CUgraphInstantiateResult why;
  return instantiate(out, graph, 0, why);
}

CUresult cuGraphInstantiate(CUgraphExec* out, CUgraph graph, CUgraphNode* errorNode, char* log,
                            size_t bytes) {
  return cuGraphInstantiate_v2(out, graph, errorNode, log, bytes);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* p) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  p->hErrNode_out = nullptr;
  return instantiate(out, graph, p->flags, p->result_out);
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t* flags) {
  ExecPtr exec;
  SOFT_TRY(findExec(handle, exec));
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  *flags = exec->flags & ~static_cast<unsigned long long>(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
  return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream streamHandle) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, streamHandle, context);
  ExecPtr exec;
  return findExec(handle, exec);
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream streamHandle) {
  SOFT_CONTEXT(context);
  ExecPtr exec;
  SOFT_TRY(findExec(handle, exec));
  SOFT_STREAM(stream, streamHandle, context);
  return launchGraph(exec, *stream);
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  return table<GraphExec>().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS* p) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_KERNEL,
                      [&](OperationPtr& o) { return makeKernel(p, o); });
}
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  auto q = fromV1(*p);
  return cuGraphExecKernelNodeSetParams_v2(exec, node, &q);
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D* p,
                                        CUcontext context) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY,
                      [&](OperationPtr& o) { return makeCopy(p, context, o); });
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* p,
                                        CUcontext context) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_MEMSET,
                      [&](OperationPtr& o) { return makeMemset(p, context, o); });
}
CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS* p) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_HOST, [&](OperationPtr& o) { return makeHost(p, o); });
}
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_GRAPH,
                      [&](OperationPtr& o) { return makeChild(child, o); });
}
CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                      [&](OperationPtr& o) { return makeEventRecord(event, o); });
}
CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                      [&](OperationPtr& o) { return makeEventWait(event, o); });
}
CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                            const CUDA_BATCH_MEM_OP_NODE_PARAMS* p) {
  return setOperation(exec, node, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
                      [&](OperationPtr& o) { return makeMemOps(p, o); });
}
CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams* p) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  return setOperation(exec, node, p->type, [&](OperationPtr& o) { return makeAny(p, o); });
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled) {
  return change(exec, node, [&](Step& step) {
    auto type = step.operation->type();
    bool can = type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMSET ||
               type == CU_GRAPH_NODE_TYPE_MEMCPY;
    if (!can) return CUDA_ERROR_INVALID_VALUE;
    step.enabled = enabled != 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeGetEnabled(CUgraphExec handle, CUgraphNode node, unsigned int* enabled) {
  ExecPtr exec;
  SOFT_TRY(findExec(handle, exec));
  if (!enabled) return CUDA_ERROR_INVALID_VALUE;
  return change(handle, node, [&](Step& step) {
    *enabled = step.enabled;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph graphHandle, CUgraphExecUpdateResultInfo* info) {
  ExecPtr exec;
  SOFT_TRY(findExec(handle, exec));
  auto graph = table<Graph>().find(graphHandle);
  if (!graph || !graph->parent.expired() || !info) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Steps> next;
  {
    std::lock_guard lock(captureMutex());
    next = makeSteps(*graph);
  }
  std::lock_guard lock(exec->mutex);
  CUgraphNode at = nullptr;
  *info = {};
  info->result = compare(*exec->steps, *next, at);
  if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
    info->errorNode = at;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  exec->steps = renamed(*exec->steps, *next);
  return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* errorNode,
                           CUgraphExecUpdateResult* result) {
  if (!result) return CUDA_ERROR_INVALID_VALUE;
  CUgraphExecUpdateResultInfo info{};
  CUresult status = cuGraphExecUpdate_v2(exec, graph, &info);
  if (errorNode) *errorNode = info.errorNode;
  *result = info.result;
  return status;
}
