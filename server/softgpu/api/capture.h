#pragma once
// Stream capture (driver manual: Stream Management, cuStreamBeginCapture_v2 and
// cuThreadExchangeStreamCaptureMode).
//
// While a stream takes part in a capture, what is submitted to it becomes a node of the capture's graph.
// Calls that a capture cannot contain end it: it is invalidated, and everything on its streams answers 901
// until it is ended.

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "server/softgpu/api/context.h"
#include "server/softgpu/api/graph.h"

namespace gpupool::softgpu::api {

struct Event;

struct Capture {
  std::shared_ptr<Graph> graph;
  bool ownsGraph = true;  // false: cuStreamBeginCaptureToGraph
  uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  bool invalidated = false;
  std::weak_ptr<Stream> origin;
  std::vector<std::weak_ptr<Stream>> streams;      // with the origin
  std::vector<std::shared_ptr<Stream>> destroyed;  // of them; their work must be joined all the same
};

// Guards every stream's and event's capture state and the list of captures.
std::recursive_mutex& captureMutex();

// A call that a concurrent capture may prohibit (allocation, synchronisation, query ...): 900, and those
// captures are invalidated; success if nothing forbids it.
CUresult forbidDuringCapture(Context& context);

// The same for waiting for a whole context, which no capture in it survives, of whatever mode.
CUresult forbidSynchronize(Context& context);

// For events of a whole context: no capture that has a stream of it survives them. Others are not concerned.
CUresult forbidOnContext(Context& context);

// For work on `stream`: captured = true and success: `node` was appended to the capture's graph. captured =
// false and success: not capturing, submit it. Otherwise the error to return (901; 906 on the legacy stream).
// `make` builds the node's content; called only while capturing.
CUresult captureWork(Stream& stream, bool& captured, const std::function<std::shared_ptr<GraphNode>()>& make);

// cuStreamWaitEvent on an event recorded in a capture: the stream joins it. captured = false: an ordinary
// wait.
CUresult waitInCapture(const std::shared_ptr<Stream>& stream, Event& event, unsigned flags, bool& captured);

// For calls that no stream can capture (query, synchronize, synchronous copies).
CUresult forbidOnStream(Stream& stream);

bool capturing(Stream& stream);

}  // namespace gpupool::softgpu::api
