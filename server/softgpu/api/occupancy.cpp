// Driver manual: Occupancy. The engine says how many blocks it claims to hold; the rest follows.
#include <algorithm>

#include "server/softgpu/api/launch.h"

namespace gpupool::softgpu::api {
namespace {

// Any context will do for a CUkernel; without one only functions can be asked about.
CUresult anyFunction(CUfunction handle, FunctionPtr& function) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if ((function = table<Function>().find(handle))) return CUDA_SUCCESS;
  SOFT_CONTEXT(context);
  return resolveFunction(handle, context, function);
}

uint32_t resident(const Function& function, uint64_t threads, uint64_t dynamicShared) {
  if (!threads || threads > function.info->maxThreads) return 0;
  if (dynamicShared + function.info->staticSharedBytes > kSharedPerBlockOptin) return 0;
  return residentBlocks(*function.info, uint32_t(threads), uint32_t(dynamicShared));
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction handle, int blockSize,
                                                              size_t shared, unsigned int flags) {
  FunctionPtr function;
  SOFT_TRY(anyFunction(handle, function));
  if (!blocks || blockSize <= 0 || flags > CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE)
    return CUDA_ERROR_INVALID_VALUE;
  *blocks = int(resident(*function, uint64_t(blockSize), shared));
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int blockSize,
                                                     size_t shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, handle, blockSize, shared, 0);
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* minGrid, int* blockSize, CUfunction handle,
                                                   CUoccupancyB2DSize sharedOf, size_t shared, int limit,
                                                   unsigned int flags) {
  FunctionPtr function;
  SOFT_TRY(anyFunction(handle, function));
  if (!minGrid || !blockSize || limit < 0 || flags > CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  uint32_t top = function->info->maxThreads;
  if (limit) top = std::min(top, uint32_t(limit));
  uint64_t bestThreads = 0;
  int bestSize = 0, bestBlocks = 0;
  for (uint32_t size = (top + kWarpSize - 1) / kWarpSize * kWarpSize; size > 0; size -= kWarpSize) {
    uint32_t actual = std::min(size, top);
    uint32_t blocks = resident(*function, actual, sharedOf ? sharedOf(int(actual)) : shared);
    if (uint64_t(blocks) * actual <= bestThreads) continue;
    bestThreads = uint64_t(blocks) * actual;
    bestSize = int(actual);
    bestBlocks = int(blocks);
  }
  *blockSize = bestSize;
  *minGrid = bestBlocks * int(kMultiprocessors);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSize(int* minGrid, int* blockSize, CUfunction handle,
                                          CUoccupancyB2DSize sharedOf, size_t shared, int limit) {
  return cuOccupancyMaxPotentialBlockSizeWithFlags(minGrid, blockSize, handle, sharedOf, shared, limit, 0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction handle, int blocks,
                                                 int blockSize) {
  FunctionPtr function;
  SOFT_TRY(anyFunction(handle, function));
  if (!bytes || blocks <= 0 || blockSize <= 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t share = kSharedPerMultiprocessor / uint64_t(blocks);
  uint64_t fixed = function->info->staticSharedBytes + kReservedShared;
  uint64_t available = share > fixed ? share - fixed : 0;
  *bytes = std::min<uint64_t>(available, kSharedPerBlockOptin - function->info->staticSharedBytes);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialClusterSize(int* size, CUfunction handle, const CUlaunchConfig* config) {
  FunctionPtr function;
  SOFT_TRY(anyFunction(handle, function));
  if (!size || !config) return CUDA_ERROR_INVALID_VALUE;
  *size = 1;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction handle, const CUlaunchConfig* config) {
  FunctionPtr function;
  SOFT_TRY(anyFunction(handle, function));
  if (!clusters || !config) return CUDA_ERROR_INVALID_VALUE;
  uint64_t blocksOfCluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    auto& cluster = config->attrs[i].value.clusterDim;
    blocksOfCluster = uint64_t(cluster.x) * cluster.y * cluster.z;
  }
  uint64_t threads = uint64_t(config->blockDimX) * config->blockDimY * config->blockDimZ;
  // Clusters of more than one block do not run here.
  *clusters =
      blocksOfCluster > 1 ? 0 : int(resident(*function, threads, config->sharedMemBytes) * kMultiprocessors);
  return CUDA_SUCCESS;
}
