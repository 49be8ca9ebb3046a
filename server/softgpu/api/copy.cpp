// Plans and execution of copies.
#include "server/softgpu/api/copy.h"

#include <cstring>
#include <shared_mutex>

#include "server/softgpu/api/array.h"
#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {
namespace {

// Copied under one hold of unmapMutex(): long enough to be cheap, short enough for whoever frees memory.
constexpr uint64_t kChunk = 4 << 20;

struct SideParameters {
  uint64_t x, y, z, lod;
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  CUarray array;
  uint64_t pitch, height;
};

CUresult planArray(const SideParameters& from, const CopyPlan& plan, CopySide& side) {
  auto array = table<Array>().find(from.array);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  if (from.lod) return CUDA_ERROR_INVALID_VALUE;
  uint64_t row = uint64_t(array->width) * array->elementBytes;
  auto fits = [](uint64_t at, uint64_t count, uint64_t limit) { return at <= limit && count <= limit - at; };
  if (!fits(from.x, plan.width, row) || !fits(from.y, plan.height, array->height) ||
      !fits(from.z, plan.depth, array->depth)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  side.pitch = array->pitch;
  side.slice = array->slice;
  side.base = array->base + from.z * side.slice + from.y * side.pitch + from.x;
  side.keep = array->storage;
  return CUDA_SUCCESS;
}

CUresult planLinear(const SideParameters& from, const CopyPlan& plan, bool write, CopySide& side) {
  uint64_t start = from.type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(from.host) : from.device;
  bool rows = plan.height > 1 || plan.depth > 1 || from.y || from.z;
  side.pitch = from.pitch ? from.pitch : rows ? 0 : plan.width + from.x;
  if (rows && side.pitch < plan.width + from.x) return CUDA_ERROR_INVALID_VALUE;
  uint64_t planeRows = from.height ? from.height : plan.height + from.y;
  if ((plan.depth > 1 || from.z) && planeRows < plan.height + from.y) return CUDA_ERROR_INVALID_VALUE;
  side.slice = side.pitch * planeRows;
  side.base = start + from.z * side.slice + from.y * side.pitch + from.x;
  uint64_t extent = (plan.depth - 1) * side.slice + (plan.height - 1) * side.pitch + plan.width;
  if (!side.base) return CUDA_ERROR_INVALID_VALUE;
  side.known = addresses().covers(side.base, extent, write);
  if (side.known) return CUDA_SUCCESS;
  // A range that starts in known memory but leaves it is wrong, and so is device memory nobody knows.
  if (from.type == CU_MEMORYTYPE_DEVICE || !isPageable(side.base)) return CUDA_ERROR_INVALID_VALUE;
  side.pageable = true;
  return CUDA_SUCCESS;
}

CUresult planSide(const SideParameters& from, const CopyPlan& plan, bool write, CopySide& side) {
  switch (from.type) {
    case CU_MEMORYTYPE_ARRAY:
      return planArray(from, plan, side);
    case CU_MEMORYTYPE_HOST:
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_UNIFIED:
      return planLinear(from, plan, write, side);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult copyRow(const CopyPlan& plan, uint64_t from, uint64_t to) {
  for (uint64_t done = 0; done < plan.width;) {
    uint64_t part = std::min(kChunk, plan.width - done);
    std::shared_lock lock(unmapMutex());
    if (unmapGeneration() != plan.generation) {
      if (plan.source.known && !addresses().covers(from + done, part, false))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
      if (plan.target.known && !addresses().covers(to + done, part, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    std::memmove(reinterpret_cast<void*>(to + done), reinterpret_cast<const void*>(from + done), part);
    done += part;
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult planCopy(const CUDA_MEMCPY3D& p, CopyPlan& plan) {
  plan.width = p.WidthInBytes;
  plan.height = p.Height;
  plan.depth = p.Depth;
  if (p.reserved0 || p.reserved1) return CUDA_ERROR_INVALID_VALUE;
  if (!plan.width || !plan.height || !plan.depth) {
    plan.width = 0;
    return CUDA_SUCCESS;
  }
  plan.generation = unmapGeneration();
  SOFT_TRY(planSide({p.srcXInBytes, p.srcY, p.srcZ, p.srcLOD, p.srcMemoryType, p.srcHost, p.srcDevice,
                     p.srcArray, p.srcPitch, p.srcHeight},
                    plan, false, plan.source));
  return planSide({p.dstXInBytes, p.dstY, p.dstZ, p.dstLOD, p.dstMemoryType, p.dstHost, p.dstDevice,
                   p.dstArray, p.dstPitch, p.dstHeight},
                  plan, true, plan.target);
}

CUDA_MEMCPY3D linearCopy(CUmemorytype targetType, uint64_t target, CUmemorytype sourceType, uint64_t source,
                         uint64_t bytes) {
  CUDA_MEMCPY3D p{};
  p.dstMemoryType = targetType;
  p.srcMemoryType = sourceType;
  if (targetType == CU_MEMORYTYPE_HOST) {
    p.dstHost = reinterpret_cast<void*>(target);
  } else {
    p.dstDevice = target;
  }
  if (sourceType == CU_MEMORYTYPE_HOST) {
    p.srcHost = reinterpret_cast<const void*>(source);
  } else {
    p.srcDevice = source;
  }
  p.WidthInBytes = bytes;
  p.Height = p.Depth = 1;
  return p;
}

CUresult CopyOperation::run(Context&) const {
  if (!plan.width) return CUDA_SUCCESS;
  for (uint64_t z = 0; z < plan.depth; ++z) {
    for (uint64_t y = 0; y < plan.height; ++y) {
      SOFT_TRY(copyRow(plan, plan.source.base + z * plan.source.slice + y * plan.source.pitch,
                       plan.target.base + z * plan.target.slice + y * plan.target.pitch));
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api
