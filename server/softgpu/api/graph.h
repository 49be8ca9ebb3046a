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
struct Condition;  // conditional.h

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
  bool child = false;           // owned by a node: not destroyable
  std::weak_ptr<Graph> parent;  // of a body or moved child: the graph it is in, and part of
  std::vector<std::shared_ptr<Condition>> conditions;  // made for this graph, in order
  std::weak_ptr<void> instantiated;                    // the executable graph made of it last
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
// Memory or conditional nodes, here or in a graph inside: such a graph cannot be cloned, nor instantiated
// twice at a time.
bool isUnique(const Graph& graph);
// Some node of it, or of a graph in it, is of one of these types.
bool hasNode(const Graph& graph, std::initializer_list<CUgraphNodeType> types);
// A deep copy with handles of its own.
GraphPtr cloneGraph(const Graph& graph);
// Dependencies first; creation order otherwise.
std::vector<GraphNodePtr> topologicalOrder(const Graph& graph);

// One node of an executable graph.
struct Step {
  CUgraphNode node = nullptr;  // of the graph it was made from
  OperationPtr operation;
  std::vector<size_t> after;  // positions of its dependencies in the list
  bool enabled = true;
};
using Steps = std::vector<Step>;
using StepsPtr = std::shared_ptr<const Steps>;  // replaced, never changed

// Runs them in order unless the context already failed or goes away.
CUresult runSteps(const Steps& steps, Context& context);

// What a node that contains graphs holds: the graphs in a graph's node, their steps in an executable graph,
// which does not follow later changes of the graphs.
struct NestedOperation : Operation {
  std::vector<GraphPtr> graphs;
  std::vector<StepsPtr> inner;
  virtual std::shared_ptr<NestedOperation> withInner(std::vector<StepsPtr> steps) const = 0;
};

struct ChildGraphOperation : NestedOperation {
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_GRAPH; }
  CUresult run(Context& context) const override { return runSteps(*inner[0], context); }
  std::shared_ptr<NestedOperation> withInner(std::vector<StepsPtr> steps) const override;
};

struct EmptyOperation : Operation {
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_EMPTY; }
  CUresult run(Context&) const override { return CUDA_SUCCESS; }
};

}  // namespace gpupool::softgpu::api
