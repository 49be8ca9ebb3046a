// Driver manual: Execution Control.
#include "server/softgpu/api/launch.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "server/softgpu/api/capture.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint32_t kMaxParameterBytes = 32764;

CUresult outcomeError(Outcome outcome) {
  switch (outcome) {
    case Outcome::ok:
      return CUDA_SUCCESS;
    case Outcome::illegalAddress:
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    case Outcome::misalignedAddress:
      return CUDA_ERROR_MISALIGNED_ADDRESS;
    case Outcome::illegalInstruction:
      return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    case Outcome::assertion:
      return CUDA_ERROR_ASSERT;
    case Outcome::launchFailed:
      return CUDA_ERROR_LAUNCH_FAILED;
    case Outcome::outOfMemory:
      return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return CUDA_ERROR_UNKNOWN;
}

// GPUPOOL_SOFT_FAIL, see device.h.
CUresult breakage(int device) {
  struct Plan {
    int device = -1, code = 0;
    std::atomic<int> launches{0};
    Plan() {
      int after = 0;
      const char* text = std::getenv("GPUPOOL_SOFT_FAIL");
      if (text != nullptr && std::sscanf(text, "%d:%d:%d", &device, &after, &code) != 3) device = -1;
      launches = after;
    }
  };
  static Plan plan;
  if (plan.device != device || plan.launches.fetch_sub(1) > 0) return CUDA_SUCCESS;
  plan.launches = 0;
  return static_cast<CUresult>(plan.code);
}

CUresult checkShape(const Function& function, const CUDA_KERNEL_NODE_PARAMS& p, bool cooperative) {
  uint64_t threads = uint64_t(p.blockDimX) * p.blockDimY * p.blockDimZ;
  if (!p.gridDimX || !p.gridDimY || !p.gridDimZ || !threads) return CUDA_ERROR_INVALID_VALUE;
  if (p.gridDimX > 0x7fffffff || p.gridDimY > 65535 || p.gridDimZ > 65535) return CUDA_ERROR_INVALID_VALUE;
  if (p.blockDimX > 1024 || p.blockDimY > 1024 || p.blockDimZ > 64 || threads > kMaxThreadsPerBlock) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (threads > function.info->maxThreads) return CUDA_ERROR_INVALID_VALUE;
  if (p.sharedMemBytes > function.dynamicSharedLimit()) return CUDA_ERROR_INVALID_VALUE;
  if (uint64_t(p.sharedMemBytes) + function.info->staticSharedBytes > kSharedPerBlockOptin) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (cooperative) {
    uint64_t blocks = uint64_t(p.gridDimX) * p.gridDimY * p.gridDimZ;
    uint64_t resident = residentBlocks(*function.info, uint32_t(threads), p.sharedMemBytes);
    if (blocks > resident * kMultiprocessors) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  return CUDA_SUCCESS;
}

// CU_LAUNCH_PARAM_BUFFER_POINTER / SIZE.
CUresult packExtra(void** extra, std::vector<std::byte>& packed) {
  const void* buffer = nullptr;
  const size_t* size = nullptr;
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer = extra[1];
    } else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      size = static_cast<const size_t*>(extra[1]);
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (!size || *size > kMaxParameterBytes || (*size && !buffer)) return CUDA_ERROR_INVALID_VALUE;
  // Less than the parameters is taken as it is; nothing, or more than they are, is not.
  if (!*size && !packed.empty()) return CUDA_ERROR_INVALID_VALUE;
  if (*size > packed.size()) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (*size) std::memcpy(packed.data(), buffer, *size);
  return CUDA_SUCCESS;
}

CUresult packParameters(const KernelInfo& info, void** kernelParams, void** extra,
                        KernelOperation& operation) {
  operation.packed.assign(info.parameterBytes, std::byte(0));
  if (extra) {
    if (kernelParams) return CUDA_ERROR_INVALID_VALUE;
    SOFT_TRY(packExtra(extra, operation.packed));
  } else if (!info.parameters.empty()) {
    if (!kernelParams) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < info.parameters.size(); ++i) {
      const Parameter& parameter = info.parameters[i];
      if (!kernelParams[i]) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(operation.packed.data() + parameter.offset, kernelParams[i], parameter.size);
    }
  }
  for (const Parameter& parameter : info.parameters) {
    operation.pointers.push_back(operation.packed.data() + parameter.offset);
  }
  operation.parameters.kernelParams = operation.pointers.data();
  operation.parameters.extra = nullptr;
  return CUDA_SUCCESS;
}

