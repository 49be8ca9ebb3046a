#pragma once
// User objects (driver manual: cuUserObjectCreate): counted, destroyed by a function of the application,
// never under a lock.

#include <atomic>
#include <memory>

#include "server/softgpu/api/cuda_api.h"
#include "server/softgpu/api/handles.h"

namespace gpupool::softgpu::api {

struct UserObject {
  using Handle = CUuserObject;
  static constexpr Tag kTag = Tag::userObject;
  Handle handle = nullptr;
  void* object = nullptr;
  CUhostFn destroy = nullptr;
  std::atomic<int64_t> references{0};
};

void releaseUserObject(const std::shared_ptr<UserObject>& object, unsigned count);

}  // namespace gpupool::softgpu::api
