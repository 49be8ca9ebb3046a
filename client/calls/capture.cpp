// Stream captures by name, and what they forbid (client/capture.h).
#include "client/capture.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "client/entry.h"
#include "client/graphs.h"

namespace gpupool::client {
namespace {

// One capture, from cuStreamBeginCapture to its end.
struct Capture {
  uint64_t serial = 0;  // names it in events
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  uint64_t thread = 0;
  CUcontext context = nullptr;
  Stream* origin = nullptr;
  bool invalid = false;
  bool blocking = false;  // one of its streams synchronises with the legacy stream
  bool ownsGraph = true;  // false: cuStreamBeginCaptureToGraph, into a graph of the application's
  std::vector<Stream*> streams;
  std::vector<GraphHold> holds;
  struct Dependencies {
    std::vector<CUgraphNode> nodes;
    std::vector<CUgraphEdgeData> edges;
  };
  std::map<Stream*, Dependencies> answers;  // of cuStreamGetCaptureInfo: valid until the next question
};

struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> active;
  std::map<const Event*, uint64_t> events;  // serial of the capture an event was last recorded in
  uint64_t nextSerial = 1;

  std::shared_ptr<Capture> of(const Stream* stream) const {
    for (auto& capture : active)
      if (std::find(capture->streams.begin(), capture->streams.end(), stream) != capture->streams.end())
        return capture;
    return nullptr;
  }
  std::shared_ptr<Capture> bySerial(uint64_t serial) const {
    for (auto& capture : active)
      if (capture->serial == serial) return capture;
    return nullptr;
  }
};
Captures& captures() {
  static auto* all = new Captures;
  return *all;
}

thread_local CUstreamCaptureMode threadMode = CU_STREAM_CAPTURE_MODE_GLOBAL;

uint64_t thisThread() {
  static std::atomic<uint64_t> next{1};
  thread_local uint64_t mine = next.fetch_add(1);
  return mine;
}

bool isMode(CUstreamCaptureMode mode) {
  return mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
         mode == CU_STREAM_CAPTURE_MODE_RELAXED;
}

// Takes the capture off the books. Its streams are ordinary again.
void retire(const std::shared_ptr<Capture>& capture) {
  Captures& all = captures();
  {
    std::lock_guard lock(all.mutex);
    if (std::erase(all.active, capture) == 0) return;
    for (Stream* stream : capture->streams) stream->capturing = false;
  }
  Session::get().capture(false);
}

void addStream(Capture& capture, Stream& stream) {  // under the mutex
  capture.streams.push_back(&stream);
  capture.blocking = capture.blocking || (stream.flags & CU_STREAM_NON_BLOCKING) == 0;
  stream.capturing = true;
}

// No completion word may be asked for inside a capture: what the stream was sent so far gets its own before.
CUresult settleWords(const StreamRef& ref) {
  uint64_t value = 0;
  CUresult status = requestWord(ref, value);
  if (status != CUDA_SUCCESS || ref.wire == nullptr || (ref.stream->flags & CU_STREAM_NON_BLOCKING) != 0)
    return status;
  StreamRef legacy;  // unusable while a blocking stream captures
  Context* context = contexts().find(ref.context);
  if (context == nullptr) return CUDA_SUCCESS;
  legacy = {&streamsOf(*context).legacy, ref.context, nullptr};
  return requestWord(legacy, value);
}

template <class Send>
CUresult begin(CUstream handle, CUstreamCaptureMode mode, bool ownsGraph, Send&& send) {
  StreamRef ref;
  CUresult status = resolveStream(handle, ref);
  if (status != CUDA_SUCCESS) return status;
  if (!isMode(mode)) return CUDA_ERROR_INVALID_VALUE;
  if (ref.wire == nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;  // the legacy stream
  if (ref.stream->capturing) return CUDA_ERROR_ILLEGAL_STATE;
  if (status = settleWords(ref); status != CUDA_SUCCESS) return status;
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = thisThread();
  capture->context = ref.context;
  capture->origin = ref.stream;
  capture->ownsGraph = ownsGraph;
  Session::get().capture(true);
  status = send(ref);
  if (status != CUDA_SUCCESS) {
    Session::get().capture(false);
    return status;
  }
  Captures& all = captures();
  std::lock_guard lock(all.mutex);
  capture->serial = all.nextSerial++;
  addStream(*capture, *ref.stream);
  all.active.push_back(std::move(capture));
  return CUDA_SUCCESS;
}

// The capture ends in the worker too, and nobody gets a graph that was made for it.
CUresult discard(const StreamRef& ref, bool ownsGraph) {
  CUgraph graph = nullptr;
  CUresult status = Session::get().await<"cuStreamEndCapture">(ref.context, ref.wire, &graph);
  if (status == CUDA_SUCCESS && graph != nullptr && ownsGraph)
    Session::get().await<"cuGraphDestroy">(ref.context, graph);
  return status;
}

CUresult end(CUstream handle, CUgraph* out) {
  StreamRef ref;
  if (out != nullptr) *out = nullptr;
  CUresult status = resolveStream(handle, ref);
  if (status != CUDA_SUCCESS && status != CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) return status;
  std::shared_ptr<Capture> capture;
  bool invalid = false;
  {
    std::lock_guard lock(captures().mutex);
    capture = captures().of(ref.stream);
    if (capture != nullptr) invalid = capture->invalid;
  }
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  CUgraph graph = nullptr;
  if (capture->origin != ref.stream)  // one that joined; the driver knows what that means
    return Session::get().await<"cuStreamEndCapture">(ref.context, ref.wire, &graph);
  bool wrongThread = capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != thisThread();
  if (wrongThread || invalid) {
    discard(ref, capture->ownsGraph);
    retire(capture);
    return wrongThread ? CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  if (out == nullptr && capture->ownsGraph) {  // as natively: it ends, and nobody ever sees what was captured
    status = discard(ref, true);
    retire(capture);
    return status;
  }
  status = Session::get().await<"cuStreamEndCapture">(ref.context, ref.wire, &graph);
  retire(capture);
  if (status != CUDA_SUCCESS) return status;
  holdForGraph(toId(graph), capture->holds);
  if (out != nullptr) *out = graph;
  return CUDA_SUCCESS;
}

// The stream as it is asked about: an invalid capture is an answer, not an error.
CUresult resolveAsked(CUstream handle, StreamRef& ref, bool& invalid) {
  CUresult status = resolveStream(handle, ref);
  invalid = status == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (status != CUDA_SUCCESS && !invalid) return status;
  if (ref.wire != nullptr || !Session::get().capturing()) return CUDA_SUCCESS;
  std::lock_guard lock(captures().mutex);
  for (auto& capture : captures().active)
    if (capture->blocking && capture->context == ref.context) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  return CUDA_SUCCESS;
}

CUresult isCapturing(CUstream handle, CUstreamCaptureStatus* out) {
  StreamRef ref;
  bool invalid = false;
  CUresult status = resolveAsked(handle, ref, invalid);
  if (status != CUDA_SUCCESS) return status;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_NONE;
  if (invalid || !ref.stream->capturing) return CUDA_SUCCESS;
  return Session::get().await<"cuStreamIsCapturing">(ref.context, ref.wire, out);
}

CUresult information(CUstream handle, CUstreamCaptureStatus* statusOut, cuuint64_t* id, CUgraph* graph,
                     const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  StreamRef ref;
  bool invalid = false;
  CUresult status = resolveAsked(handle, ref, invalid);
  if (status != CUDA_SUCCESS) return status;
  if (statusOut == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *statusOut = invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_NONE;
  if (invalid || !ref.stream->capturing) return CUDA_SUCCESS;
  constexpr size_t kMost = 4096;  // leaves of one stream's capture
  Capture::Dependencies answer;
  if (dependencies != nullptr || edges != nullptr || count != nullptr) {
    answer.nodes.resize(kMost);
    answer.edges.resize(kMost);
  }
  size_t n = answer.nodes.size();
  cuuint64_t serial = 0;
  CUgraph made = nullptr;
  status = Session::get().await<"sessionCaptureInfo">(ref.context, ref.wire, statusOut, &serial, &made,
                                                      answer.nodes.data(), answer.edges.data(), &n);
  if (status != CUDA_SUCCESS || *statusOut != CU_STREAM_CAPTURE_STATUS_ACTIVE) return status;
  n = std::min(n, answer.nodes.size());
  answer.nodes.resize(n);
  answer.edges.resize(n);
  bool annotated = std::any_of(answer.edges.begin(), answer.edges.end(), [](const CUgraphEdgeData& e) {
    return e.from_port != 0 || e.to_port != 0 || e.type != 0;
  });
  if (annotated && dependencies != nullptr && edges == nullptr) return CUDA_ERROR_LOSSY_QUERY;
  if (id != nullptr) *id = serial;
  if (graph != nullptr) *graph = made;
  if (count != nullptr) *count = n;
  std::lock_guard lock(captures().mutex);
  auto capture = captures().of(ref.stream);
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;  // ended meanwhile, by another thread
  auto& kept = capture->answers[ref.stream] = std::move(answer);
  if (dependencies != nullptr) *dependencies = kept.nodes.data();
  if (edges != nullptr) *edges = annotated ? kept.edges.data() : nullptr;
  return CUDA_SUCCESS;
}

CUresult updateDependencies(CUstream handle, CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                            size_t count, unsigned flags) {
  StreamRef ref;
  CUresult status = resolveStream(handle, ref);
  if (status != CUDA_SUCCESS) return status;
  if (!ref.stream->capturing) return CUDA_ERROR_ILLEGAL_STATE;
  if (count != 0 && dependencies == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Session::get().await<"cuStreamUpdateCaptureDependencies_v2">(ref.context, ref.wire, dependencies,
                                                                      edges, count, flags);
}

}  // namespace

// ---- what captures forbid ----

namespace capture {

CUresult forbidsSlow() {
  if (threadMode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  CUresult status = CUDA_SUCCESS;
  std::lock_guard lock(captures().mutex);
  for (auto& capture : captures().active) {
    bool own = capture->thread == thisThread() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    bool global =
        capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && threadMode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!own && !global) continue;
    capture->invalid = true;
    status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return status;
}

CUresult conflictSlow(Stream& stream) {
  std::lock_guard lock(captures().mutex);
  auto capture = captures().of(&stream);
  if (capture == nullptr) return CUDA_SUCCESS;
  capture->invalid = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult contextConflictSlow(CUcontext context) {
  CUresult status = CUDA_SUCCESS;
  std::lock_guard lock(captures().mutex);
  for (auto& capture : captures().active) {
    if (capture->context != context) continue;
    capture->invalid = true;
    status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return status;
}

CUresult legacyConflictSlow(CUcontext context) {
  CUresult status = CUDA_SUCCESS;
  std::lock_guard lock(captures().mutex);
  for (auto& capture : captures().active) {
    if (capture->context != context || !capture->blocking) continue;
    capture->invalid = true;
    status = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return status;
}

}  // namespace capture

CUresult captureAccepts(Stream& stream) {
  std::lock_guard lock(captures().mutex);
  auto capture = captures().of(&stream);
  return capture != nullptr && capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

void captureRecorded(Event& event, Stream& stream) {
  std::lock_guard lock(captures().mutex);
  if (auto capture = captures().of(&stream)) captures().events[&event] = capture->serial;
}

CUresult captureEventConflict(Event& event) {
  if (!event.captured) return CUDA_SUCCESS;
  std::lock_guard lock(captures().mutex);
  auto known = captures().events.find(&event);
  auto capture = known == captures().events.end() ? nullptr : captures().bySerial(known->second);
  if (capture == nullptr)
    return CUDA_ERROR_INVALID_VALUE;  // it is over: the event was never recorded for real
  capture->invalid = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

void captureJoined(const StreamRef& ref, Event& event) {
  std::lock_guard lock(captures().mutex);
  auto known = captures().events.find(&event);
  auto capture = known == captures().events.end() ? nullptr : captures().bySerial(known->second);
  if (capture != nullptr && captures().of(ref.stream) == nullptr) addStream(*capture, *ref.stream);
}

void captureDropped(Stream& stream) {
  std::shared_ptr<Capture> ended;
  {
    std::lock_guard lock(captures().mutex);
    auto capture = captures().of(&stream);
    if (capture == nullptr) return;
    std::erase(capture->streams, &stream);
    capture->answers.erase(&stream);
    if (capture->origin == &stream) ended = capture;
  }
  if (ended != nullptr) retire(ended);
}

void captureHolds(Stream& stream, GraphHold hold) {
  std::lock_guard lock(captures().mutex);
  if (auto capture = captures().of(&stream)) capture->holds.push_back(std::move(hold));
}

// ---- calls ----

namespace custom {

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (mode == nullptr || !isMode(*mode)) return CUDA_ERROR_INVALID_VALUE;
  std::swap(threadMode, *mode);
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return begin(stream, mode, true, [&](const StreamRef& ref) {
    return Session::get().await<"cuStreamBeginCapture_v2">(ref.context, ref.wire, mode);
  });
}
CUresult cuStreamBeginCapture(CUstream stream) {
  return custom::cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}
CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* dependencies,
                                     const CUgraphEdgeData* edges, size_t count, CUstreamCaptureMode mode) {
  if (count != 0 && dependencies == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return begin(stream, mode, false, [&](const StreamRef& ref) {
    return Session::get().await<"cuStreamBeginCaptureToGraph">(ref.context, ref.wire, graph, dependencies,
                                                               edges, count, mode);
  });
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) { return end(stream, graph); }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return isCapturing(stream, status);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return information(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies, size_t* count) {
  return information(stream, status, id, graph, dependencies, nullptr, count);
}
CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   const CUgraphEdgeData** edges, size_t* count) {
  return information(stream, status, id, graph, dependencies, edges, count);
}
CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* dependencies, size_t count,
                                           unsigned flags) {
  return updateDependencies(stream, dependencies, nullptr, count, flags);
}
CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode* dependencies,
                                              const CUgraphEdgeData* edges, size_t count, unsigned flags) {
  return updateDependencies(stream, dependencies, edges, count, flags);
}

}  // namespace custom
}  // namespace gpupool::client
