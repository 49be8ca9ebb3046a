// Driver manual: Context Management (limits, cache and shared memory preferences), Peer Context Memory
// Access: what a context is set to.
#include "server/softgpu/api/context.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {
namespace {

struct LimitDefault {
  CUlimit limit;
  size_t value;
};
constexpr LimitDefault kLimits[] = {
    {CU_LIMIT_STACK_SIZE, 1024},
    {CU_LIMIT_PRINTF_FIFO_SIZE, 8650752},
    {CU_LIMIT_MALLOC_HEAP_SIZE, 8 << 20},
    {CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 2048},
    {CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64},
    {CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 0},
    {CU_LIMIT_SHMEM_SIZE, kSharedPerBlockOptin},
};

CUresult unknownLimit(CUlimit limit) {
  return limit == CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  SOFT_CONTEXT(context);
  std::lock_guard lock(context->settings);
  for (const LimitDefault& known : kLimits) {
    if (known.limit != limit) continue;
    if (limit == CU_LIMIT_STACK_SIZE && value > (512 << 10)) return CUDA_ERROR_INVALID_VALUE;
    if (limit == CU_LIMIT_STACK_SIZE) value = (value + 15) / 16 * 16;
    if (limit == CU_LIMIT_PERSISTING_L2_CACHE_SIZE) value = 0;
    if (limit == CU_LIMIT_MALLOC_HEAP_SIZE) gpupool::softgpu::setHeapLimit(value);
    context->limits[limit] = value;
    return CUDA_SUCCESS;
  }
  return unknownLimit(limit);
}

CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  SOFT_CONTEXT(context);
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(context->settings);
  for (const LimitDefault& known : kLimits) {
    if (known.limit != limit) continue;
    auto set = context->limits.find(limit);
    *value = set == context->limits.end() ? known.value : set->second;
    return CUDA_SUCCESS;
  }
  return unknownLimit(limit);
}

CUresult cuCtxGetCacheConfig(CUfunc_cache* config) {
  SOFT_CONTEXT(context);
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(context->settings);
  *config = context->cacheConfig;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
  SOFT_CONTEXT(context);
  if (config < CU_FUNC_CACHE_PREFER_NONE || config > CU_FUNC_CACHE_PREFER_EQUAL)
    return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(context->settings);
  context->cacheConfig = config;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig* config) {
  SOFT_CONTEXT(context);
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
  SOFT_CONTEXT(context);
  return config > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache() {
  SOFT_CONTEXT(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetExecAffinity(CUexecAffinityParam*, CUexecAffinityType) {
  SOFT_CONTEXT(context);
  return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
  SOFT_CONTEXT(context);
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  auto other = table<Context>().find(peer);
  if (!other || !other->active) return CUDA_ERROR_INVALID_CONTEXT;
  if (other->device == context->device) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(context->settings);
  return context->peers.insert(other->device).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  SOFT_CONTEXT(context);
  auto other = table<Context>().find(peer);
  if (!other) return CUDA_ERROR_INVALID_CONTEXT;
  std::lock_guard lock(context->settings);
  return context->peers.erase(other->device) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}
