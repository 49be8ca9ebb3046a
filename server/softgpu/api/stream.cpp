// Driver manual: Stream Management (queues are in stream_queue.cpp, capture in capture.cpp).
#include "server/softgpu/api/stream.h"

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/event.h"
#include "server/softgpu/api/thread_state.h"

namespace gpupool::softgpu::api {
namespace {

struct ThreadStream {
  uint64_t contextId;
  std::shared_ptr<Stream> stream;
};
struct ThreadStreams {
  std::vector<ThreadStream> list;
};

std::shared_ptr<Stream> perThread(const ContextPtr& context) {
  auto& threadStreams = threadState<ThreadStreams>().list;
  const uint64_t id = context->id;
  for (auto& entry : threadStreams) {
    if (entry.contextId == id) return entry.stream;
  }
  std::erase_if(threadStreams, [](const ThreadStream& entry) {
    auto& owner = *entry.stream->context;
    return !owner.active || owner.id != entry.contextId;
  });
  auto stream = context->makeStream(CU_STREAM_DEFAULT, 0);
  stream->handle = CU_STREAM_PER_THREAD;
  threadStreams.push_back({id, stream});
  return stream;
}

CUresult create(CUstream* out, unsigned flags, int priority) {
  SOFT_CONTEXT(context);
  if (!out || (flags & ~unsigned(CU_STREAM_NON_BLOCKING))) return CUDA_ERROR_INVALID_VALUE;
  *out = table<Stream>().add(context->makeStream(flags, priority));
  return CUDA_SUCCESS;
}

// The stream of a call that names one, whatever context is current.
CUresult enterStream(CUstream handle, std::shared_ptr<Stream>& stream) {
  SOFT_CONTEXT(context);
  SOFT_TRY(findStream(context, handle, stream));
  return stream->context->sticky;
}

}  // namespace

CUresult findStream(const ContextPtr& context, CUstream handle, std::shared_ptr<Stream>& stream) {
  if (!handle || handle == CU_STREAM_LEGACY) {
    stream = context->legacy;
  } else if (handle == CU_STREAM_PER_THREAD) {
    stream = perThread(context);
  } else {
    stream = table<Stream>().find(handle);
  }
  return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void releaseStreams(Context& context) {
  table<Stream>().takeIf([&](const Stream& s) { return s.context.get() == &context; });
  std::lock_guard lock(context.order);
  context.streams.clear();
}

CUresult submitOperation(Stream& stream, OperationPtr operation, Submit how, bool launch) {
  bool captured = false;
  SOFT_TRY(captureWork(stream, captured, [&] { return addNode(stream.capture->graph, operation, {}); }));
  if (captured) return CUDA_SUCCESS;
  Task task;
  task.launch = launch;
  task.run = [operation = std::move(operation), context = stream.context.get()] {
    return operation->run(*context);
  };
  stream.submit(std::move(task), how);
  return how == Submit::wait ? stream.context->sticky.load() : CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) { return create(stream, flags, 0); }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  return create(stream, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto stream = table<Stream>().find(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  {
    std::lock_guard lock(captureMutex());
    if (auto capture = stream->capture; capture != nullptr) {
      if (capture->origin.lock() == stream)
        capture->invalidated = true;
      else
        capture->destroyed.push_back(stream);
    }
  }
  // Its queued work still runs: the thread holds the stream, and so does whoever waits for its context.
  stream = table<Stream>().take(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (auto tail = stream->tail(); tail && !tail->done()) {
    Task keepAlive;  // so that the context still sees the stream until its work is done
    keepAlive.always = true;
    keepAlive.run = [stream] { return CUDA_SUCCESS; };
    stream->submit(std::move(keepAlive), Submit::asynchronous);
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) { return cuStreamDestroy_v2(stream); }

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  if (!priority) return CUDA_ERROR_INVALID_VALUE;
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  *flags = stream->flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  if (!id) return CUDA_ERROR_INVALID_VALUE;
  *id = stream->id;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  *context = stream->context->handle;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext* context, CUgreenCtx* green) {
  if (green) SOFT_TRY(cuStreamGetGreenCtx(handle, green));
  return cuStreamGetCtx(handle, context);
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice* device) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  *device = stream->context->device;
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  SOFT_TRY(forbidOnStream(*stream));
  SOFT_TRY(forbidDuringCapture(*stream->context));
  bool idle = stream->idle();
  SOFT_TRY(stream->context->sticky);
  if (idle) flushOutput();
  return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream handle) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  SOFT_TRY(forbidOnStream(*stream));
  SOFT_TRY(forbidDuringCapture(*stream->context));
  if (auto tail = stream->tail()) tail->wait();
  if (stream->isLegacy) {
    // The legacy stream is also behind what blocking streams still do.
    stream->submit(Task{}, Submit::wait);
  }
  flushOutput();
  return stream->context->sticky;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent eventHandle, unsigned int flags) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  auto event = table<Event>().find(eventHandle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (flags & ~unsigned(CU_EVENT_WAIT_EXTERNAL)) return CUDA_ERROR_INVALID_VALUE;
  bool captured = false;
  SOFT_TRY(waitInCapture(stream, *event, flags, captured));
  if (captured) return CUDA_SUCCESS;
  auto fence = event->recorded();
  if (!fence || fence->done()) return CUDA_SUCCESS;
  Task task;
  task.after.push_back(fence);
  stream->submit(std::move(task), Submit::asynchronous);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue* value) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  *value = {};
  switch (int(attribute)) {
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      value->syncPolicy = CUsynchronizationPolicy(stream->syncPolicy.load());
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      value->priority = stream->priority;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuStreamSetAttribute(CUstream handle, CUstreamAttrID attribute, const CUstreamAttrValue* value) {
  std::shared_ptr<Stream> stream;
  SOFT_TRY(enterStream(handle, stream));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  switch (int(attribute)) {
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      if (value->syncPolicy < CU_SYNC_POLICY_AUTO || value->syncPolicy > CU_SYNC_POLICY_BLOCKING_SYNC) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      stream->syncPolicy = value->syncPolicy;
      return CUDA_SUCCESS;
    // Caches and domains that this device does not have.
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuStreamCopyAttributes(CUstream to, CUstream from) {
  std::shared_ptr<Stream> target, source;
  SOFT_TRY(enterStream(to, target));
  SOFT_TRY(enterStream(from, source));
  target->syncPolicy = source->syncPolicy.load();
  return CUDA_SUCCESS;
}
