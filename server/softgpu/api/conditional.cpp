#include "server/softgpu/api/conditional.h"

#include <algorithm>

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/graph_nodes.h"

namespace gpupool::softgpu::api {
namespace {

// The handles kept for the application: CUDA owns the array of a node's body graphs.
struct BodyHandles : ConditionalOperation {
  std::vector<CUgraph> handles;
};

bool sizeFits(CUgraphConditionalNodeType kind, unsigned size) {
  switch (kind) {
    case CU_GRAPH_COND_TYPE_IF:
      return size == 1 || size == 2;
    case CU_GRAPH_COND_TYPE_WHILE:
      return size == 1;
    case CU_GRAPH_COND_TYPE_SWITCH:
      return size >= 1;
  }
  return false;
}

// The condition of that handle, made for `graph` or for one that contains it.
std::shared_ptr<Condition> findCondition(GraphPtr graph, uint64_t handle) {
  for (; graph; graph = graph->parent.lock()) {
    for (auto& condition : graph->conditions)
      if (condition->handle == handle) return condition;
  }
  return nullptr;
}

template <class Visit>
bool allNested(const Graph& graph, Visit visit) {
  return std::all_of(graph.nodes.begin(), graph.nodes.end(), [&](const GraphNodePtr& node) {
    auto* nested = dynamic_cast<const NestedOperation*>(node->operation.get());
    return !nested || std::all_of(nested->graphs.begin(), nested->graphs.end(),
                                  [&](const GraphPtr& inner) { return visit(*nested, *inner); });
  });
}

bool allowedInBody(const Graph& body) {
  for (auto& node : body.nodes) {
    switch (node->operation->type()) {
      case CU_GRAPH_NODE_TYPE_KERNEL:
      case CU_GRAPH_NODE_TYPE_EMPTY:
      case CU_GRAPH_NODE_TYPE_GRAPH:
      case CU_GRAPH_NODE_TYPE_MEMSET:
      case CU_GRAPH_NODE_TYPE_MEMCPY:
      case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        continue;
      default:
        return false;
    }
  }
  return allNested(body, [](const NestedOperation&, const Graph& inner) { return allowedInBody(inner); });
}

}  // namespace

CUresult ConditionalOperation::run(Context& owner) const {
  auto value = [&] { return conditionValue(condition->handle); };
  if (kind == CU_GRAPH_COND_TYPE_WHILE) {
    while (!owner.aborting && owner.sticky == CUDA_SUCCESS && value() != 0)
      SOFT_TRY(runSteps(*inner[0], owner));
    return CUDA_SUCCESS;
  }
  const size_t taken = kind == CU_GRAPH_COND_TYPE_SWITCH ? value() : value() != 0 ? 0 : 1;
  return taken < inner.size() ? runSteps(*inner[taken], owner) : CUDA_SUCCESS;
}

std::shared_ptr<NestedOperation> ConditionalOperation::withInner(std::vector<StepsPtr> steps) const {
  auto copy = std::make_shared<ConditionalOperation>();
  copy->condition = condition;
  copy->kind = kind;
  copy->context = context;
  copy->inner = std::move(steps);
  return copy;
}

CUresult makeConditional(CUgraph handle, CUDA_CONDITIONAL_NODE_PARAMS& p, OperationPtr& out) {
  auto graph = table<Graph>().find(handle);
  if (!graph || !sizeFits(p.type, p.size)) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr owner;
  SOFT_TRY(namedContext(p.ctx, owner));
  std::lock_guard lock(captureMutex());
  auto condition = findCondition(graph, p.handle);
  if (!condition || condition->used) return CUDA_ERROR_INVALID_VALUE;
  condition->used = true;
  auto operation = std::make_shared<BodyHandles>();
  operation->condition = condition;
  operation->kind = p.type;
  operation->context = owner->handle;
  for (unsigned i = 0; i < p.size; ++i) {
    auto body = makeGraph();
    body->child = true;
    body->parent = graph;
    operation->handles.push_back(body->handle);
    operation->graphs.push_back(std::move(body));
  }
  p.phGraph_out = operation->handles.data();
  out = operation;
  return CUDA_SUCCESS;
}

void assignConditions(const Steps& steps) {
  for (const Step& step : steps) {
    auto* nested = dynamic_cast<const NestedOperation*>(step.operation.get());
    if (!nested) continue;
    auto* conditional = dynamic_cast<const ConditionalOperation*>(nested);
    if (conditional && conditional->condition->assigned)
      setCondition(conditional->condition->handle, conditional->condition->initial);
    for (auto& inner : nested->inner) assignConditions(*inner);
  }
}

bool conditionsUsed(const Graph& graph) {
  bool used = std::all_of(graph.conditions.begin(), graph.conditions.end(), [](auto& c) { return c->used; });
  return used &&
         allNested(graph, [](const NestedOperation&, const Graph& inner) { return conditionsUsed(inner); });
}

bool bodiesAllowed(const Graph& graph) {
  return allNested(graph, [](const NestedOperation& nested, const Graph& inner) {
    return nested.type() == CU_GRAPH_NODE_TYPE_CONDITIONAL ? allowedInBody(inner) : bodiesAllowed(inner);
  });
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* out, CUgraph handle, CUcontext context,
                                        unsigned int initial, unsigned int flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto graph = table<Graph>().find(handle);
  if (!out || !graph || (flags & ~unsigned(CU_GRAPH_COND_ASSIGN_DEFAULT))) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr owner;
  SOFT_TRY(namedContext(context, owner));
  auto condition = std::make_shared<Condition>();
  condition->handle = gpupool::softgpu::createCondition();
  if (!condition->handle) return CUDA_ERROR_OUT_OF_MEMORY;
  condition->initial = initial;
  condition->assigned = (flags & CU_GRAPH_COND_ASSIGN_DEFAULT) != 0;
  std::lock_guard lock(captureMutex());
  graph->conditions.push_back(condition);
  *out = condition->handle;
  return CUDA_SUCCESS;
}
