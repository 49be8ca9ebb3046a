// Driver manual: Graph Management: structure (contents of nodes: graph_nodes.cpp; execution: graph_exec.cpp).
#include "server/softgpu/api/graph.h"

#include <algorithm>
#include <map>

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/user_object.h"

namespace gpupool::softgpu::api {
namespace {

CUresult findGraph(CUgraph handle, GraphPtr& graph) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  graph = table<Graph>().find(handle);
  return graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The protocol of all queries for lists: with `out` null, the number; else fills, padding with null.
template <class T, class List, class Get>
CUresult answerList(T* out, size_t* count, const List& list, Get get) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  if (!out) {
    *count = list.size();
    return CUDA_SUCCESS;
  }
  for (size_t i = 0; i < *count; ++i) out[i] = i < list.size() ? get(list[i]) : nullptr;
  *count = std::min(*count, list.size());
  return CUDA_SUCCESS;
}

void zeroEdges(CUgraphEdgeData* data, const size_t* count) {
  for (size_t i = 0; data && count && i < *count; ++i) data[i] = {};
}

CUresult findNode(CUgraphNode handle, GraphNodePtr& node) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  node = table<GraphNode>().find(handle);
  return node ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void unlink(std::vector<GraphNode*>& list, GraphNode* node) {
  list.erase(std::remove(list.begin(), list.end(), node), list.end());
}

CUresult getEdges(CUgraph handle, CUgraphNode* from, CUgraphNode* to, size_t* count) {
  GraphPtr graph;
  SOFT_TRY(findGraph(handle, graph));
  if (!count || !from != !to) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(captureMutex());
  std::vector<std::pair<GraphNode*, GraphNode*>> edges;
  for (auto& node : graph->nodes) {
    for (GraphNode* dependent : node->dependents) edges.emplace_back(node.get(), dependent);
  }
  size_t room = *count;
  SOFT_TRY(answerList(from, count, edges, [](auto& edge) { return edge.first->handle; }));
  if (!to) return CUDA_SUCCESS;
  return answerList(to, &room, edges, [](auto& edge) { return edge.second->handle; });
}

CUresult addEdges(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  GraphPtr graph;
  SOFT_TRY(findGraph(handle, graph));
  if (count && (!from || !to)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(captureMutex());
  // Circles show when the graph is instantiated.
  for (size_t i = 0; i < count; ++i) {
    GraphNodePtr a, b;
    SOFT_TRY(findNode(from[i], a));
    SOFT_TRY(findNode(to[i], b));
    if (a->graph.lock() != graph || b->graph.lock() != graph || a == b) return CUDA_ERROR_INVALID_VALUE;
    if (std::find(a->dependents.begin(), a->dependents.end(), b.get()) != a->dependents.end()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    a->dependents.push_back(b.get());
    b->dependencies.push_back(a.get());
  }
  return CUDA_SUCCESS;
}

CUresult removeEdges(CUgraph handle, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  GraphPtr graph;
  SOFT_TRY(findGraph(handle, graph));
  if (count && (!from || !to)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(captureMutex());
  for (size_t i = 0; i < count; ++i) {
    GraphNodePtr a, b;
    SOFT_TRY(findNode(from[i], a));
    SOFT_TRY(findNode(to[i], b));
    if (std::find(a->dependents.begin(), a->dependents.end(), b.get()) == a->dependents.end()) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    unlink(a->dependents, b.get());
    unlink(b->dependencies, a.get());
  }
  return CUDA_SUCCESS;
}

}  // namespace

// The handles of the graphs that a node contains end with it.
static void forgetInner(const GraphNode& node) {
  auto* nested = dynamic_cast<const NestedOperation*>(node.operation.get());
  for (size_t i = 0; nested && i < nested->graphs.size(); ++i) table<Graph>().take(nested->graphs[i]->handle);
}

Graph::~Graph() {
  for (auto& node : nodes) {
    forgetInner(*node);
    table<GraphNode>().take(node->handle);
  }
  for (auto& [object, count] : userObjects) releaseUserObject(object, count);
}

GraphPtr makeGraph() {
  auto graph = std::make_shared<Graph>();
  table<Graph>().add(graph);
  return graph;
}

GraphNodePtr addNode(const GraphPtr& graph, OperationPtr operation, const std::vector<GraphNode*>& after) {
  auto node = std::make_shared<GraphNode>();
  node->graph = graph;
  node->operation = std::move(operation);
  std::lock_guard lock(captureMutex());
  for (GraphNode* before : after) {
    node->dependencies.push_back(before);
    before->dependents.push_back(node.get());
  }
  table<GraphNode>().add(node);
  graph->nodes.push_back(node);
  return node;
}

CUresult resolveNodes(const Graph& graph, const CUgraphNode* handles, size_t count,
                      std::vector<GraphNode*>& nodes) {
  if (count && !handles) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    auto node = table<GraphNode>().find(handles[i]);
    if (!node || node->graph.lock().get() != &graph) return CUDA_ERROR_INVALID_VALUE;
    if (std::find(nodes.begin(), nodes.end(), node.get()) != nodes.end()) return CUDA_ERROR_INVALID_VALUE;
    nodes.push_back(node.get());
  }
  return CUDA_SUCCESS;
}

bool reaches(const GraphNode* from, const GraphNode* to) {
  std::set<const GraphNode*> seen;
  std::vector<const GraphNode*> open{from};
  while (!open.empty()) {
    const GraphNode* node = open.back();
    open.pop_back();
    if (node == to) return true;
    for (const GraphNode* next : node->dependents) {
      if (seen.insert(next).second) open.push_back(next);
    }
  }
  return false;
}

std::vector<GraphNodePtr> topologicalOrder(const Graph& graph) {
  std::map<const GraphNode*, size_t> missing;
  std::map<const GraphNode*, size_t> position;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    missing[graph.nodes[i].get()] = graph.nodes[i]->dependencies.size();
    position[graph.nodes[i].get()] = i;
  }
  std::set<size_t> ready;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!missing[graph.nodes[i].get()]) ready.insert(i);
  }
  std::vector<GraphNodePtr> order;
  while (!ready.empty()) {
    auto& node = graph.nodes[*ready.begin()];
    ready.erase(ready.begin());
    order.push_back(node);
    for (const GraphNode* next : node->dependents) {
      if (--missing[next] == 0) ready.insert(position[next]);
    }
  }
  return order;
}

