#pragma once
// Green contexts (driver manual: Green Contexts). A part of the device is a number of multiprocessors: which
// ones, and whether others have them, too, concerns no kernel here. Any thread.

#include <memory>

#include "server/softgpu/api/context.h"

namespace gpupool::softgpu::api {

struct Green {
  using Handle = CUgreenCtx;
  static constexpr Tag kTag = Tag::green;
  Handle handle = nullptr;
  ContextPtr primary;
  uint32_t multiprocessors = 0;
};

// Behind a CUdevResourceDesc.
struct ResourceDescription {
  using Handle = CUdevResourceDesc;
  static constexpr Tag kTag = Tag::resourceDescription;
  Handle handle = nullptr;
  int device = 0;
  uint32_t multiprocessors = 0;
};

}  // namespace gpupool::softgpu::api
