// Driver manual: Green Contexts. The worker makes no green context current, so what is about that
// (cuCtxFromGreenCtx, events of green contexts) is not here.
#include "server/softgpu/api/green.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace gpupool::softgpu::api {
namespace {

// With its few multiprocessors this device is cut in smaller parts than the manual's guideline for its
// compute capability says, by the same rules: programs ask for both numbers, as the manual recommends.
constexpr uint32_t kLeast = 2, kAlignment = 2;

// In the part of a CUdevResource that is the driver's own.
struct Origin {
  int32_t device;
  uint32_t split;  // that made it; 0: none
};

void fill(CUdevResource& out, const Origin& origin, uint32_t multiprocessors) {
  out = {};
  out.type = CU_DEV_RESOURCE_TYPE_SM;
  out.sm = {multiprocessors, kLeast, kAlignment};
  std::memcpy(out._internal_padding, &origin, sizeof origin);
}

Origin originOf(const CUdevResource& resource) {
  Origin origin{};
  std::memcpy(&origin, resource._internal_padding, sizeof origin);
  return origin;
}

uint32_t nextSplit() {
  static std::atomic<uint32_t> last{0};
  return ++last;
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (!resource) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  fill(*resource, {device, 0}, kMultiprocessors);
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx handle, CUdevResource* resource, CUdevResourceType type) {
  auto green = table<Green>().find(handle);
  if (!green) return CUDA_ERROR_INVALID_CONTEXT;
  if (!resource) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  fill(*resource, {green->primary->device, 0}, green->multiprocessors);
  return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned int* groups, const CUdevResource* input,
                                     CUdevResource* remaining, unsigned int flags, unsigned int minCount) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!groups || !input || flags > 3) return CUDA_ERROR_INVALID_VALUE;
  if (input->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  const uint32_t all = input->sm.smCount;
  if (minCount > all || (result && *groups == 0)) return CUDA_ERROR_INVALID_VALUE;
  Origin origin = originOf(*input);
  if (origin.split != 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  const bool fine = (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) != 0;
  const uint32_t least = fine ? 1 : kLeast, step = fine ? 1 : kAlignment;
  const uint32_t each = (std::max(minCount, least) + step - 1) / step * step;
  const uint32_t possible = all / each;
  if (possible == 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  if (!result) {
    *groups = possible;
    return CUDA_SUCCESS;
  }
  origin.split = nextSplit();
  *groups = std::min(*groups, possible);
  for (unsigned i = 0; i < *groups; ++i) fill(result[i], origin, each);
  if (!remaining) return CUDA_SUCCESS;
  *remaining = {};
  if (const uint32_t rest = all - *groups * each; rest != 0) fill(*remaining, origin, rest);
  return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* out, CUdevResource* resources, unsigned int count) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || !resources || !count) return CUDA_ERROR_INVALID_VALUE;
  auto description = std::make_shared<ResourceDescription>();
  const Origin first = originOf(resources[0]);
  for (unsigned i = 0; i < count; ++i) {
    if (resources[i].type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    const Origin origin = originOf(resources[i]);
    const bool apart = origin.device != first.device || origin.split == 0 || first.split == 0;
    if (i != 0 && apart) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    description->multiprocessors += resources[i].sm.smCount;
  }
  description->device = first.device;
  *out = table<ResourceDescription>().add(description);
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx* out, CUdevResourceDesc handle, CUdevice device, unsigned int flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  auto description = table<ResourceDescription>().find(handle);
  if (!out || !description || description->device != device || flags != CU_GREEN_CTX_DEFAULT_STREAM)
    return CUDA_ERROR_INVALID_VALUE;
  CUcontext primary = nullptr;
  SOFT_TRY(cuDevicePrimaryCtxRetain(&primary, device));
  auto green = std::make_shared<Green>();
  green->primary = table<Context>().find(primary);
  green->multiprocessors = description->multiprocessors;
  *out = table<Green>().add(green);
  return CUDA_SUCCESS;
}

// Its streams are the program's to end, before.
CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
  auto green = table<Green>().take(handle);
  if (!green) return CUDA_ERROR_INVALID_CONTEXT;
  return cuDevicePrimaryCtxRelease_v2(green->primary->device);
}

CUresult cuGreenCtxStreamCreate(CUstream* out, CUgreenCtx handle, unsigned int flags, int priority) {
  auto green = table<Green>().find(handle);
  if (!green) return CUDA_ERROR_INVALID_CONTEXT;
  if (!out || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  if (!green->primary->active) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  auto stream = green->primary->makeStream(flags, priority);
  stream->green = handle;
  *out = table<Stream>().add(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx* green) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (!green) return CUDA_ERROR_INVALID_VALUE;
  *green = stream->green;
  return CUDA_SUCCESS;
}
