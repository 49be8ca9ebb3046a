#pragma once
// Conditional graph nodes (driver manual: cuGraphConditionalHandleCreate, CUDA_CONDITIONAL_NODE_PARAMS).

#include "server/softgpu/api/graph.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {

// What a CUgraphConditionalHandle names. Lives as long as its graph or an executable graph made of it.
struct Condition {
  uint64_t handle = 0;  // of the engine; kernels set it
  unsigned initial = 0;
  bool assigned = false;  // `initial` is assigned when a launch begins
  bool used = false;      // by a node; under captureMutex()
  ~Condition() { destroyCondition(handle); }
};

struct ConditionalOperation : NestedOperation {
  std::shared_ptr<Condition> condition;
  CUgraphConditionalNodeType kind = CU_GRAPH_COND_TYPE_IF;
  CUcontext context = nullptr;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_CONDITIONAL; }
  CUresult run(Context& context) const override;
  std::shared_ptr<NestedOperation> withInner(std::vector<StepsPtr> steps) const override;
};

// The content of a new conditional node of `graph`; fills phGraph_out, an array that lives as long as the
// node.
CUresult makeConditional(CUgraph graph, CUDA_CONDITIONAL_NODE_PARAMS& parameters, OperationPtr& operation);
// Assigns the initial values of all conditions in `steps`, at the beginning of a launch.
void assignConditions(const Steps& steps);
// False: a condition of `graph`, or of a graph inside, has no node.
bool conditionsUsed(const Graph& graph);
// Whether every body in `graph` consists of what the manual allows there.
bool bodiesAllowed(const Graph& graph);

}  // namespace gpupool::softgpu::api
