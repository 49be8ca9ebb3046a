// Host functions in streams (driver manual: cuLaunchHostFunc, cuStreamAddCallback).
#include "server/softgpu/api/callback.h"

#include "server/softgpu/api/capture.h"

namespace gpupool::softgpu::api {

bool& insideCallback() {
  thread_local bool inside = false;
  return inside;
}

CUresult HostOperation::run(Context&) const {
  insideCallback() = true;
  parameters.fn(parameters.userData);
  insideCallback() = false;
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* userData) {
  SOFT_CONTEXT(context);
  if (!function) return CUDA_ERROR_INVALID_VALUE;
  SOFT_STREAM(stream, handle, context);
  auto operation = std::make_shared<HostOperation>();
  operation->parameters.fn = function;
  operation->parameters.userData = userData;
  return submitOperation(*stream, operation, Submit::asynchronous);
}

CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void* userData, unsigned int flags) {
  SOFT_CONTEXT(context);
  if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
  SOFT_STREAM(stream, handle, context);
  SOFT_TRY(forbidOnStream(*stream));
  Task task;
  task.always = true;
  task.run = [=, owner = stream->context.get()] {
    flushOutput();
    insideCallback() = true;
    callback(handle, owner->sticky, userData);
    insideCallback() = false;
    return CUDA_SUCCESS;
  };
  stream->submit(std::move(task), Submit::asynchronous);
  return CUDA_SUCCESS;
}
