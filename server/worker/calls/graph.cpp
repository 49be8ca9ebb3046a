// Graphs whose nodes carry parameters, host functions or host addresses. The rest are plain rows.
#include <algorithm>
#include <cstring>

#include "server/worker/callbacks.h"
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using AddKernel = GPUPOOL_ROW(sessionGraphAddKernelNode);
using SetKernel = GPUPOOL_ROW(sessionGraphSetKernelNode);
using GetKernel = GPUPOOL_ROW(sessionGraphGetKernelNode);
using AddHost = GPUPOOL_ROW(sessionGraphAddHostNode);
using SetHost = GPUPOOL_ROW(sessionGraphSetHostNode);
using GetHost = GPUPOOL_ROW(sessionGraphGetHostNode);
using Instantiate = GPUPOOL_ROW(sessionGraphInstantiate);
using Destroy = GPUPOOL_ROW(cuGraphDestroy);
using DestroyNode = GPUPOOL_ROW(cuGraphDestroyNode);
using AddConditional = GPUPOOL_ROW(sessionGraphAddConditional);
using MoveChild = GPUPOOL_ROW(sessionGraphMoveChild);
using AddMemOps = GPUPOOL_ROW(sessionGraphAddMemOps);
using SetMemOps = GPUPOOL_ROW(sessionGraphSetMemOps);
using GetMemOps = GPUPOOL_ROW(sessionGraphGetMemOps);
using Update = GPUPOOL_ROW(sessionGraphUpdate);
using AddMemcpy = GPUPOOL_ROW(cuGraphAddMemcpyNode);
using SetMemcpy = GPUPOOL_ROW(cuGraphMemcpyNodeSetParams);
using ExecSetMemcpy = GPUPOOL_ROW(cuGraphExecMemcpyNodeSetParams);
using AddMemset = GPUPOOL_ROW(cuGraphAddMemsetNode);
using SetMemset = GPUPOOL_ROW(cuGraphMemsetNodeSetParams);
using ExecSetMemset = GPUPOOL_ROW(cuGraphExecMemsetNodeSetParams);
using NodeSetAttribute = GPUPOOL_ROW(cuGraphKernelNodeSetAttribute);
using StreamSetAttribute = GPUPOOL_ROW(cuStreamSetAttribute);

// Node parameters around a packed buffer. Lives as long as the driver call that reads it.
template <class Served>
struct KernelParameters {
  CUDA_KERNEL_NODE_PARAMS params{};
  size_t bytes;
  void* extra[5];

  explicit KernelParameters(Served& served) : bytes(served.template get<"parameters">().array().size()) {
    const schema::LaunchShape& shape = served.template get<"shape">().value();
    extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
    extra[1] = served.template get<"parameters">().array().data();
    extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
    extra[3] = &bytes;
    extra[4] = CU_LAUNCH_PARAM_END;
    params.gridDimX = shape.grid[0];
    params.gridDimY = shape.grid[1];
    params.gridDimZ = shape.grid[2];
    params.blockDimX = shape.block[0];
    params.blockDimY = shape.block[1];
    params.blockDimZ = shape.block[2];
    params.sharedMemBytes = shape.sharedBytes;
    params.extra = bytes == 0 ? nullptr : extra;
    if (handles::kindOf(served.template get<"function">().id()) == HandleKind::kernel)
      params.kern = reinterpret_cast<CUkernel>(served.template get<"function">().value());
    else
      params.func = served.template get<"function">().value();
    params.ctx = served.template get<"context">().value();
  }
};

void addKernel(Session& session, Call& call) {
  Served<AddKernel> served(session, call);
  if (!served.open()) return;
  KernelParameters parameters(served);
  auto& dependencies = served.get<"dependencies">().array();
  served.close(session.driver().cuGraphAddKernelNode_v2(served.get<"node">().pass(),
                                                        served.get<"graph">().value(), dependencies.data(),
                                                        dependencies.size(), &parameters.params));
}

void setKernel(Session& session, Call& call) {
  Served<SetKernel> served(session, call);
  if (!served.open()) return;
  KernelParameters parameters(served);
  CUgraphExec exec = served.get<"exec">().value();
  CUgraphNode node = served.get<"node">().value();
  served.close(exec != nullptr
                   ? session.driver().cuGraphExecKernelNodeSetParams_v2(exec, node, &parameters.params)
                   : session.driver().cuGraphKernelNodeSetParams_v2(node, &parameters.params));
}

