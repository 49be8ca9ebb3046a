// Order: completion words, events, host functions, stream memory operations, captures.
#include "server/worker/callbacks.h"
#include "server/worker/serve.h"
#include "server/worker/suspender_waits.h"

namespace gpupool::server {
namespace {

using StreamCreate = GPUPOOL_ROW(cuStreamCreateWithPriority);
using Word = GPUPOOL_ROW(sessionWord);
using Gate = GPUPOOL_ROW(sessionGate);
using GateOpen = GPUPOOL_ROW(sessionGateOpen);
using EventRecord = GPUPOOL_ROW(sessionEventRecord);
using EventDestroy = GPUPOOL_ROW(cuEventDestroy_v2);
using EventQuery = GPUPOOL_ROW(cuEventQuery);
using EventElapsed = GPUPOOL_ROW(cuEventElapsedTime_v2);
using HostFunction = GPUPOOL_ROW(sessionHostFunction);
using Drain = GPUPOOL_ROW(sessionDrain);
using Printed = GPUPOOL_ROW(sessionOutput);
using CaptureInfo = GPUPOOL_ROW(sessionCaptureInfo);
using BeginCapture = GPUPOOL_ROW(cuStreamBeginCapture_v2);
using BeginCaptureToGraph = GPUPOOL_ROW(cuStreamBeginCaptureToGraph);

constexpr std::chrono::seconds kCopiesBound{
    30};  // a client that takes nothing for so long gets no answer, too

// Over a network a stream's word is told without being watched for: whoever keeps credit or synchronises
// would ask for it next, one way later.
void streamWord(Session& session, Call& call) {
  Served<Word> served(session, call);
  if (!served.open()) return;
  uint64_t word = served.get<"word">().value(), value = served.get<"value">().value();
  CUresult status = session.words().write(call.view, served.get<"stream">().value(), word, value);
  if (status == CUDA_SUCCESS && !session.mapsMemory() && !session.words().watch(word, value))
    status = CUDA_ERROR_OUT_OF_MEMORY;
  served.close(status);
}

void gate(Session& session, Call& call) {
  Served<Gate> served(session, call);
  if (served.open())
    served.close(session.words().awaitIn(call.view, served.get<"stream">().value(),
                                         served.get<"word">().value(), served.get<"value">().value()));
}

void openGate(Session& session, Call& call) {
  Served<GateOpen> served(session, call);
  if (!served.open()) return;
  const bool known = session.words().raise(served.get<"word">().value(), served.get<"value">().value());
  served.close(known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

void eventRecord(Session& session, Call& call) {
  Served<EventRecord> served(session, call);
  if (!served.open()) return;
  CUstream stream = served.get<"stream">().value();
  unsigned flags = served.get<"flags">().value();
  const Driver& driver = session.driver();
  CUresult status = flags == 0 ? driver.cuEventRecord(served.get<"event">().value(), stream)
                               : driver.cuEventRecordWithFlags(served.get<"event">().value(), stream, flags);
  if (status == CUDA_SUCCESS && served.get<"word">().value() != 0)
    status =
        session.words().write(call.view, stream, served.get<"word">().value(), served.get<"value">().value());
  // One watch too many is left out: the client asks again.
  if (status == CUDA_SUCCESS && served.get<"tell">().value() != 0)
    session.words().watch(served.get<"word">().value(), served.get<"value">().value());
  served.close(status);
}

// Of the current context. A query would end a capture.
bool hasNoWork(const Driver& driver, CUstream stream) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult result = driver.cuStreamIsCapturing(stream, &capture);
  if (capture != CU_STREAM_CAPTURE_STATUS_NONE) return false;
  if (result == CUDA_SUCCESS) result = driver.cuStreamQuery(stream);
  return result == CUDA_SUCCESS || result == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

// No stream that the session has a name of has work, or a capture.
bool streamsIdle(Session& session) {
  const Driver& driver = session.driver();
  bool idle = true;
  const auto ask = [&](CUcontext context, CUstream stream) {
    CUcontext popped = nullptr;
    if (!idle || driver.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return;
    idle = hasNoWork(driver, stream);
    driver.cuCtxPopCurrent_v2(&popped);
  };
  session.objects().forEach(HandleKind::stream, [&](uint64_t, uint64_t real) {
    const auto stream = reinterpret_cast<CUstream>(real);
    CUcontext context = nullptr;
    if (idle && driver.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS) ask(context, stream);
  });
  session.objects().forEach(HandleKind::context, [&](uint64_t, uint64_t context) {
    ask(reinterpret_cast<CUcontext>(context), CU_STREAM_LEGACY);
  });
  return idle;
}

void eventDestroy(Session& session, Call& call) {
  Served<EventDestroy> served(session, call);
  if (!served.open()) return;
  session.eventTimes().forget(served.get<"hEvent">().id());
  session.sharedEvents().forget(served.get<"hEvent">().id(), [&] { return streamsIdle(session); });
  served.close(served.invoke(session.driver().cuEventDestroy_v2));
}

// An event that a node of a graph has recorded has no word: what was copied ahead of it goes to the client
// ahead of the answer.
void eventQuery(Session& session, Call& call) {
  Served<EventQuery> served(session, call);
  if (!served.open()) return;
  const CUresult status = served.invoke(session.driver().cuEventQuery);
  if (status == CUDA_SUCCESS)
    lookUntil(std::chrono::steady_clock::now() + kCopiesBound,
              [&] { return session.words().settled() || session.words().sticky() != CUDA_SUCCESS; });
  served.close(status);
}

void eventElapsed(Session& session, Call& call) {
  Served<EventElapsed> served(session, call);
  if (!served.open()) return;
  auto& start = served.get<"hStart">();
  auto& end = served.get<"hEnd">();
  CUresult status = served.invoke(session.driver().cuEventElapsedTime_v2);
  if (status == CUDA_ERROR_INVALID_HANDLE)  // one was not recorded here
    session.eventTimes().elapsed(session.driver(), start.id(), start.value(), end.id(), end.value(),
                                 call.frame.context, served.get<"pMilliseconds">().plain(), status);
  served.close(status);
}

void CUDA_CB streamCallback(CUstream, CUresult status, void* data) { session_callbacks::run(data, status); }

void hostFunction(Session& session, Call& call) {
  Served<HostFunction> served(session, call);
  if (!served.open()) return;
  void* data = session_callbacks::dataOf(session, served.get<"callback">().value());
  CUstream stream = served.get<"stream">().value();
  served.close(served.get<"error">().value() != 0
                   ? session.driver().cuStreamAddCallback(stream, &streamCallback, data, 0)
                   : session.driver().cuLaunchHostFunc(stream, &session_callbacks::hostNode, data));
}

void drain(Session& session, Call& call) {
  Served<Drain> served(session, call);
  if (!served.open()) return;
  call.drained = true;
  served.close(served.get<"wholeContext">().value() != 0
                   ? session.driver().cuCtxSynchronize()
                   : session.driver().cuStreamSynchronize(served.get<"stream">().value()));
}

void printed(Session& session, Call& call) {
  Served<Printed> served(session, call);
  if (!served.open()) return;
  call.drained = true;
  served.close(CUDA_SUCCESS);
}

template <class R, auto Member, size_t Width, bool waits>
void memoryOperation(Session& session, Call& call) {
  Served<R> served(session, call);
  if (!served.open()) return;
  if (waits) session.noteWaitForValue();
  bool ours = session.space().owns(served.template get<"addr">().value(), Width);
  served.close(ours ? served.invoke(session.driver().*Member) : CUDA_ERROR_INVALID_VALUE);
}

void beginCapture(Session& session, Call& call) {
  Served<BeginCapture> served(session, call);
  if (served.open())
    served.close(session.driver().cuStreamBeginCapture_v2(served.get<"hStream">().value(),
                                                          CU_STREAM_CAPTURE_MODE_RELAXED));
}

void beginCaptureToGraph(Session& session, Call& call) {
  Served<BeginCaptureToGraph> served(session, call);
  if (!served.open()) return;
  served.get<"mode">().value() = CU_STREAM_CAPTURE_MODE_RELAXED;
  served.close(served.invoke(session.driver().cuStreamBeginCaptureToGraph));
}

void captureInfo(Session& session, Call& call) {
  Served<CaptureInfo> served(session, call);
  if (!served.open()) return;
  const CUgraphNode* dependencies = nullptr;
  const CUgraphEdgeData* edges = nullptr;
  size_t count = 0;
  CUresult status = session.driver().cuStreamGetCaptureInfo_v3(
      served.get<"stream">().value(), &served.get<"status">().plain(), &served.get<"id">().plain(),
      served.get<"graph">().pass(), &dependencies, &edges, &count);
  // Numbered by the frame that it began with: a worker that makes the call again has the same number for it.
  auto& id = served.get<"id">().plain();
  if (const uint64_t frame = session.record().captureFrame(id); frame != 0) id = frame;
  auto& nodes = served.get<"dependencies">().array();
  auto& data = served.get<"edges">().array();
  count = std::min(count, nodes.size());
  for (size_t i = 0; i < count; ++i) {
    nodes[i] = dependencies[i];
    if (i < data.size()) data[i] = edges != nullptr ? edges[i] : CUgraphEdgeData{};
  }
  served.get<"count">().plain() = count;
  served.close(status);
}

}  // namespace

void addStreamHandlers(HandlerTable& table) {
  // Some 20 streams fill the room that the driver has reserved for streams, code and variables (580, H200).
  table.add<StreamCreate>(&servePlacing<StreamCreate, &Driver::cuStreamCreateWithPriority>);
  table.add<Word>(&streamWord);
  table.add<Gate>(&gate);
  table.add<GateOpen>(&openGate);
  table.add<EventRecord>(&eventRecord);
  table.add<EventDestroy>(&eventDestroy);
  table.add<EventQuery>(&eventQuery);
  table.add<EventElapsed>(&eventElapsed);
  table.add<HostFunction>(&hostFunction);
  table.add<Drain>(&drain);
  table.add<Printed>(&printed);
  table.add<CaptureInfo>(&captureInfo);
  table.add<BeginCapture>(&beginCapture);
  table.add<BeginCaptureToGraph>(&beginCaptureToGraph);
#define MEMORY_OPERATION(function, width, waits) \
  table.add<GPUPOOL_ROW(function)>(&memoryOperation<GPUPOOL_ROW(function), &Driver::function, width, waits>);
  MEMORY_OPERATION(cuStreamWaitValue32_v2, 4, true)
  MEMORY_OPERATION(cuStreamWaitValue64_v2, 8, true)
  MEMORY_OPERATION(cuStreamWriteValue32_v2, 4, false)
  MEMORY_OPERATION(cuStreamWriteValue64_v2, 8, false)
#undef MEMORY_OPERATION
}

}  // namespace gpupool::server
