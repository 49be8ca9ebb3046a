// Driver manual: Event Management.
#include "server/softgpu/api/event.h"

#include "server/softgpu/api/capture.h"

namespace gpupool::softgpu::api {
namespace {

constexpr unsigned kEventFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

CUresult findEvent(CUevent handle, EventPtr& event) {
  event = table<Event>().find(handle);
  return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// Inside a capture an event is a place in the graph; it only becomes a node when recorded as external.
CUresult recordInCapture(Stream& stream, const EventPtr& event, unsigned flags, bool& captured) {
  std::lock_guard lock(captureMutex());
  captured = false;
  if (!capturing(stream) || (flags & CU_EVENT_RECORD_EXTERNAL)) {
    return captureWork(stream, captured, [&] {
      auto operation = std::make_shared<EventRecordOperation>();
      operation->event = event;
      return addNode(stream.capture->graph, operation, {});
    });
  }
  if (stream.capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  captured = true;
  event->inCapture = true;
  event->capture = stream.capture;
  event->captureAfter = stream.captureAfter;
  return CUDA_SUCCESS;
}

// The event is what `stream` does next, behind `after`. It becomes so only when that is submitted: what
// another thread has wait for it must not be submitted before it.
void recordTask(Event& event, Stream& stream, std::vector<FencePtr> after) {
  {
    std::lock_guard lock(captureMutex());
    event.inCapture = false;
    event.capture.reset();
    event.captureAfter.clear();
  }
  Task task;
  task.after = std::move(after);
  event.record(stream.submit(std::move(task), Submit::inlineIfIdle));
}

CUresult record(CUevent handle, CUstream streamHandle, unsigned flags) {
  SOFT_CONTEXT(context);
  EventPtr event;
  SOFT_TRY(findEvent(handle, event));
  SOFT_STREAM(stream, streamHandle, context);
  if (flags & ~unsigned(CU_EVENT_RECORD_EXTERNAL)) return CUDA_ERROR_INVALID_VALUE;
  if (stream->context != event->context) return CUDA_ERROR_INVALID_HANDLE;
  bool captured = false;
  SOFT_TRY(recordInCapture(*stream, event, flags, captured));
  if (captured) return CUDA_SUCCESS;
  recordTask(*event, *stream, {});
  return CUDA_SUCCESS;
}

// A captured event cannot be asked about: it has no time.
CUresult checkNotCaptured(Event& event, bool invalidates) {
  if (!event.inCapture) return CUDA_SUCCESS;
  std::lock_guard lock(captureMutex());
  if (!event.isCaptured()) return CUDA_ERROR_INVALID_VALUE;
  if (invalidates) event.capture.lock()->invalidated = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult findContextAndEvent(CUcontext contextHandle, CUevent eventHandle, ContextPtr& context,
                             EventPtr& event) {
  if (!contextHandle) return CUDA_ERROR_INVALID_CONTEXT;
  SOFT_TRY(namedContext(contextHandle, context));
  return findEvent(eventHandle, event);
}

}  // namespace

bool Event::isCaptured() {
  std::lock_guard lock(captureMutex());
  auto in = capture.lock();
  return in && !in->streams.empty();
}

void releaseEvents(Context& context) {
  for (auto& event : table<Event>().takeIf([&](const Event& e) { return e.context.get() == &context; })) {
    event->context = nullptr;
  }
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuEventCreate(CUevent* out, unsigned int flags) {
  SOFT_CONTEXT(context);
  if (!out || (flags & ~kEventFlags)) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_EVENT_INTERPROCESS) {
    return flags & CU_EVENT_DISABLE_TIMING ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  }
  auto event = std::make_shared<Event>();
  event->context = context;
  event->flags = flags;
  *out = table<Event>().add(event);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  return table<Event>().take(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventDestroy(CUevent event) { return cuEventDestroy_v2(event); }

CUresult cuEventRecord(CUevent event, CUstream stream) { return record(event, stream, 0); }

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
  return record(event, stream, flags);
}

// All streams meet in one that is there for this alone.
CUresult cuCtxRecordEvent(CUcontext contextHandle, CUevent eventHandle) {
  ContextPtr context;
  EventPtr event;
  SOFT_TRY(findContextAndEvent(contextHandle, eventHandle, context, event));
  if (event->context != context) return CUDA_ERROR_INVALID_HANDLE;
  SOFT_TRY(forbidOnContext(*context));
  std::vector<FencePtr> open;
  {
    std::lock_guard lock(context->order);
    open = context->tails();
  }
  recordTask(*event, *context->makeStream(CU_STREAM_NON_BLOCKING, 0), std::move(open));
  return CUDA_SUCCESS;
}

CUresult cuCtxWaitEvent(CUcontext contextHandle, CUevent eventHandle) {
  ContextPtr context;
  EventPtr event;
  SOFT_TRY(findContextAndEvent(contextHandle, eventHandle, context, event));
  const CUresult captures = forbidOnContext(*context), captured = checkNotCaptured(*event, true);
  if (captured == CUDA_ERROR_CAPTURED_EVENT) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  SOFT_TRY(captures);
  SOFT_TRY(captured);
  std::lock_guard lock(context->order);
  if (auto fence = event->recorded(); fence && !fence->done()) context->gates.push_back(fence);
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
  SOFT_CONTEXT(context);
  EventPtr event;
  SOFT_TRY(findEvent(handle, event));
  SOFT_TRY(checkNotCaptured(*event, true));
  SOFT_TRY(forbidDuringCapture(*event->context));
  auto fence = event->recorded();
  if (fence && !fence->done()) return CUDA_ERROR_NOT_READY;
  return event->context->sticky;
}

CUresult cuEventSynchronize(CUevent handle) {
  SOFT_CONTEXT(context);
  EventPtr event;
  SOFT_TRY(findEvent(handle, event));
  SOFT_TRY(checkNotCaptured(*event, true));
  SOFT_TRY(forbidDuringCapture(*event->context));
  if (auto fence = event->recorded()) fence->wait();
  flushOutput();
  return event->context->sticky;
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent startHandle, CUevent endHandle) {
  SOFT_CONTEXT(context);
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  EventPtr start, end;
  SOFT_TRY(findEvent(startHandle, start));
  SOFT_TRY(findEvent(endHandle, end));
  SOFT_TRY(checkNotCaptured(*start, false));
  SOFT_TRY(checkNotCaptured(*end, false));
  if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  if (start->context != end->context) return CUDA_ERROR_INVALID_HANDLE;
  auto from = start->recorded(), to = end->recorded();
  if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
  if (!from->done() || !to->done()) return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(to->when() - from->when()).count();
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

CUresult cuIpcGetEventHandle(CUipcEventHandle*, CUevent) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuIpcOpenEventHandle(CUevent*, CUipcEventHandle) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuIpcGetMemHandle(CUipcMemHandle*, CUdeviceptr) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuIpcOpenMemHandle(CUdeviceptr*, CUipcMemHandle, unsigned int) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr*, CUipcMemHandle, unsigned int) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr) { return CUDA_ERROR_NOT_SUPPORTED; }