// The driver returns kernelParams or a buffer, as the node was made; the wire carries a packed buffer.
void pack(Session& session, const CUDA_KERNEL_NODE_PARAMS& params, std::vector<unsigned char>& room,
          size_t& used) {
  used = 0;
  if (params.extra != nullptr) {
    const void* data = nullptr;
    size_t bytes = 0;
    for (void** p = params.extra; *p != CU_LAUNCH_PARAM_END; p += 2) {
      if (*p == CU_LAUNCH_PARAM_BUFFER_POINTER) data = p[1];
      if (*p == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(p[1]);
    }
    used = std::min(bytes, room.size());
    if (used != 0) std::memcpy(room.data(), data, used);
    return;
  }
  if (params.kernelParams == nullptr) return;
  for (size_t i = 0;; ++i) {
    size_t offset = 0, size = 0;
    CUresult status = params.func != nullptr
                          ? session.driver().cuFuncGetParamInfo(params.func, i, &offset, &size)
                          : session.driver().cuKernelGetParamInfo(params.kern, i, &offset, &size);
    if (status != CUDA_SUCCESS || offset + size > room.size()) return;
    std::memcpy(room.data() + offset, params.kernelParams[i], size);
    used = std::max(used, offset + size);
  }
}

// What a node launches, as far as the session has handles for it. The function of a kernel that was captured
// may be one that nobody asked for; then the driver names the kernel, or it is found by its function.
struct Names {
  CUfunction function = nullptr;
  CUkernel kernel = nullptr;
};
Names namesOf(Session& session, const CUDA_KERNEL_NODE_PARAMS& params) {
  Names names;
  if (params.func != nullptr && session.objects().known(params.func) != 0) names.function = params.func;
  if (params.kern != nullptr && session.objects().known(params.kern) != 0) names.kernel = params.kern;
  auto cast = reinterpret_cast<CUkernel>(params.func);  // a kernel may stand where a function is expected
  if (cast != nullptr && names.kernel == nullptr && session.objects().known(cast) != 0) names.kernel = cast;
  if (names.function != nullptr || names.kernel != nullptr) return names;
  session.objects().forEach(HandleKind::kernel, [&](uint64_t, uint64_t real) {
    CUfunction its = nullptr;
    auto kernel = reinterpret_cast<CUkernel>(real);
    if (names.kernel == nullptr && session.driver().cuKernelGetFunction(&its, kernel) == CUDA_SUCCESS &&
        its == params.func)
      names.kernel = kernel;
  });
  return names;
}

void getKernel(Session& session, Call& call) {
  Served<GetKernel> served(session, call);
  if (!served.open()) return;
  CUDA_KERNEL_NODE_PARAMS params{};
  CUresult status = session.driver().cuGraphKernelNodeGetParams_v2(served.get<"node">().value(), &params);
  if (status == CUDA_SUCCESS) {
    Names names = namesOf(session, params);
    if (served.get<"function">().wanted()) *served.get<"function">().pass() = names.function;
    if (served.get<"kernel">().wanted()) *served.get<"kernel">().pass() = names.kernel;
    if (served.get<"context">().wanted()) *served.get<"context">().pass() = params.ctx;
    served.get<"shape">().plain() = {{params.gridDimX, params.gridDimY, params.gridDimZ},
                                     {params.blockDimX, params.blockDimY, params.blockDimZ},
                                     params.sharedMemBytes,
                                     0};
    pack(session, params, served.get<"parameters">().array(), served.get<"parameterBytes">().plain());
  }
  served.close(status);
}

void addHost(Session& session, Call& call) {
  Served<AddHost> served(session, call);
  if (!served.open()) return;
  CUDA_HOST_NODE_PARAMS params{&session_callbacks::hostNode,
                               session_callbacks::dataOf(session, served.get<"callback">().value())};
  auto& dependencies = served.get<"dependencies">().array();
  served.close(session.driver().cuGraphAddHostNode(served.get<"node">().pass(), served.get<"graph">().value(),
                                                   dependencies.data(), dependencies.size(), &params));
}

void setHost(Session& session, Call& call) {
  Served<SetHost> served(session, call);
  if (!served.open()) return;
  CUDA_HOST_NODE_PARAMS params{&session_callbacks::hostNode,
                               session_callbacks::dataOf(session, served.get<"callback">().value())};
  CUgraphExec exec = served.get<"exec">().value();
  CUgraphNode node = served.get<"node">().value();
  served.close(exec != nullptr ? session.driver().cuGraphExecHostNodeSetParams(exec, node, &params)
                               : session.driver().cuGraphHostNodeSetParams(node, &params));
}

void getHost(Session& session, Call& call) {
  Served<GetHost> served(session, call);
  if (!served.open()) return;
  CUDA_HOST_NODE_PARAMS params{};
  CUresult status = session.driver().cuGraphHostNodeGetParams(served.get<"node">().value(), &params);
  if (status == CUDA_SUCCESS)
    served.get<"callback">().plain() = session_callbacks::idOf(params.fn, params.userData);
  served.close(status);
}

void instantiate(Session& session, Call& call) {
  Served<Instantiate> served(session, call);
  if (!served.open()) return;
  CUDA_GRAPH_INSTANTIATE_PARAMS params{};
  params.flags = served.get<"flags">().value();
  CUresult status = session.driver().cuGraphInstantiateWithParams(served.get<"exec">().pass(),
                                                                  served.get<"graph">().value(), &params);
  if (served.get<"errorNode">().wanted()) *served.get<"errorNode">().pass() = params.hErrNode_out;
  served.get<"result">().plain() = params.result_out;
  served.close(status);
}

void update(Session& session, Call& call) {
  Served<Update> served(session, call);
  if (!served.open()) return;
  CUgraphExecUpdateResultInfo info{};
  CUresult status = session.driver().cuGraphExecUpdate_v2(served.get<"exec">().value(),
                                                          served.get<"graph">().value(), &info);
  served.get<"result">().plain() = info.result;
  if (served.get<"errorNode">().wanted()) *served.get<"errorNode">().pass() = info.errorNode;
  if (served.get<"errorFrom">().wanted()) *served.get<"errorFrom">().pass() = info.errorFromNode;
  served.close(status);
}

// The names of what ends with a node or graph: asked before, forgotten once it has ended.
class Ending {
 public:
  explicit Ending(Session& session) : session_(session) {}

  void addNode(CUgraphNode node) {
    CUgraphNodeType type{};
    CUgraph child = nullptr;
    const Driver& driver = session_.driver();
    if (driver.cuGraphNodeGetType(node, &type) == CUDA_SUCCESS && type == CU_GRAPH_NODE_TYPE_GRAPH &&
        driver.cuGraphChildGraphNodeGetGraph(node, &child) == CUDA_SUCCESS && child != nullptr)
      addGraph(child);
    if (auto bodies = session_.bodies().find(node); bodies != session_.bodies().end() && child == nullptr)
      for (CUgraph body : bodies->second) addGraph(body);
    nodes_.push_back(node);
  }
  void addGraph(CUgraph graph) {
    const Driver& driver = session_.driver();
    graphs_.push_back(graph);
    size_t count = 0;
    if (driver.cuGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS || count == 0) return;
    std::vector<CUgraphNode> nodes(count);
    if (driver.cuGraphGetNodes(graph, nodes.data(), &count) != CUDA_SUCCESS) return;
    nodes.resize(std::min(count, nodes.size()));
    for (CUgraphNode node : nodes) addNode(node);
  }
  // Gives the status back.
  CUresult after(CUresult status) {
    if (status != CUDA_SUCCESS) return status;
    for (CUgraph graph : graphs_) session_.objects().forget(graph);
    for (CUgraphNode node : nodes_) {
      session_.bodies().erase(node);
      session_.objects().forget(node);
    }
    return status;
  }

 private:
  Session& session_;
  std::vector<CUgraph> graphs_;
  std::vector<CUgraphNode> nodes_;
};

// A graph that is part of a node ends with it. The driver does not promise to refuse an earlier end.
bool isInner(Session& session, CUgraph graph) {
  for (auto& [node, bodies] : session.bodies())
    if (std::find(bodies.begin(), bodies.end(), graph) != bodies.end()) return true;
  return false;
}

void destroyGraph(Session& session, Call& call) {
  Served<Destroy> served(session, call);
  if (!served.open()) return;
  CUgraph graph = served.get<"hGraph">().value();
  if (graph == nullptr || isInner(session, graph)) return served.close(CUDA_ERROR_INVALID_VALUE);
  Ending ending(session);
  ending.addGraph(graph);
  served.close(ending.after(session.driver().cuGraphDestroy(graph)));
}

void destroyNode(Session& session, Call& call) {
  Served<DestroyNode> served(session, call);
  if (!served.open()) return;
  CUgraphNode node = served.get<"hNode">().value();
  if (node == nullptr) return served.close(CUDA_ERROR_INVALID_VALUE);
  Ending ending(session);
  ending.addNode(node);
  served.close(ending.after(session.driver().cuGraphDestroyNode(node)));
}

// Every address lies in the session's memory.
bool ownsOperations(Session& session, const std::vector<CUstreamBatchMemOpParams>& operations) {
  return std::all_of(operations.begin(), operations.end(), [&](const CUstreamBatchMemOpParams& one) {
    switch (one.operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        session.noteWaitForValue();
        return session.space().owns(one.waitValue.address, 4);
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        session.noteWaitForValue();
        return session.space().owns(one.waitValue.address, 8);
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        return session.space().owns(one.writeValue.address, 4);
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        return session.space().owns(one.writeValue.address, 8);
      default:
        return one.operation == CU_STREAM_MEM_OP_BARRIER ||
               one.operation == CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES;
    }
  });
}

template <class Served>
CUDA_BATCH_MEM_OP_NODE_PARAMS operationsOf(Served& served) {
  auto& operations = served.template get<"operations">().array();
  return {served.template get<"context">().value(), static_cast<unsigned>(operations.size()),
          operations.data(), 0};
}

void addMemOps(Session& session, Call& call) {
  Served<AddMemOps> served(session, call);
  if (!served.open()) return;
  if (!ownsOperations(session, served.get<"operations">().array()))
    return served.close(CUDA_ERROR_INVALID_VALUE);
  CUDA_BATCH_MEM_OP_NODE_PARAMS params = operationsOf(served);
  auto& dependencies = served.get<"dependencies">().array();
  served.close(session.driver().cuGraphAddBatchMemOpNode(served.get<"node">().pass(),
                                                         served.get<"graph">().value(), dependencies.data(),
                                                         dependencies.size(), &params));
}

void setMemOps(Session& session, Call& call) {
  Served<SetMemOps> served(session, call);
  if (!served.open()) return;
  if (!ownsOperations(session, served.get<"operations">().array()))
    return served.close(CUDA_ERROR_INVALID_VALUE);
  CUDA_BATCH_MEM_OP_NODE_PARAMS params = operationsOf(served);
  CUgraphExec exec = served.get<"exec">().value();
  CUgraphNode node = served.get<"node">().value();
  served.close(exec != nullptr ? session.driver().cuGraphExecBatchMemOpNodeSetParams(exec, node, &params)
                               : session.driver().cuGraphBatchMemOpNodeSetParams(node, &params));
}

void getMemOps(Session& session, Call& call) {
  Served<GetMemOps> served(session, call);
  if (!served.open()) return;
  CUDA_BATCH_MEM_OP_NODE_PARAMS params{};
  CUresult status = session.driver().cuGraphBatchMemOpNodeGetParams(served.get<"node">().value(), &params);
  auto& room = served.get<"operations">().array();
  size_t count = status == CUDA_SUCCESS ? std::min<size_t>(params.count, room.size()) : 0;
  if (count != 0) std::copy_n(params.paramArray, count, room.begin());
  served.get<"count">().plain() = count;
  if (served.get<"context">().wanted()) *served.get<"context">().pass() = params.ctx;
  served.close(status);
}

void addConditional(Session& session, Call& call) {
  Served<AddConditional> served(session, call);
  if (!served.open()) return;
  auto& bodies = served.get<"bodies">().array();
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  params.conditional.handle = served.get<"condition">().value();
  params.conditional.type = static_cast<CUgraphConditionalNodeType>(served.get<"type">().value());
  params.conditional.size = static_cast<unsigned>(served.get<"size">().plain());
  params.conditional.ctx = served.get<"context">().value();
  auto& dependencies = served.get<"dependencies">().array();
  CUgraphNode* node = served.get<"node">().pass();
  CUresult status = session.driver().cuGraphAddNode_v2(
      node, served.get<"graph">().value(), dependencies.data(), nullptr, dependencies.size(), &params);
  if (status == CUDA_SUCCESS && params.conditional.phGraph_out != nullptr) {
    const CUgraph* made = params.conditional.phGraph_out;
    session.bodies()[*node].assign(made, made + params.conditional.size);
    std::copy_n(made, std::min<size_t>(bodies.size(), params.conditional.size), bodies.begin());
  }
  served.close(status);
}

void moveChild(Session& session, Call& call) {
  Served<MoveChild> served(session, call);
  if (!served.open()) return;
  CUgraph child = served.get<"child">().value();
  if (child == nullptr || isInner(session, child)) return served.close(CUDA_ERROR_INVALID_VALUE);
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = child;
  params.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
  auto& dependencies = served.get<"dependencies">().array();
  CUgraphNode* node = served.get<"node">().pass();
  CUresult status = session.driver().cuGraphAddNode_v2(
      node, served.get<"graph">().value(), dependencies.data(), nullptr, dependencies.size(), &params);
  if (status == CUDA_SUCCESS) session.bodies()[*node] = {child};
  served.close(status);
}

template <class R, auto Member, schema::Name Parameter>
void memcpyNode(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  bool ours = ownsCopy(session, served.template get<Parameter>().plain());
  served.close(ours ? served.invoke(session.driver().*Member) : CUDA_ERROR_INVALID_VALUE);
}

template <class R, auto Member, schema::Name Parameter>
void memsetNode(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  const CUDA_MEMSET_NODE_PARAMS& set = served.template get<Parameter>().plain();
  unsigned __int128 span = static_cast<unsigned __int128>(set.width) * set.elementSize;
  if (set.height > 1) span += static_cast<unsigned __int128>(set.pitch) * (set.height - 1);
  bool ours = span <= SIZE_MAX && session.space().owns(set.dst, static_cast<size_t>(span));
  served.close(ours ? served.invoke(session.driver().*Member) : CUDA_ERROR_INVALID_VALUE);
}

// The attributes that hold an event are a launch's alone; here their bytes would reach the driver as a
// pointer of the client's choice.
template <class R, auto Member>
void setAttribute(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  auto attribute = served.template get<"attr">().value();
  bool holdsEvent = attribute == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ||
                    attribute == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
  served.close(holdsEvent ? CUDA_ERROR_INVALID_VALUE : served.invoke(session.driver().*Member));
}

}  // namespace

