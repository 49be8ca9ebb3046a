#pragma once
// Physical memory that can be mapped (driver manual: Virtual Memory Management): a memfd, so that several
// mappings and other processes share it.

#include <memory>

#include "server/softgpu/api/handles.h"
#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {

struct Physical {
  using Handle = CUmemGenericAllocationHandle;
  static constexpr Tag kTag = Tag::physical;
  Handle handle = 0;
  CUmemAllocationProp properties{};
  uint64_t size = 0;
  int descriptor = -1;
  int charged = -1;         // the device whose budget it uses; -1: host memory or imported
  unsigned references = 1;  // cuMemCreate, Import and Retain, less cuMemRelease; guarded by the file's mutex
  ~Physical();
};

}  // namespace gpupool::softgpu::api
