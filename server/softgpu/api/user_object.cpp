#include "server/softgpu/api/user_object.h"

#include <thread>

#include "server/softgpu/api/capture.h"

namespace gpupool::softgpu::api {

void releaseUserObject(const std::shared_ptr<UserObject>& object, unsigned count) {
  if ((object->references -= count) > 0) return;
  table<UserObject>().take(object->handle);
  // Asynchronously, as natively: the caller may hold anything.
  std::thread([object] { object->destroy(object->object); }).detach();
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuUserObjectCreate(CUuserObject* out, void* pointer, CUhostFn destroy, unsigned int count,
                            unsigned int flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || !destroy || !count || count > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto object = std::make_shared<UserObject>();
  object->object = pointer;
  object->destroy = destroy;
  object->references = count;
  *out = table<UserObject>().add(object);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject handle, unsigned int count) {
  auto object = table<UserObject>().find(handle);
  if (!object || !count || count > INT32_MAX) return CUDA_ERROR_INVALID_VALUE;
  object->references += count;
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned int count) {
  auto object = table<UserObject>().find(handle);
  if (!object || !count || count > INT32_MAX) return CUDA_ERROR_INVALID_VALUE;
  releaseUserObject(object, count);
  return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graphHandle, CUuserObject handle, unsigned int count,
                                 unsigned int flags) {
  auto graph = table<Graph>().find(graphHandle);
  auto object = table<UserObject>().find(handle);
  if (!graph || !object || !count || count > INT32_MAX || (flags & ~unsigned(CU_GRAPH_USER_OBJECT_MOVE))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) object->references += count;
  std::lock_guard lock(captureMutex());
  graph->userObjects.emplace_back(object, count);
  return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graphHandle, CUuserObject handle, unsigned int count) {
  auto graph = table<Graph>().find(graphHandle);
  auto object = table<UserObject>().find(handle);
  if (!graph || !object || !count) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(captureMutex());
  for (auto& [held, number] : graph->userObjects) {
    if (held != object || number < count) continue;
    number -= count;
    releaseUserObject(object, count);
    std::erase_if(graph->userObjects, [](auto& entry) { return entry.second == 0; });
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
