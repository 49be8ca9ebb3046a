// Driver manual: Memory Management: arrays and mipmapped arrays.
#include "server/softgpu/api/array.h"

#include <algorithm>
#include <cstring>
#include <shared_mutex>

#include "server/softgpu/api/capture.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint64_t kPitch = 32;
constexpr unsigned kArrayFlags = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST | CUDA_ARRAY3D_CUBEMAP |
                                 CUDA_ARRAY3D_TEXTURE_GATHER | CUDA_ARRAY3D_COLOR_ATTACHMENT;

CUresult checkDescriptor(const CUDA_ARRAY3D_DESCRIPTOR& d) {
  if (!formatBytes(d.Format)) return CUDA_ERROR_INVALID_VALUE;
  if (d.NumChannels != 1 && d.NumChannels != 2 && d.NumChannels != 4) return CUDA_ERROR_INVALID_VALUE;
  if (!d.Width || (d.Flags & ~kArrayFlags))
    return d.Width ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  bool layered = d.Flags & CUDA_ARRAY3D_LAYERED, cubemap = d.Flags & CUDA_ARRAY3D_CUBEMAP;
  if (layered && !d.Depth) return CUDA_ERROR_INVALID_VALUE;
  if (!layered && d.Depth && !d.Height) return CUDA_ERROR_INVALID_VALUE;
  if (cubemap && (d.Width != d.Height || (layered ? d.Depth % 6 != 0 : d.Depth != 6)))
    return CUDA_ERROR_INVALID_VALUE;
  size_t limit = 131072;
  if (d.Width > limit || d.Height > limit || d.Depth > 16384) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// Extents and strides; the storage comes later.
ArrayPtr layOut(const ContextPtr& context, const CUDA_ARRAY3D_DESCRIPTOR& d) {
  auto array = std::make_shared<Array>();
  array->context = context;
  array->descriptor = d;
  array->width = uint32_t(d.Width);
  array->height = uint32_t(std::max<size_t>(d.Height, 1));
  array->depth = uint32_t(std::max<size_t>(d.Depth, 1));
  array->elementBytes = formatBytes(d.Format) * d.NumChannels;
  array->pitch = (uint64_t(array->width) * array->elementBytes + kPitch - 1) / kPitch * kPitch;
  array->slice = array->pitch * array->height;
  return array;
}

CUresult allocateStorage(Device& device, uint64_t bytes, std::shared_ptr<ArrayStorage>& out) {
  auto storage = std::make_shared<ArrayStorage>();
  if (!device.reserve(VaHeap::rounded(bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
  storage->device = device.ordinal();
  storage->base = device.heap().allocate(bytes, VaHeap::kGrain);
  storage->bytes = bytes;
  if (!storage->base) {
    device.release(VaHeap::rounded(bytes));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // As dirty as a device's, so that whoever relies on zeros is found.
  std::memset(reinterpret_cast<void*>(storage->base), 0xa5, bytes);
  out = storage;
  return CUDA_SUCCESS;
}

CUresult create(CUarray* out, const CUDA_ARRAY3D_DESCRIPTOR* descriptor) {
  SOFT_CONTEXT(context);
  if (!out || !descriptor) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkDescriptor(*descriptor));
  SOFT_TRY(forbidDuringCapture(*context));
  auto array = layOut(context, *descriptor);
  SOFT_TRY(allocateStorage(context->deviceObject(), array->slice * array->depth, array->storage));
  array->base = array->storage->base;
  *out = table<Array>().add(array);
  return CUDA_SUCCESS;
}

CUresult findArray(CUarray handle, ArrayPtr& array) {
  SOFT_CONTEXT(context);
  array = table<Array>().find(handle);
  return array ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

uint32_t formatBytes(CUarray_format format) {
  switch (int(format)) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return 4;
    default:
      return 0;
  }
}

ArrayStorage::~ArrayStorage() {
  if (!base) return;
  Device& owner = *devices()[size_t(device)];
  std::unique_lock lock(unmapMutex());
  owner.heap().free(base, bytes);
  owner.release(VaHeap::rounded(bytes));
}

int Array::dimensions() const {
  if (!layered() && !cubemap() && descriptor.Depth) return 3;
  return descriptor.Height ? 2 : 1;
}

void releaseArrays(Context& context) {
  auto mipmaps =
      table<MipmappedArray>().takeIf([&](const MipmappedArray& m) { return m.context.get() == &context; });
  auto arrays = table<Array>().takeIf([&](const Array& a) { return a.context.get() == &context; });
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuArrayCreate_v2(CUarray* out, const CUDA_ARRAY_DESCRIPTOR* d) {
  if (!d) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY3D_DESCRIPTOR full{d->Width, d->Height, 0, d->Format, d->NumChannels, 0};
  return create(out, &full);
}

CUresult cuArray3DCreate_v2(CUarray* out, const CUDA_ARRAY3D_DESCRIPTOR* descriptor) {
  return create(out, descriptor);
}

CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR* d, CUarray handle) {
  ArrayPtr array;
  SOFT_TRY(findArray(handle, array));
  if (!d) return CUDA_ERROR_INVALID_VALUE;
  auto& full = array->descriptor;
  *d = {full.Width, full.Height, full.Format, full.NumChannels};
  return CUDA_SUCCESS;
}

CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR* d, CUarray handle) {
  ArrayPtr array;
  SOFT_TRY(findArray(handle, array));
  if (!d) return CUDA_ERROR_INVALID_VALUE;
  *d = array->descriptor;
  return CUDA_SUCCESS;
}

CUresult cuArrayDestroy(CUarray handle) {
  ArrayPtr array;
  SOFT_TRY(findArray(handle, array));
  if (array->level) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(forbidDuringCapture(*array->context));
  SOFT_TRY(array->context->synchronize());
  return table<Array>().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS* r, CUarray handle, CUdevice) {
  ArrayPtr array;
  SOFT_TRY(findArray(handle, array));
  if (!r) return CUDA_ERROR_INVALID_VALUE;
  *r = {};
  r->size = array->slice * array->depth;
  r->alignment = VaHeap::kGrain;
  return CUDA_SUCCESS;
}

CUresult cuArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES*, CUarray) {
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMipmappedArrayGetSparseProperties(CUDA_ARRAY_SPARSE_PROPERTIES*, CUmipmappedArray) {
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuArrayGetPlane(CUarray*, CUarray, unsigned int) {
  return CUDA_ERROR_INVALID_VALUE;
}  // no planar formats

CUresult cuMipmappedArrayCreate(CUmipmappedArray* out, const CUDA_ARRAY3D_DESCRIPTOR* d,
                                unsigned int levels) {
  SOFT_CONTEXT(context);
  if (!out || !d || !levels) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkDescriptor(*d));
  SOFT_TRY(forbidDuringCapture(*context));
  size_t largest = std::max(d->Width, d->Height);
  if (!(d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP))) largest = std::max(largest, d->Depth);
  unsigned most = 1;
  while (largest >> most) ++most;
  levels = std::min(levels, most);
  auto mipmap = std::make_shared<MipmappedArray>();
  mipmap->context = context;
  mipmap->descriptor = *d;
  uint64_t bytes = 0;
  for (unsigned level = 0; level < levels; ++level) {
    CUDA_ARRAY3D_DESCRIPTOR part = *d;
    auto smaller = [&](size_t extent) { return extent ? std::max<size_t>(extent >> level, 1) : 0; };
    part.Width = smaller(d->Width);
    part.Height = smaller(d->Height);
    if (!(d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP))) part.Depth = smaller(d->Depth);
    auto array = layOut(context, part);
    array->level = true;
    array->base = bytes;
    bytes += (array->slice * array->depth + VaHeap::kGrain - 1) / VaHeap::kGrain * VaHeap::kGrain;
    mipmap->levels.push_back(array);
  }
  std::shared_ptr<ArrayStorage> storage;
  SOFT_TRY(allocateStorage(context->deviceObject(), bytes, storage));
  for (auto& array : mipmap->levels) {
    array->storage = storage;
    array->base += storage->base;
  }
  *out = table<MipmappedArray>().add(mipmap);
  return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetLevel(CUarray* out, CUmipmappedArray handle, unsigned int level) {
  SOFT_CONTEXT(context);
  auto mipmap = table<MipmappedArray>().find(handle);
  if (!mipmap) return CUDA_ERROR_INVALID_HANDLE;
  if (!out || level >= mipmap->levels.size()) return CUDA_ERROR_INVALID_VALUE;
  auto& array = mipmap->levels[level];
  std::lock_guard lock(captureMutex());
  if (!array->handle) table<Array>().add(array);
  *out = array->handle;
  return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle) {
  SOFT_CONTEXT(context);
  auto mipmap = table<MipmappedArray>().find(handle);
  if (!mipmap) return CUDA_ERROR_INVALID_HANDLE;
  SOFT_TRY(forbidDuringCapture(*context));
  SOFT_TRY(mipmap->context->synchronize());
  mipmap = table<MipmappedArray>().take(handle);
  if (!mipmap) return CUDA_ERROR_INVALID_HANDLE;
  for (auto& array : mipmap->levels) table<Array>().take(array->handle);
  return CUDA_SUCCESS;
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS* r, CUmipmappedArray handle,
                                               CUdevice) {
  auto mipmap = table<MipmappedArray>().find(handle);
  if (!mipmap) return CUDA_ERROR_INVALID_HANDLE;
  if (!r) return CUDA_ERROR_INVALID_VALUE;
  *r = {};
  r->size = mipmap->levels.front()->storage->bytes;
  r->alignment = VaHeap::kGrain;
  return CUDA_SUCCESS;
}
