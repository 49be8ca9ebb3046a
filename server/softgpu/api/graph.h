#pragma once
// Graphs (driver manual: Graph Management). A node is an immutable Operation and its place; an executable
// graph is a topologically ordered list of operations that a launch takes as it is at that moment.
//
// captureMutex() guards every graph; the manual leaves concurrent use of one graph to the application.

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "server/softgpu/api/handles.h"
#include "server/softgpu/api/operation.h"

namespace gpupool::softgpu::api {

struct Graph;
struct UserObject;

struct GraphNode {
  using Handle = CUgraphNode;
  static constexpr Tag kTag = Tag::node;
  Handle handle = nullptr;
  std::weak_ptr<Graph> graph;
  OperationPtr operation;
  std::vector<GraphNode*> dependencies, dependents;
  CUgraphNode clonedFrom = nullptr;
};
using GraphNodePtr = std::shared_ptr<GraphNode>;

struct Graph {
  using Handle = CUgraph;
  static constexpr Tag kTag = Tag::graph;
  Handle handle = nullptr;
  std::vector<GraphNodePtr> nodes;  // in order of creation
  CUgraph clonedFrom = nullptr;
  bool child = false;                // owned by a child graph node: not destroyable
  std::weak_ptr<void> instantiated;  // the executable graph made of it last
  std::vector<std::pair<std::shared_ptr<UserObject>, unsigned>> userObjects;
  ~Graph();
};
using GraphPtr = std::shared_ptr<Graph>;

// A node of `graph` behind `after` (which are nodes of the same graph).
GraphNodePtr addNode(const GraphPtr& graph, OperationPtr operation, const std::vector<GraphNode*>& after);
// The dependencies named by an application; 1 if one is not of this graph or named twice.
CUresult resolveNodes(const Graph& graph, const CUgraphNode* handles, size_t count,
                      std::vector<GraphNode*>& nodes);
// False if that would close a circle.
bool reaches(const GraphNode* from, const GraphNode* to);
GraphPtr makeGraph();
// Memory nodes, here or in child graphs: such a graph cannot be cloned, and instantiated once at a time only.
bool hasMemoryNodes(const Graph& graph);
// A deep copy with handles of its own.
GraphPtr cloneGraph(const Graph& graph);
// Dependencies first; creation order otherwise.
std::vector<GraphNodePtr> topologicalOrder(const Graph& graph);

// What a child graph node holds.
struct ChildGraphOperation : Operation {
  GraphPtr graph;
  struct Step {
    CUgraphNode node;
    OperationPtr operation;
  };
  std::vector<Step> steps;  // filled when instantiated
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_GRAPH; }
  CUresult run(Context& context) const override;
};

struct EmptyOperation : Operation {
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_EMPTY; }
  CUresult run(Context&) const override { return CUDA_SUCCESS; }
};

// Runs one operation unless the context already failed or goes away.
CUresult runStep(const Operation& operation, Context& context);

}  // namespace gpupool::softgpu::api