bool hasNode(const Graph& graph, std::initializer_list<CUgraphNodeType> types) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const GraphNodePtr& node) {
    if (std::find(types.begin(), types.end(), node->operation->type()) != types.end()) return true;
    auto* child = dynamic_cast<const ChildGraphOperation*>(node->operation.get());
    return child && hasNode(*child->graphs[0], types);
  });
}

bool isUnique(const Graph& graph) {
  return hasNode(graph,
                 {CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPE_MEM_FREE, CU_GRAPH_NODE_TYPE_CONDITIONAL});
}

std::shared_ptr<NestedOperation> ChildGraphOperation::withInner(std::vector<StepsPtr> steps) const {
  auto copy = std::make_shared<ChildGraphOperation>();
  copy->inner = std::move(steps);
  return copy;
}

GraphPtr cloneGraph(const Graph& graph) {
  auto clone = makeGraph();
  clone->clonedFrom = graph.handle;
  std::map<const GraphNode*, GraphNodePtr> copies;
  for (auto& node : graph.nodes) {
    auto operation = node->operation;
    if (auto* child = dynamic_cast<const ChildGraphOperation*>(operation.get())) {
      auto copy = std::make_shared<ChildGraphOperation>();
      copy->graphs.push_back(cloneGraph(*child->graphs[0]));
      copy->graphs[0]->child = true;
      operation = copy;
    }
    auto copy = addNode(clone, operation, {});
    copy->clonedFrom = node->handle;
    copies[node.get()] = copy;
  }
  for (auto& node : graph.nodes) {
    for (GraphNode* before : node->dependencies)
      copies[node.get()]->dependencies.push_back(copies[before].get());
    for (GraphNode* next : node->dependents) copies[node.get()]->dependents.push_back(copies[next].get());
  }
  return clone;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuGraphCreate(CUgraph* out, unsigned int flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
  *out = makeGraph()->handle;
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
  GraphPtr graph;
  SOFT_TRY(findGraph(handle, graph));
  std::lock_guard lock(captureMutex());
  if (graph->child) return CUDA_ERROR_INVALID_VALUE;
  return table<Graph>().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphClone(CUgraph* out, CUgraph original) {
  GraphPtr graph;
  SOFT_TRY(findGraph(original, graph));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(captureMutex());
  if (isUnique(*graph)) return CUDA_ERROR_NOT_SUPPORTED;
  *out = cloneGraph(*graph)->handle;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeFindInClone(CUgraphNode* out, CUgraphNode original, CUgraph clone) {
  GraphPtr graph;
  SOFT_TRY(findGraph(clone, graph));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(captureMutex());
  for (auto& node : graph->nodes) {
    if (node->clonedFrom != original) continue;
    *out = node->handle;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  GraphNodePtr node;
  SOFT_TRY(findNode(handle, node));
  if (!type) return CUDA_ERROR_INVALID_VALUE;
  *type = node->operation->type();
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  GraphPtr graph;
  SOFT_TRY(findGraph(handle, graph));
  std::lock_guard lock(captureMutex());
  return answerList(nodes, count, graph->nodes, [](auto& node) { return node->handle; });
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
  GraphPtr graph;
  SOFT_TRY(findGraph(handle, graph));
  std::lock_guard lock(captureMutex());
  std::vector<GraphNodePtr> roots;
  for (auto& node : graph->nodes) {
    if (node->dependencies.empty()) roots.push_back(node);
  }
  return answerList(nodes, count, roots, [](auto& node) { return node->handle; });
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* count) {
  return getEdges(graph, from, to, count);
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* data,
                            size_t* count) {
  zeroEdges(data, count);
  return getEdges(graph, from, to, count);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode* nodes, size_t* count) {
  GraphNodePtr node;
  SOFT_TRY(findNode(handle, node));
  std::lock_guard lock(captureMutex());
  return answerList(nodes, count, node->dependencies, [](GraphNode* other) { return other->handle; });
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data,
                                       size_t* count) {
  zeroEdges(data, count);
  return cuGraphNodeGetDependencies(handle, nodes, count);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode handle, CUgraphNode* nodes, size_t* count) {
  GraphNodePtr node;
  SOFT_TRY(findNode(handle, node));
  std::lock_guard lock(captureMutex());
  return answerList(nodes, count, node->dependents, [](GraphNode* other) { return other->handle; });
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode handle, CUgraphNode* nodes, CUgraphEdgeData* data,
                                         size_t* count) {
  zeroEdges(data, count);
  return cuGraphNodeGetDependentNodes(handle, nodes, count);
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
  return addEdges(graph, from, to, count);
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData*, size_t count) {
  return addEdges(graph, from, to, count);
}

CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                   size_t count) {
  return removeEdges(graph, from, to, count);
}

CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData*, size_t count) {
  return removeEdges(graph, from, to, count);
}

CUresult cuGraphDestroyNode(CUgraphNode handle) {
  GraphNodePtr node;
  SOFT_TRY(findNode(handle, node));
  std::lock_guard lock(captureMutex());
  auto type = node->operation->type();
  if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || type == CU_GRAPH_NODE_TYPE_MEM_FREE)
    return CUDA_ERROR_NOT_SUPPORTED;
  auto graph = node->graph.lock();
  if (!graph || !table<GraphNode>().take(handle)) return CUDA_ERROR_INVALID_VALUE;
  for (GraphNode* before : node->dependencies) unlink(before->dependents, node.get());
  for (GraphNode* next : node->dependents) unlink(next->dependencies, node.get());
  forgetInner(*node);
  std::erase(graph->nodes, node);
  return CUDA_SUCCESS;
}