CUresult launch(const CUDA_KERNEL_NODE_PARAMS& parameters, bool cooperative, CUstream handle) {
  SOFT_CONTEXT(current);
  if (!parameters.func) return CUDA_ERROR_INVALID_HANDLE;
  SOFT_STREAM(stream, handle, current);
  SOFT_TRY(stream->context->sticky);
  std::shared_ptr<KernelOperation> operation;
  SOFT_TRY(makeKernelOperation(stream->context, parameters, cooperative, operation));
  return submitOperation(*stream, operation, Submit::asynchronous, true);
}

// The attributes of cuLaunchKernelEx that change what runs; the others are hints to hardware this device
// lacks.
CUresult readAttributes(const CUlaunchConfig& config, bool& cooperative) {
  if (config.numAttrs && !config.attrs) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    switch (int(attribute.id)) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        cooperative = attribute.value.cooperative != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: {
        auto& cluster = attribute.value.clusterDim;
        if (cluster.x * cluster.y * cluster.z > 1) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        break;
      }
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        return CUDA_ERROR_NOT_SUPPORTED;
      default:
        break;
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult KernelOperation::run(Context&) const {
  Launch launch;
  launch.kernel = function->kernel;
  const auto& p = parameters;
  uint32_t grid[3] = {p.gridDimX, p.gridDimY, p.gridDimZ}, block[3] = {p.blockDimX, p.blockDimY, p.blockDimZ};
  std::copy(grid, grid + 3, launch.grid);
  std::copy(block, block + 3, launch.block);
  launch.dynamicSharedBytes = p.sharedMemBytes;
  launch.parameters = packed;
  launch.cooperative = cooperative;
  launch.device = function->context->device;
  if (const CUresult broken = breakage(launch.device); broken != CUDA_SUCCESS) return broken;
  return outcomeError(gpupool::softgpu::run(launch));
}

CUresult makeKernelOperation(const ContextPtr& context, const CUDA_KERNEL_NODE_PARAMS& parameters,
                             bool cooperative, std::shared_ptr<KernelOperation>& out) {
  auto operation = std::make_shared<KernelOperation>();
  CUfunction handle = parameters.func ? parameters.func : reinterpret_cast<CUfunction>(parameters.kern);
  SOFT_TRY(resolveFunction(handle, context, operation->function));
  SOFT_TRY(checkShape(*operation->function, parameters, cooperative));
  operation->parameters = parameters;
  // The function it resolved to, and the kernel that is of: runtimes find their own by the latter.
  operation->parameters.func = operation->function->handle;
  operation->parameters.kern = operation->function->origin;
  operation->parameters.ctx = context->handle;
  operation->cooperative = cooperative;
  SOFT_TRY(packParameters(*operation->function->info, parameters.kernelParams, parameters.extra, *operation));
  out = std::move(operation);
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuLaunchKernel(CUfunction f, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                        unsigned int blockX, unsigned int blockY, unsigned int blockZ, unsigned int shared,
                        CUstream stream, void** kernelParams, void** extra) {
  CUDA_KERNEL_NODE_PARAMS p{f,      gridX,  gridY,        gridZ, blockX,  blockY,
                            blockZ, shared, kernelParams, extra, nullptr, nullptr};
  return launch(p, false, stream);
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gridX, unsigned int gridY, unsigned int gridZ,
                                   unsigned int blockX, unsigned int blockY, unsigned int blockZ,
                                   unsigned int shared, CUstream stream, void** kernelParams) {
  CUDA_KERNEL_NODE_PARAMS p{f,      gridX,  gridY,        gridZ,   blockX,  blockY,
                            blockZ, shared, kernelParams, nullptr, nullptr, nullptr};
  return launch(p, true, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  bool cooperative = false;
  SOFT_TRY(readAttributes(*config, cooperative));
  CUDA_KERNEL_NODE_PARAMS p{f,
                            config->gridDimX,
                            config->gridDimY,
                            config->gridDimZ,
                            config->blockDimX,
                            config->blockDimY,
                            config->blockDimZ,
                            config->sharedMemBytes,
                            kernelParams,
                            extra,
                            nullptr,
                            nullptr};
  return launch(p, cooperative, config->hStream);
}
