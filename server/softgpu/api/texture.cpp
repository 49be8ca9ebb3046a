// Driver manual: Texture Object Management, Surface Object Management.
#include "server/softgpu/api/texture.h"

#include <algorithm>
#include <cstring>

namespace gpupool::softgpu::api {

template <class T>
uint64_t SlotTable<T>::add(std::shared_ptr<T> object) {
  std::lock_guard lock(mutex_);
  uint64_t slot = 1;
  while (slot < owners_.size() && owners_[slot]) ++slot;
  if (slot >= kSlots) return 0;
  if (slot == owners_.size()) owners_.emplace_back();
  slots_[slot].store(object.get(), std::memory_order_release);
  owners_[slot] = std::move(object);
  return slot;
}

template <class T>
std::shared_ptr<T> SlotTable<T>::find(uint64_t handle) {
  std::lock_guard lock(mutex_);
  return handle && handle < owners_.size() ? owners_[handle] : nullptr;
}

template <class T>
bool SlotTable<T>::remove(uint64_t handle) {
  std::lock_guard lock(mutex_);
  if (!handle || handle >= owners_.size() || !owners_[handle]) return false;
  slots_[handle].store(nullptr, std::memory_order_release);
  graveyard_.push_back(std::move(owners_[handle]));
  owners_[handle] = nullptr;
  if (graveyard_.size() > kGraveyard)
    graveyard_.erase(graveyard_.begin(), graveyard_.begin() + kGraveyard / 2);
  return true;
}

template <class T>
void SlotTable<T>::removeContext(uint64_t contextId) {
  std::vector<uint64_t> found;
  {
    std::lock_guard lock(mutex_);
    for (uint64_t slot = 1; slot < owners_.size(); ++slot) {
      if (owners_[slot] && owners_[slot]->contextId == contextId) found.push_back(slot);
    }
  }
  for (uint64_t slot : found) remove(slot);
}

template class SlotTable<TextureObject>;
template class SlotTable<SurfaceObject>;

SlotTable<TextureObject>& textures() {
  static auto* const instance = new SlotTable<TextureObject>;
  return *instance;
}
SlotTable<SurfaceObject>& surfaces() {
  static auto* const instance = new SlotTable<SurfaceObject>;
  return *instance;
}

namespace {

Sampler::Level arrayLevel(const Array& array) {
  return {array.base, array.pitch, array.slice, array.width, array.height, array.depth};
}

CUresult setFormat(Sampler& sampler, CUarray_format format, unsigned channels) {
  sampler.format = format;
  sampler.channels = channels;
  sampler.channelBytes = formatBytes(format);
  if (!sampler.channelBytes || (channels != 1 && channels != 2 && channels != 4))
    return CUDA_ERROR_INVALID_VALUE;
  sampler.elementBytes = sampler.channelBytes * channels;
  return CUDA_SUCCESS;
}

CUresult bindArray(CUarray handle, TextureObject& object) {
  auto array = table<Array>().find(handle);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  object.keep.push_back(array);
  object.sampler.levels.push_back(arrayLevel(*array));
  return setFormat(object.sampler, array->descriptor.Format, array->descriptor.NumChannels);
}

CUresult bindMipmap(CUmipmappedArray handle, TextureObject& object) {
  auto mipmap = table<MipmappedArray>().find(handle);
  if (!mipmap) return CUDA_ERROR_INVALID_HANDLE;
  object.keep.push_back(mipmap);
  for (auto& level : mipmap->levels) object.sampler.levels.push_back(arrayLevel(*level));
  return setFormat(object.sampler, mipmap->descriptor.Format, mipmap->descriptor.NumChannels);
}

CUresult bindMemory(uint64_t address, uint64_t width, uint64_t height, uint64_t pitch,
                    TextureObject& object) {
  auto& sampler = object.sampler;
  uint64_t bytes = (height - 1) * pitch + width * sampler.elementBytes;
  if (!width || !height || width > UINT32_MAX || height > UINT32_MAX) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkDeviceRange(address, bytes, false));
  sampler.levels.push_back({address, pitch, 0, uint32_t(width), uint32_t(height), 1});
  sampler.linearBytes = bytes;
  return CUDA_SUCCESS;
}

CUresult bindResource(const CUDA_RESOURCE_DESC& r, TextureObject& object) {
  switch (r.resType) {
    case CU_RESOURCE_TYPE_ARRAY:
      return bindArray(r.res.array.hArray, object);
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
      return bindMipmap(r.res.mipmap.hMipmappedArray, object);
    case CU_RESOURCE_TYPE_LINEAR: {
      auto& linear = r.res.linear;
      SOFT_TRY(setFormat(object.sampler, linear.format, linear.numChannels));
      uint64_t elements = linear.sizeInBytes / object.sampler.elementBytes;
      return bindMemory(linear.devPtr, elements, 1, linear.sizeInBytes, object);
    }
    case CU_RESOURCE_TYPE_PITCH2D: {
      auto& plane = r.res.pitch2D;
      SOFT_TRY(setFormat(object.sampler, plane.format, plane.numChannels));
      if (plane.pitchInBytes < plane.width * object.sampler.elementBytes) return CUDA_ERROR_INVALID_VALUE;
      return bindMemory(plane.devPtr, plane.width, plane.height, plane.pitchInBytes, object);
    }
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult bindTexture(const CUDA_TEXTURE_DESC& t, TextureObject& object) {
  auto& sampler = object.sampler;
  constexpr unsigned kFlags = CU_TRSF_READ_AS_INTEGER | CU_TRSF_NORMALIZED_COORDINATES | CU_TRSF_SRGB |
                              CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION | CU_TRSF_SEAMLESS_CUBEMAP;
  if (t.flags & ~kFlags) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 3; ++i) {
    if (t.addressMode[i] > CU_TR_ADDRESS_MODE_BORDER) return CUDA_ERROR_INVALID_VALUE;
    sampler.address[i] = t.addressMode[i];
  }
  sampler.normalizedCoordinates = t.flags & CU_TRSF_NORMALIZED_COORDINATES;
  sampler.linear = t.filterMode == CU_TR_FILTER_MODE_LINEAR;
  sampler.mipLinear = t.mipmapFilterMode == CU_TR_FILTER_MODE_LINEAR;
  sampler.srgb = (t.flags & CU_TRSF_SRGB) && sampler.format == CU_AD_FORMAT_UNSIGNED_INT8;
  bool integers = sampler.format != CU_AD_FORMAT_FLOAT && sampler.format != CU_AD_FORMAT_HALF;
  // 32-bit integers have no normalised reading: they are always read as they are.
  sampler.readInteger = integers && ((t.flags & CU_TRSF_READ_AS_INTEGER) || sampler.channelBytes == 4);
  if (sampler.linear && sampler.readInteger) return CUDA_ERROR_INVALID_VALUE;
  if (!sampler.normalizedCoordinates) {
    // Repeating makes sense for normalised coordinates only; the hardware clamps otherwise.
    for (auto& mode : sampler.address) {
      if (mode == CU_TR_ADDRESS_MODE_WRAP || mode == CU_TR_ADDRESS_MODE_MIRROR)
        mode = CU_TR_ADDRESS_MODE_CLAMP;
    }
  }
  sampler.minLevel = t.minMipmapLevelClamp;
  sampler.maxLevel = std::min(t.maxMipmapLevelClamp, float(sampler.levels.size() - 1));
  sampler.levelBias = t.mipmapLevelBias;
  std::copy(t.borderColor, t.borderColor + 4, sampler.border);
  return CUDA_SUCCESS;
}

}  // namespace

void releaseObjects(Context& context) {
  textures().removeContext(context.id);
  surfaces().removeContext(context.id);
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuTexObjectCreate(CUtexObject* out, const CUDA_RESOURCE_DESC* resource,
                           const CUDA_TEXTURE_DESC* texture, const CUDA_RESOURCE_VIEW_DESC* view) {
  SOFT_CONTEXT(context);
  if (!out || !resource || !texture || resource->flags) return CUDA_ERROR_INVALID_VALUE;
  bool fromArray =
      resource->resType == CU_RESOURCE_TYPE_ARRAY || resource->resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
  if (view && !fromArray) return CUDA_ERROR_INVALID_VALUE;
  auto object = std::make_shared<TextureObject>();
  object->resource = *resource;
  object->texture = *texture;
  object->contextId = context->id;
  if (view && view->format != CU_RES_VIEW_FORMAT_NONE)
    return CUDA_ERROR_NOT_SUPPORTED;  // reinterpreting views
  if (view) {
    object->view = *view;
    object->hasView = true;
  }
  SOFT_TRY(bindResource(*resource, *object));
  SOFT_TRY(bindTexture(*texture, *object));
  uint64_t handle = textures().add(object);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = handle;
  return CUDA_SUCCESS;
}

CUresult cuTexObjectDestroy(CUtexObject handle) {
  SOFT_CONTEXT(context);
  return textures().remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC* out, CUtexObject handle) {
  SOFT_CONTEXT(context);
  auto object = textures().find(handle);
  if (!out || !object) return CUDA_ERROR_INVALID_VALUE;
  *out = object->resource;
  return CUDA_SUCCESS;
}

CUresult cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC* out, CUtexObject handle) {
  SOFT_CONTEXT(context);
  auto object = textures().find(handle);
  if (!out || !object) return CUDA_ERROR_INVALID_VALUE;
  *out = object->texture;
  return CUDA_SUCCESS;
}

CUresult cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC* out, CUtexObject handle) {
  SOFT_CONTEXT(context);
  auto object = textures().find(handle);
  if (!out || !object || !object->hasView) return CUDA_ERROR_INVALID_VALUE;
  *out = object->view;
  return CUDA_SUCCESS;
}

CUresult cuSurfObjectCreate(CUsurfObject* out, const CUDA_RESOURCE_DESC* resource) {
  SOFT_CONTEXT(context);
  if (!out || !resource || resource->resType != CU_RESOURCE_TYPE_ARRAY || resource->flags) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto array = table<Array>().find(resource->res.array.hArray);
  if (!array) return CUDA_ERROR_INVALID_HANDLE;
  auto object = std::make_shared<SurfaceObject>();
  object->resource = *resource;
  object->contextId = context->id;
  object->array = array;
  uint64_t handle = surfaces().add(object);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = handle;
  return CUDA_SUCCESS;
}

CUresult cuSurfObjectDestroy(CUsurfObject handle) {
  SOFT_CONTEXT(context);
  return surfaces().remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC* out, CUsurfObject handle) {
  SOFT_CONTEXT(context);
  auto object = surfaces().find(handle);
  if (!out || !object) return CUDA_ERROR_INVALID_VALUE;
  *out = object->resource;
  return CUDA_SUCCESS;
}
