// Stream capture; the rules are the manual's, the error codes those of the real driver.
#include "server/softgpu/api/capture.h"

#include <algorithm>

#include "server/softgpu/api/event.h"

namespace gpupool::softgpu::api {
namespace {

thread_local CUstreamCaptureMode threadMode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Guarded by captureMutex(). `count` lets calls outside any capture pass without the lock.
struct Captures {
  std::vector<std::shared_ptr<Capture>> list;
  std::atomic<size_t> count{0};
  uint64_t nextId = 1;
};
Captures& captures() {
  static auto* const instance = new Captures;
  return *instance;
}

void addUnique(std::vector<GraphNodePtr>& to, const std::vector<GraphNodePtr>& from) {
  for (auto& node : from) {
    if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
  }
}

// The legacy stream would implicitly wait for a stream that is being captured: that cannot be captured.
CUresult checkLegacy(Stream& stream) {
  CUresult result = CUDA_SUCCESS;
  for (auto& capture : captures().list) {
    for (auto& weak : capture->streams) {
      auto other = weak.lock();
      if (!other || other->context != stream.context || !other->blocking()) continue;
      capture->invalidated = true;
      result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  return result;
}

void endCapture(const std::shared_ptr<Capture>& capture) {
  for (auto& weak : capture->streams) {
    auto stream = weak.lock();
    if (!stream) continue;
    stream->capture = nullptr;
    stream->captureAfter.clear();
    stream->captureHandles.clear();
  }
  capture->streams.clear();
  capture->destroyed.clear();
  std::erase(captures().list, capture);
  captures().count = captures().list.size();
}

// Every branch must have come back to the origin.
bool joined(const Capture& capture, const Stream& origin) {
  for (auto& weak : capture.streams) {
    auto stream = weak.lock();
    if (!stream || stream.get() == &origin) continue;
    for (auto& node : stream->captureAfter) {
      bool found = std::any_of(origin.captureAfter.begin(), origin.captureAfter.end(),
                               [&](auto& end) { return end == node || reaches(node.get(), end.get()); });
      if (!found) return false;
    }
  }
  return true;
}

CUresult begin(CUstream handle, CUstreamCaptureMode mode, const GraphPtr& graph,
               const std::vector<GraphNode*>& after) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  if (stream->isLegacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::lock_guard lock(captureMutex());
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->graph = graph ? graph : makeGraph();
  capture->ownsGraph = !graph;
  capture->id = captures().nextId++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->streams.push_back(stream);
  stream->capture = capture;
  for (GraphNode* node : after) stream->captureAfter.push_back(table<GraphNode>().find(node->handle));
  captures().list.push_back(capture);
  captures().count = captures().list.size();
  return CUDA_SUCCESS;
}

struct Info {
  CUstreamCaptureStatus* status;
  cuuint64_t* id;
  CUgraph* graph;
  const CUgraphNode** dependencies;
  size_t* count;
};

CUresult captureInfo(CUstream handle, const Info& out) {
  SOFT_CONTEXT(context);
  if (!out.status) return CUDA_ERROR_INVALID_VALUE;
  SOFT_STREAM(stream, handle, context);
  std::lock_guard lock(captureMutex());
  if (stream->isLegacy) SOFT_TRY(checkLegacy(*stream));
  if (!stream->capture) {
    *out.status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
  }
  auto& capture = *stream->capture;
  *out.status = capture.invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (out.id) *out.id = capture.id;
  if (capture.invalidated) return CUDA_SUCCESS;
  if (out.graph) *out.graph = capture.graph->handle;
  stream->captureHandles.clear();
  for (auto& node : stream->captureAfter) stream->captureHandles.push_back(node->handle);
  if (out.dependencies) *out.dependencies = stream->captureHandles.data();
  if (out.count) *out.count = stream->captureHandles.size();
  return CUDA_SUCCESS;
}

}  // namespace

std::recursive_mutex& captureMutex() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}

bool capturing(Stream& stream) {
  if (!captures().count) return false;
  std::lock_guard lock(captureMutex());
  return stream.capture != nullptr;
}

CUresult forbidDuringCapture(Context&) {
  if (!captures().count || threadMode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  std::lock_guard lock(captureMutex());
  CUresult result = CUDA_SUCCESS;
  for (auto& capture : captures().list) {
    bool own = capture->thread == std::this_thread::get_id();
    bool forbids =
        own ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
            : threadMode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbids) continue;
    capture->invalidated = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult forbidOnContext(Context& context) {
  if (!captures().count) return CUDA_SUCCESS;
  std::lock_guard lock(captureMutex());
  CUresult result = CUDA_SUCCESS;
  for (auto& capture : captures().list) {
    const bool here = std::any_of(capture->streams.begin(), capture->streams.end(), [&](auto& weak) {
      auto stream = weak.lock();
      return stream && stream->context.get() == &context;
    });
    if (!here) continue;
    capture->invalidated = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult forbidSynchronize(Context& context) {
  const CUresult any = forbidDuringCapture(context), here = forbidOnContext(context);
  return here == CUDA_SUCCESS ? any : here;
}

CUresult captureWork(Stream& stream, bool& captured, const std::function<GraphNodePtr()>& make) {
  captured = false;
  if (!captures().count) return CUDA_SUCCESS;
  std::lock_guard lock(captureMutex());
  if (!stream.capture) return stream.isLegacy ? checkLegacy(stream) : CUDA_SUCCESS;
  if (stream.capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  auto node = make();
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  for (auto& before : stream.captureAfter) {
    node->dependencies.push_back(before.get());
    before->dependents.push_back(node.get());
  }
  stream.captureAfter.assign(1, node);
  captured = true;
  return CUDA_SUCCESS;
}

CUresult forbidOnStream(Stream& stream) {
  if (!captures().count) return CUDA_SUCCESS;
  std::lock_guard lock(captureMutex());
  if (!stream.capture) return stream.isLegacy ? checkLegacy(stream) : CUDA_SUCCESS;
  stream.capture->invalidated = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult waitInCapture(const std::shared_ptr<Stream>& stream, Event& event, unsigned flags, bool& captured) {
  captured = false;
  if (event.inCapture && !event.isCaptured()) return CUDA_ERROR_INVALID_VALUE;
  if (!captures().count) return CUDA_SUCCESS;
  std::lock_guard lock(captureMutex());
  auto from = event.capture.lock();
  if (from && from->streams.empty()) from = nullptr;  // that capture has ended
  auto& own = stream->capture;
  if (!own) {
    if (!from) return stream->isLegacy ? checkLegacy(*stream) : CUDA_SUCCESS;
    if (from->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->isLegacy) {
      from->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    own = from;
    stream->captureAfter = event.captureAfter;
    from->streams.push_back(stream);
    captured = true;
    return CUDA_SUCCESS;
  }
  if (own->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (flags & CU_EVENT_WAIT_EXTERNAL) {
    auto operation = std::make_shared<EventWaitOperation>();
    operation->event = table<Event>().find(event.handle);
    return captureWork(*stream, captured, [&] { return addNode(own->graph, operation, {}); });
  }
  captured = true;
  if (from == own) {
    addUnique(stream->captureAfter, event.captureAfter);
    return CUDA_SUCCESS;
  }
  if (!from && !event.recorded()) return CUDA_SUCCESS;
  own->invalidated = true;
  if (from) from->invalidated = true;
  return from ? CUDA_ERROR_STREAM_CAPTURE_MERGE : CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return begin(stream, mode, nullptr, {});
}

CUresult cuStreamBeginCapture(CUstream stream) {
  return begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, nullptr, {});
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph handle, const CUgraphNode* dependencies,
                                     const CUgraphEdgeData*, size_t count, CUstreamCaptureMode mode) {
  auto graph = table<Graph>().find(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<GraphNode*> after;
  SOFT_TRY(resolveNodes(*graph, dependencies, count, after));
  return begin(stream, mode, graph, after);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  CUgraph unseen = nullptr;
  if (!out) out = &unseen;  // the real driver takes it: of a capture into a graph that the program has
  std::lock_guard lock(captureMutex());
  auto capture = stream->capture;
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
    endCapture(capture);  // the attempt ends it
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  if (capture->origin.lock() != stream) {
    capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  CUresult result = capture->invalidated         ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                    : !joined(*capture, *stream) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                                 : CUDA_SUCCESS;
  endCapture(capture);
  *out = nullptr;
  if (result == CUDA_SUCCESS) {
    *out = capture->graph->handle;
  } else if (capture->ownsGraph) {
    table<Graph>().take(capture->graph->handle);
  }
  return result;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return captureInfo(handle, {status, nullptr, nullptr, nullptr, nullptr});
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return captureInfo(handle, {status, id, nullptr, nullptr, nullptr});
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies, size_t* count) {
  return captureInfo(handle, {status, id, graph, dependencies, count});
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   const CUgraphEdgeData** edges, size_t* count) {
  if (edges) *edges = nullptr;
  return captureInfo(handle, {status, id, graph, dependencies, count});
}

CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode* dependencies, size_t count,
                                           unsigned int flags) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(captureMutex());
  if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  std::vector<GraphNode*> nodes;
  SOFT_TRY(resolveNodes(*stream->capture->graph, dependencies, count, nodes));
  std::vector<GraphNodePtr> named;
  named.reserve(nodes.size());
  for (GraphNode* node : nodes) named.push_back(table<GraphNode>().find(node->handle));
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->captureAfter.clear();
  addUnique(stream->captureAfter, named);
  return CUDA_SUCCESS;
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode* dependencies,
                                              const CUgraphEdgeData*, size_t count, unsigned int flags) {
  return cuStreamUpdateCaptureDependencies(stream, dependencies, count, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, threadMode);
  return CUDA_SUCCESS;
}
