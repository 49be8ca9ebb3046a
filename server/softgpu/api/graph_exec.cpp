// Driver manual: Graph Management: executable graphs.
//
// A launch is one task: the operations in topological order. Branches run one after the other, which keeps
// every promise graphs make; a launch never overlaps another of the same executable graph.
#include <algorithm>
#include <map>

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/graph_memory.h"
#include "server/softgpu/api/graph_nodes.h"

namespace gpupool::softgpu::api {
namespace {

struct Step {
  CUgraphNode node = nullptr;  // of the graph it was made from
  OperationPtr operation;
  std::vector<size_t> after;  // positions of its dependencies in the list
  bool enabled = true;
};
using Steps = std::vector<Step>;

struct GraphExec {
  using Handle = CUgraphExec;
  static constexpr Tag kTag = Tag::exec;
  Handle handle = nullptr;
  unsigned long long flags = 0;
  std::mutex mutex;                    // the two below
  std::shared_ptr<const Steps> steps;  // replaced, never changed
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

// Child graphs as they are now: what an executable graph runs does not follow later changes.
OperationPtr freeze(const OperationPtr& operation) {
  auto* child = dynamic_cast<const ChildGraphOperation*>(operation.get());
  if (!child) return operation;
  auto frozen = std::make_shared<ChildGraphOperation>();
  frozen->graph = child->graph;
  if (!child->steps.empty()) {
    frozen->steps = child->steps;
    return frozen;
  }
  for (auto& node : topologicalOrder(*child->graph))
    frozen->steps.push_back({node->handle, freeze(node->operation)});
  return frozen;
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

CUresult instantiate(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags & ~kKnownFlags) return CUDA_ERROR_INVALID_VALUE;
  auto graph = table<Graph>().find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  auto exec = std::make_shared<GraphExec>();
  exec->flags = flags;
  std::lock_guard lock(captureMutex());
  bool memory = hasMemoryNodes(*graph);
  if (memory && !graph->instantiated.expired()) return CUDA_ERROR_NOT_SUPPORTED;
  exec->steps = makeSteps(*graph);
  if (exec->steps->size() != graph->nodes.size()) return CUDA_ERROR_INVALID_VALUE;  // a circle
  if (memory) graph->instantiated = exec;
  *out = table<GraphExec>().add(exec);
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

// A launch inside a capture becomes a child graph.
OperationPtr asChild(const Steps& steps) {
  auto child = std::make_shared<ChildGraphOperation>();
  child->graph = makeGraph();
  child->graph->child = true;
  std::vector<GraphNode*> nodes;
  for (const Step& step : steps) {
    std::vector<GraphNode*> after;
    for (size_t before : step.after) after.push_back(nodes[before]);
    OperationPtr operation = step.enabled ? step.operation : std::make_shared<EmptyOperation>();
    nodes.push_back(addNode(child->graph, operation, after).get());
  }
  return child;
}

CUresult launchGraph(const ExecPtr& exec, Stream& stream) {
  std::lock_guard lock(exec->mutex);
  auto steps = exec->steps;
  if (capturing(stream)) return submitOperation(stream, asChild(*steps), Submit::asynchronous);
  bool captured = false;
  SOFT_TRY(captureWork(stream, captured, [] { return nullptr; }));
  SOFT_TRY(claimMemory(*exec, *steps));
  Task task;
  task.launch = true;
  if (exec->last && !exec->last->done()) task.after.push_back(exec->last);
  task.run = [steps, context = stream.context.get()] {
    for (const Step& step : *steps) {
      if (step.enabled) SOFT_TRY(runStep(*step.operation, *context));
    }
    return CUDA_SUCCESS;
  };
  exec->last = task.done;
  stream.submit(std::move(task), Submit::asynchronous);
  return CUDA_SUCCESS;
}

// Replaces one node's operation (or its enabled flag) for later launches.
template <class Change>
CUresult change(CUgraphExec handle, CUgraphNode node, Change apply) {
  ExecPtr exec;
  SOFT_TRY(findExec(handle, exec));
  std::lock_guard lock(exec->mutex);
  for (size_t i = 0; i < exec->steps->size(); ++i) {
    if ((*exec->steps)[i].node != node) continue;
    auto changed = std::make_shared<Steps>(*exec->steps);
    SOFT_TRY(apply((*changed)[i]));
    exec->steps = changed;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
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

CUgraphExecUpdateResult compare(const Steps& current, const Steps& next, size_t& at) {
  if (current.size() != next.size()) {
    at = std::min(current.size(), next.size());
    return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  }
  for (at = 0; at < next.size(); ++at) {
    const Step &a = current[at], &b = next[at];
    if (a.after != b.after) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    auto type = a.operation->type();
    if (type != b.operation->type()) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
      if (a.operation != b.operation) return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    }
    if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
      auto &f = static_cast<const KernelOperation&>(*a.operation),
           &g = static_cast<const KernelOperation&>(*b.operation);
      if (f.function->context != g.function->context) {
        return CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
      }
      if (f.cooperative != g.cooperative) return CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
    }
  }
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

}  // namespace

CUresult runStep(const Operation& operation, Context& context) {
  if (context.aborting) return CUDA_SUCCESS;
  if (CUresult failed = context.sticky; failed != CUDA_SUCCESS) return failed;
  return operation.run(context);
}

CUresult ChildGraphOperation::run(Context& context) const {
  for (const Step& step : steps) SOFT_TRY(runStep(*step.operation, context));
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph, unsigned long long flags) {
  return instantiate(out, graph, flags);
}

CUresult cuGraphInstantiate_v2(CUgraphExec* out, CUgraph graph, CUgraphNode* errorNode, char* log,
                               size_t bytes) {
  if (errorNode) *errorNode = nullptr;
  if (log && bytes) *log = 0;
  return instantiate(out, graph, 0);
}

CUresult cuGraphInstantiate(CUgraphExec* out, CUgraph graph, CUgraphNode* errorNode, char* log,
                            size_t bytes) {
  return cuGraphInstantiate_v2(out, graph, errorNode, log, bytes);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* p) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  p->hErrNode_out = nullptr;
  CUresult result = instantiate(out, graph, p->flags);
  p->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
  return result;
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
  std::lock_guard lock(exec->mutex);
  for (const Step& step : *exec->steps) {
    if (step.node != node) continue;
    *enabled = step.enabled;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph graphHandle, CUgraphExecUpdateResultInfo* info) {
  ExecPtr exec;
  SOFT_TRY(findExec(handle, exec));
  auto graph = table<Graph>().find(graphHandle);
  if (!graph || !info) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Steps> next;
  {
    std::lock_guard lock(captureMutex());
    next = makeSteps(*graph);
  }
  std::lock_guard lock(exec->mutex);
  size_t at = 0;
  *info = {};
  info->result = compare(*exec->steps, *next, at);
  if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
    if (at < next->size()) info->errorNode = (*next)[at].node;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  // The nodes stay those it was instantiated from.
  for (size_t i = 0; i < next->size(); ++i) {
    (*next)[i].node = (*exec->steps)[i].node;
    (*next)[i].enabled = (*exec->steps)[i].enabled;
  }
  exec->steps = next;
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
