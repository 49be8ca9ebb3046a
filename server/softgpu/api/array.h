#pragma once
// Arrays (driver manual: cuArray3DCreate): opaque to programs, here rows at a pitch in memory charged to the
// device.

#include <memory>
#include <vector>

#include "server/softgpu/api/handles.h"
#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {

// Bytes of one channel; 0: not a format of arrays here.
uint32_t formatBytes(CUarray_format format);

struct ArrayStorage {
  int device = 0;
  uint64_t base = 0, bytes = 0;
  ~ArrayStorage();
};

struct Array {
  using Handle = CUarray;
  static constexpr Tag kTag = Tag::array;
  Handle handle = nullptr;
  ContextPtr context;
  CUDA_ARRAY3D_DESCRIPTOR descriptor{};  // as created
  // Extents with 1 for what a lower-dimensional array lacks; for layered arrays depth is the layers.
  uint32_t width = 1, height = 1, depth = 1;
  uint32_t elementBytes = 1;
  uint64_t base = 0, pitch = 0, slice = 0;
  std::shared_ptr<ArrayStorage> storage;
  bool level = false;  // of a mipmapped array: not destroyable
  bool layered() const { return descriptor.Flags & CUDA_ARRAY3D_LAYERED; }
  bool cubemap() const { return descriptor.Flags & CUDA_ARRAY3D_CUBEMAP; }
  // 1 to 3, layers not counted.
  int dimensions() const;
};
using ArrayPtr = std::shared_ptr<Array>;

struct MipmappedArray {
  using Handle = CUmipmappedArray;
  static constexpr Tag kTag = Tag::mipmap;
  Handle handle = nullptr;
  ContextPtr context;
  CUDA_ARRAY3D_DESCRIPTOR descriptor{};
  std::vector<ArrayPtr> levels;
};

}  // namespace gpupool::softgpu::api
