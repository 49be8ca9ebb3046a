// Kernel nodes of graphs.
#include "client/calls/graph_nodes.h"
#include "client/functions.h"

namespace gpupool::client {
namespace {

using schema::LaunchShape;

KernelParams current(const CUDA_KERNEL_NODE_PARAMS_v1& p) { return commonParams<KernelParams>(p); }
CUDA_KERNEL_NODE_PARAMS_v1 legacy(const KernelParams& p) {
  auto q = commonParams<CUDA_KERNEL_NODE_PARAMS_v1>(p);
  if (q.func == nullptr) q.func = reinterpret_cast<CUfunction>(p.kern);
  return q;
}

// Points into the packed parameters, one pointer a parameter, as the driver's own kernelParams.
CUresult pointInto(NodeInfo& info, CUfunction handle, Context& context) {
  Function* function = findFunction(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  CUresult status = describe(handle, *function, &context);
  if (status != CUDA_SUCCESS) return status;
  const auto& layout = function->state->layout();
  for (const auto& field : layout) {
    size_t end = size_t{field.offset} + field.size;
    if (info.parameters.size() < end) info.parameters.resize(end);
  }
  info.pointers.clear();
  for (const auto& field : layout) info.pointers.push_back(info.parameters.data() + field.offset);
  return CUDA_SUCCESS;
}

struct KernelNode {
  CUfunction handle = nullptr;
  LaunchShape shape;
  std::vector<std::byte> packed;
  std::shared_ptr<NodeInfo> info = std::make_shared<NodeInfo>();

  const unsigned char* data() const { return reinterpret_cast<const unsigned char*>(packed.data()); }

  CUresult read(const KernelParams* params, Context& context) {
    if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (params->func != nullptr && functions.find(toId(params->func)) == nullptr)
      return CUDA_ERROR_INVALID_HANDLE;  // a kernel has a place of its own
    handle = params->func != nullptr ? params->func : reinterpret_cast<CUfunction>(params->kern);
    if (handle == nullptr || (params->kernelParams != nullptr && params->extra != nullptr))
      return CUDA_ERROR_INVALID_VALUE;
    shape = {{params->gridDimX, params->gridDimY, params->gridDimZ},
             {params->blockDimX, params->blockDimY, params->blockDimZ},
             params->sharedMemBytes,
             0};
    CUresult status = packParameters(handle, params->kernelParams, params->extra, context, packed);
    if (status != CUDA_SUCCESS) return status;
    info->type = CU_GRAPH_NODE_TYPE_KERNEL;
    info->function = params->func;
    info->kernel = params->kern;
    info->context = params->ctx != nullptr ? contexts().given(params->ctx) : context.handle;
    info->shape = shape;
    info->parameters = packed;
    return pointInto(*info, handle, context);
  }
};

}  // namespace

CUresult addKernel(CUgraphNode* out, const Place& place, const KernelParams* params) {
  CUresult status;
  Context* context = currentContext(status);
  KernelNode kernel;
  if (status == CUDA_SUCCESS) status = kernel.read(params, *context);
  if (status != CUDA_SUCCESS) return status;
  return createNode(out, place, [&](CUgraphNode& node) {
    CUresult made = Session::get().await<"sessionGraphAddKernelNode">(
        context->handle, &node, place.graph, place.dependencies, place.count, kernel.handle,
        kernel.info->context, kernel.shape, kernel.data(), kernel.packed.size());
    if (made == CUDA_SUCCESS) rememberNode(toId(place.graph), node, kernel.info);
    return made;
  });
}

namespace {

// All of a setting that the driver judges.
uint64_t settingKey(const KernelNode& kernel, const Context& context) {
  const LaunchShape& shape = kernel.shape;
  uint64_t key = mix(0x6e, shape.block[0] | uint64_t{shape.block[1]} << 32);
  key = mix(key, shape.block[2] | uint64_t{shape.sharedBytes} << 32);
  key = mix(key, shape.grid[0] | uint64_t{shape.grid[1]} << 32);
  key = mix(key, shape.grid[2] | uint64_t{kernel.packed.size()} << 32);
  key = mix(mix(key, toId(kernel.handle)), toId(kernel.info->context));
  key = mix(mix(key, toId(context.handle)), context.version.load());
  return mix(key, findFunction(kernel.handle)->state->revision());
}

}  // namespace

CUresult setKernel(CUgraphExec exec, CUgraphNode node, const KernelParams* params) {
  CUresult status;
  Context* context = currentContext(status);
  KernelNode kernel;
  if (status == CUDA_SUCCESS) status = kernel.read(params, *context);
  if (status != CUDA_SUCCESS) return status;
  GraphExec* settings = exec != nullptr ? graphExecs.find(toId(exec)) : nullptr;
  const uint64_t key = settings != nullptr ? settingKey(kernel, *context) : 0;
  if (settings != nullptr && settings->settings.accepted(toId(node), key))
    return Session::get().post<"sessionGraphSetKernelNode">(context->handle, exec, node, kernel.handle,
                                                            kernel.info->context, kernel.shape, kernel.data(),
                                                            kernel.packed.size());
  status = Session::get().await<"sessionGraphSetKernelNode">(context->handle, exec, node, kernel.handle,
                                                             kernel.info->context, kernel.shape,
                                                             kernel.data(), kernel.packed.size());
  if (status == CUDA_SUCCESS && exec == nullptr) rememberNode(0, node, kernel.info);
  if (status == CUDA_SUCCESS && settings != nullptr) settings->settings.accept(toId(node), key);
  return status;
}

namespace {

// A node the driver made while capturing: as the worker describes it.
CUresult fetchKernel(CUgraphNode node, std::shared_ptr<NodeInfo>& out) {
  CUresult status;
  Context* context = currentContext(status);
  if (status != CUDA_SUCCESS) return status;
  auto info = std::make_shared<NodeInfo>();
  std::vector<unsigned char> room(kMaxParameterBytes);
  size_t bytes = room.size();
  status =
      Session::get().await<"sessionGraphGetKernelNode">(context->handle, node, &info->function, &info->kernel,
                                                        &info->context, &info->shape, room.data(), &bytes);
  if (status != CUDA_SUCCESS) return status;
  info->type = CU_GRAPH_NODE_TYPE_KERNEL;
  auto first = reinterpret_cast<const std::byte*>(room.data());
  info->parameters.assign(first, first + std::min(bytes, room.size()));
  status =
      info->launched() == nullptr ? CUDA_ERROR_INVALID_HANDLE : pointInto(*info, info->launched(), *context);
  if (status != CUDA_SUCCESS) return status;
  rememberNode(0, node, info);
  out = std::move(info);
  return CUDA_SUCCESS;
}

// A node has both names of what it launches, whichever it was made with: its function in the context, and the
// kernel that is a function of, by which cudart finds the host's symbol. A module's function has no kernel.
CUresult nameBoth(const NodeInfo& info, KernelParams& params) {
  params.func = info.function;
  params.kern = info.kernel;
  if (kindOf(toId(params.func)) == Kind::kernel) {  // a kernel where a function is expected, as CUDA allows
    if (params.kern == nullptr) params.kern = reinterpret_cast<CUkernel>(params.func);
    params.func = nullptr;
  }
  if (params.func == nullptr) return custom::cuKernelGetFunction(&params.func, params.kern);
  Function* function = functions.find(toId(params.func));
  if (params.kern == nullptr && function != nullptr) params.kern = function->kernel;
  return CUDA_SUCCESS;
}

CUresult getKernel(CUgraphNode node, KernelParams& params) {
  auto info = recallNode(node);
  if (info == nullptr) {
    CUresult status = fetchKernel(node, info);
    if (status != CUDA_SUCCESS) return status;
  }
  if (info->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_ERROR_INVALID_VALUE;
  params = {};
  CUresult status = nameBoth(*info, params);
  if (status != CUDA_SUCCESS) return status;
  params.ctx = info->context;
  params.gridDimX = info->shape.grid[0], params.gridDimY = info->shape.grid[1],
  params.gridDimZ = info->shape.grid[2];
  params.blockDimX = info->shape.block[0], params.blockDimY = info->shape.block[1],
  params.blockDimZ = info->shape.block[2];
  params.sharedMemBytes = info->shape.sharedBytes;
  params.kernelParams = info->pointers.empty() ? nullptr : info->pointers.data();
  return CUDA_SUCCESS;
}

}  // namespace

namespace custom {

CUresult cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                                 const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return addKernel(out, {graph, before, n}, p);
}
CUresult cuGraphAddKernelNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* before, size_t n,
                              const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelParams kernel = current(*p);
  return addKernel(out, {graph, before, n}, &kernel);
}
CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : getKernel(node, *p);
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1* p) {
  KernelParams kernel{};
  CUresult status = p == nullptr ? CUDA_ERROR_INVALID_VALUE : getKernel(node, kernel);
  if (status == CUDA_SUCCESS) *p = legacy(kernel);
  return status;
}
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return setKernel(nullptr, node, p);
}
CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelParams kernel = current(*p);
  return setKernel(nullptr, node, &kernel);
}
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS_v2* p) {
  return exec == nullptr ? CUDA_ERROR_INVALID_VALUE : setKernel(exec, node, p);
}
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* p) {
  if (exec == nullptr || p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KernelParams kernel = current(*p);
  return setKernel(exec, node, &kernel);
}

}  // namespace custom
}  // namespace gpupool::client
