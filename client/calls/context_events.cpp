// Events of all work of a context (client/calls/context_events.h).
#include "client/calls/context_events.h"

#include "client/calls/green.h"
#include "client/capture.h"
#include "client/entry.h"

namespace gpupool::client {
namespace {

// A context with its green contexts, or one of these.
struct Scope {
  Context* context = nullptr;
  CUgreenCtx green = nullptr;  // null: all of the context
  std::atomic<CUstream>* gate = nullptr;
};

CUresult scopeOf(CUgreenCtx handle, Scope& out) {
  GreenContext* green = nullptr;
  CUresult status = findGreen(handle, green);
  if (status != CUDA_SUCCESS) return status;
  CUcontext primary = nullptr;
  status = contexts().primaryHandle(&primary, green->device);
  if (status == CUDA_SUCCESS) out = {contexts().find(primary), handle, &green->gate};
  return status;
}

CUresult scopeOf(CUcontext handle, Scope& out) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (const CUgreenCtx green = contexts().greenOf(handle); green != nullptr) return scopeOf(green, out);
  Context* context = nullptr;
  CUresult status = contexts().resolve(handle, &context);
  if (status == CUDA_SUCCESS) out = {context, nullptr, &streamsOf(*context).gate};
  return status;
}

template <class F>
void forEachStreamOf(const Scope& scope, F&& f) {
  forEachStream(scope.context->handle, [&](const StreamRef& ref) {
    if (scope.green == nullptr || ref.stream->green == scope.green) f(ref);
  });
}

CUresult noneCaptures(const Scope& scope) {
  CUresult status = CUDA_SUCCESS;
  forEachStreamOf(scope, [&](const StreamRef& ref) {
    if (!ref.stream->capturing) return;
    if (const CUresult conflict = captureConflict(ref); conflict != CUDA_SUCCESS) status = conflict;
  });
  return status;
}

// An operation in a stream that another thread may end meanwhile: nothing is sent behind its end.
template <schema::Name N, class... A>
CUresult sendUnlessEnded(const StreamRef& ref, A... arguments) {
  bool due = false;
  CUresult status = CUDA_SUCCESS;
  {
    auto order = lockWords();
    if (!ref.stream->ended) status = sendTo<N>(ref, due, arguments...);
  }
  return due ? keepCredit(ref) : status;
}

CUresult recordMark(const StreamRef& ref, CUevent mark) {
  return sendUnlessEnded<"sessionEventRecord">(ref, mark, ref.wire, 0u, uint64_t{0}, uint64_t{0}, 0u);
}
CUresult waitForMark(const StreamRef& ref, CUevent mark) {
  return sendUnlessEnded<"cuStreamWaitEvent">(ref, ref.wire, mark, 0u);
}

// What `later` does from now on comes behind what `ref` has to do.
CUresult order(const Context& context, const StreamRef& ref, const StreamRef& later) {
  CUevent mark = nullptr;
  CUresult status = makeMark(context, mark);
  if (status == CUDA_SUCCESS) status = recordMark(ref, mark);
  if (status == CUDA_SUCCESS) status = waitForMark(later, mark);
  if (mark != nullptr) endEvent(mark);
  return status;
}

CUresult makeHidden(const Scope& scope, StreamRef& out) {
  CUstream handle = nullptr;
  CUresult status = makeStream(scope.context->handle, CU_STREAM_NON_BLOCKING, 0, handle, scope.green);
  if (status == CUDA_SUCCESS) out = {streams.find(toId(handle)), scope.context->handle, handle};
  return status;
}

bool isOpen(const StreamRef& ref) { return !isDone(ref, ref.stream->posted.load()); }

CUresult record(const Scope& scope, CUevent event) {
  Event* known = nullptr;
  CUresult status = findEvent(event, known);
  if (status != CUDA_SUCCESS) return status;
  if (known->context != scope.context->handle) return CUDA_ERROR_INVALID_HANDLE;
  status = noneCaptures(scope);
  StreamRef meeting;
  if (status == CUDA_SUCCESS) status = makeHidden(scope, meeting);
  if (status != CUDA_SUCCESS) return status;
  forEachStreamOf(scope, [&](const StreamRef& ref) {
    if (status == CUDA_SUCCESS && ref.wire != meeting.wire && isOpen(ref))
      status = order(*scope.context, ref, meeting);
  });
  forEachRest(*scope.context, [&](const Rest& rest) {
    if (status == CUDA_SUCCESS && (scope.green == nullptr || rest.green == scope.green))
      status = waitForMark(meeting, rest.last);
  });
  if (status == CUDA_SUCCESS) status = recordIn(meeting, event, 0);
  endStream(meeting, true);
  return status;
}

CUresult findGate(const Scope& scope, StreamRef& out) {
  static std::mutex making;
  std::lock_guard lock(making);
  CUresult status = CUDA_SUCCESS;
  if (const CUstream known = scope.gate->load(); known != nullptr)
    out = {streams.find(toId(known)), scope.context->handle, known};
  else if (status = makeHidden(scope, out); status == CUDA_SUCCESS)
    scope.gate->store(out.wire);
  return status == CUDA_SUCCESS && out.stream == nullptr ? CUDA_ERROR_CONTEXT_IS_DESTROYED : status;
}

CUresult wait(const Scope& scope, CUevent event) {
  Event* known = nullptr;
  CUresult status = findEvent(event, known);
  if (status != CUDA_SUCCESS) return status;
  const CUresult captured = captureEventConflict(*known);
  status = noneCaptures(scope);
  if (captured == CUDA_ERROR_CAPTURED_EVENT) status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (status == CUDA_SUCCESS) status = captured;
  StreamRef gate;
  if (status == CUDA_SUCCESS) status = findGate(scope, gate);
  if (status == CUDA_SUCCESS) status = waitIn(gate, event, 0);
  if (status != CUDA_SUCCESS) return status;
  CUevent mark = nullptr;
  status = makeMark(*scope.context, mark);
  if (status == CUDA_SUCCESS) status = recordMark(gate, mark);
  forEachStreamOf(scope, [&](const StreamRef& ref) {
    if (status == CUDA_SUCCESS && ref.wire != gate.wire) status = waitForMark(ref, mark);
  });
  if (mark != nullptr) endEvent(mark);
  uint64_t value = 0;  // so that new streams know when there is nothing to wait for any more
  return status == CUDA_SUCCESS ? requestWord(gate, value) : status;
}

CUresult orderBehind(Context& context, const std::atomic<CUstream>& gate, const StreamRef& ref) {
  const CUstream handle = gate.load();
  auto stream = streams.pin(toId(handle));
  if (!stream) return CUDA_SUCCESS;
  const StreamRef before{stream.get(), context.handle, handle};
  return isOpen(before) ? order(context, before, ref) : CUDA_SUCCESS;
}

template <class Handle>
CUresult within(Handle handle, CUevent event, CUresult (*does)(const Scope&, CUevent)) {
  Scope scope;
  CUresult status = scopeOf(handle, scope);
  if (status != CUDA_SUCCESS) return status;
  return scope.context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : does(scope, event);
}

}  // namespace

CUresult orderNewStream(const StreamRef& ref) {
  Context* context = contexts().find(ref.context);
  CUresult status = orderBehind(*context, streamsOf(*context).gate, ref);
  GreenContext* green = nullptr;
  if (status == CUDA_SUCCESS && findGreen(ref.stream->green, green) == CUDA_SUCCESS)
    status = orderBehind(*context, green->gate, ref);
  return status;
}

namespace custom {

CUresult cuCtxRecordEvent(CUcontext context, CUevent event) { return within(context, event, record); }
CUresult cuCtxWaitEvent(CUcontext context, CUevent event) { return within(context, event, wait); }
CUresult cuGreenCtxRecordEvent(CUgreenCtx green, CUevent event) { return within(green, event, record); }
CUresult cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event) { return within(green, event, wait); }

}  // namespace custom
}  // namespace gpupool::client