void addGraphHandlers(HandlerTable& table) {
  table.add<AddKernel>(&addKernel);
  table.add<SetKernel>(&setKernel);
  table.add<GetKernel>(&getKernel);
  table.add<AddHost>(&addHost);
  table.add<SetHost>(&setHost);
  table.add<GetHost>(&getHost);
  table.add<Instantiate>(&instantiate);
  table.add<Update>(&update);
  table.add<Destroy>(&destroyGraph);
  table.add<DestroyNode>(&destroyNode);
  table.add<AddConditional>(&addConditional);
  table.add<MoveChild>(&moveChild);
  table.add<AddMemOps>(&addMemOps);
  table.add<SetMemOps>(&setMemOps);
  table.add<GetMemOps>(&getMemOps);
  table.add<AddMemcpy>(&memcpyNode<AddMemcpy, &Driver::cuGraphAddMemcpyNode, "copyParams">);
  table.add<SetMemcpy>(&memcpyNode<SetMemcpy, &Driver::cuGraphMemcpyNodeSetParams, "nodeParams">);
  table.add<ExecSetMemcpy>(&memcpyNode<ExecSetMemcpy, &Driver::cuGraphExecMemcpyNodeSetParams, "copyParams">);
  table.add<AddMemset>(&memsetNode<AddMemset, &Driver::cuGraphAddMemsetNode, "memsetParams">);
  table.add<SetMemset>(&memsetNode<SetMemset, &Driver::cuGraphMemsetNodeSetParams, "nodeParams">);
  table.add<ExecSetMemset>(
      &memsetNode<ExecSetMemset, &Driver::cuGraphExecMemsetNodeSetParams, "memsetParams">);
  table.add<NodeSetAttribute>(&setAttribute<NodeSetAttribute, &Driver::cuGraphKernelNodeSetAttribute>);
  table.add<StreamSetAttribute>(&setAttribute<StreamSetAttribute, &Driver::cuStreamSetAttribute>);
}

}  // namespace gpupool::server
