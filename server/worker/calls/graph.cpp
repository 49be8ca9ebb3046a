// Graphs whose nodes carry parameters, host functions or host addresses. The rest are plain rows.
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
using Update = GPUPOOL_ROW(sessionGraphUpdate);
using AddMemcpy = GPUPOOL_ROW(cuGraphAddMemcpyNode);
using SetMemcpy = GPUPOOL_ROW(cuGraphMemcpyNodeSetParams);
using GetMemcpy = GPUPOOL_ROW(cuGraphMemcpyNodeGetParams);
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

// A captured launch of a kernel comes back as a function the session may never have seen: the kernel it
// belongs to.
CUfunction nameable(Session& session, CUfunction function) {
  if (session.objects().known(function) != 0) return function;
  CUfunction found = function;
  session.objects().forEach(HandleKind::kernel, [&](uint64_t, uint64_t real) {
    CUfunction its = nullptr;
    auto kernel = reinterpret_cast<CUkernel>(real);
    if (found == function && session.driver().cuKernelGetFunction(&its, kernel) == CUDA_SUCCESS &&
        its == function)
      found = reinterpret_cast<CUfunction>(kernel);
  });
  return found;
}

void getKernel(Session& session, Call& call) {
  Served<GetKernel> served(session, call);
  if (!served.open()) return;
  CUDA_KERNEL_NODE_PARAMS params{};
  CUresult status = session.driver().cuGraphKernelNodeGetParams_v2(served.get<"node">().value(), &params);
  if (status == CUDA_SUCCESS) {
    if (served.get<"function">().wanted())
      *served.get<"function">().pass() =
          params.func != nullptr ? nameable(session, params.func) : reinterpret_cast<CUfunction>(params.kern);
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
                               session_callbacks::make(session, served.get<"callback">().value())};
  auto& dependencies = served.get<"dependencies">().array();
  served.close(session.driver().cuGraphAddHostNode(served.get<"node">().pass(), served.get<"graph">().value(),
                                                   dependencies.data(), dependencies.size(), &params));
}

void setHost(Session& session, Call& call) {
  Served<SetHost> served(session, call);
  if (!served.open()) return;
  CUDA_HOST_NODE_PARAMS params{&session_callbacks::hostNode,
                               session_callbacks::make(session, served.get<"callback">().value())};
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

// Nodes die with their graph, graphs of child nodes with the node.
void forgetNodes(Session& session, CUgraph graph) {
  const Driver& driver = session.driver();
  size_t count = 0;
  if (driver.cuGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS) return;
  std::vector<CUgraphNode> nodes(count);
  if (count == 0 || driver.cuGraphGetNodes(graph, nodes.data(), &count) != CUDA_SUCCESS) return;
  for (CUgraphNode node : nodes) {
    CUgraphNodeType type{};
    CUgraph child = nullptr;
    if (driver.cuGraphNodeGetType(node, &type) == CUDA_SUCCESS && type == CU_GRAPH_NODE_TYPE_GRAPH &&
        driver.cuGraphChildGraphNodeGetGraph(node, &child) == CUDA_SUCCESS && child != nullptr) {
      forgetNodes(session, child);
      session.objects().forget(child);
    }
    session.objects().forget(node);
  }
}

void destroyGraph(Session& session, Call& call) {
  Served<Destroy> served(session, call);
  if (!served.open()) return;
  CUgraph graph = served.get<"hGraph">().value();
  if (graph == nullptr) return served.close(CUDA_ERROR_INVALID_VALUE);
  forgetNodes(session, graph);
  served.close(session.driver().cuGraphDestroy(graph));
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
  table.add<AddMemcpy>(&memcpyNode<AddMemcpy, &Driver::cuGraphAddMemcpyNode, "copyParams">);
  table.add<SetMemcpy>(&memcpyNode<SetMemcpy, &Driver::cuGraphMemcpyNodeSetParams, "nodeParams">);
  table.add<ExecSetMemcpy>(&memcpyNode<ExecSetMemcpy, &Driver::cuGraphExecMemcpyNodeSetParams, "copyParams">);
  table.add<AddMemset>(&memsetNode<AddMemset, &Driver::cuGraphAddMemsetNode, "memsetParams">);
  table.add<SetMemset>(&memsetNode<SetMemset, &Driver::cuGraphMemsetNodeSetParams, "nodeParams">);
  table.add<ExecSetMemset>(
      &memsetNode<ExecSetMemset, &Driver::cuGraphExecMemsetNodeSetParams, "memsetParams">);
  table.add<NodeSetAttribute>(&setAttribute<NodeSetAttribute, &Driver::cuGraphKernelNodeSetAttribute>);
  table.add<StreamSetAttribute>(&setAttribute<StreamSetAttribute, &Driver::cuStreamSetAttribute>);
  table.add<GetMemcpy>(&serveDriver<GetMemcpy, &Driver::cuGraphMemcpyNodeGetParams>);
}

}  // namespace gpupool::server
