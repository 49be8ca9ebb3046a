// Events: a real event in the worker for order and time, a completion word for queries and waits.
#include <algorithm>
#include <chrono>
#include <thread>

#include "client/capture.h"
#include "client/entry.h"
#include "client/memory/carrier.h"
#include "client/memory/registered.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

constexpr unsigned kKnownFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
std::mutex recording;  // the values of one word must be asked for in their order

// Over a network a query need not be a round trip. The worker tells the words of records by itself, in a
// process that queries events; an event that is recorded again and again and never queried is left out. Until
// the word is told the event is not ready, unless the program may know better: any answer may have told it.
constexpr std::chrono::milliseconds kQueries{100};  // a process queries events
constexpr std::chrono::milliseconds kQuiet{2};      // the worker is asked again: a word may be told late
constexpr unsigned kUnqueried = 2;
std::atomic<int64_t> lastQuery{INT64_MIN / 2};

int64_t nowNs() { return std::chrono::nanoseconds(transport::Clock::now().time_since_epoch()).count(); }
int64_t inNs(std::chrono::nanoseconds time) { return time.count(); }

void workerTells(Event& event, uint64_t value, uint64_t moment) {
  event.moment.store(moment, std::memory_order_relaxed);
  event.asked.store(nowNs(), std::memory_order_relaxed);
  event.told.store(value, std::memory_order_release);
}

bool queriedSoon(const Event& event) {
  return !Session::get().mapsMemory() && event.unqueried.load(std::memory_order_relaxed) < kUnqueried &&
         nowNs() - lastQuery.load(std::memory_order_relaxed) < inNs(kQueries);
}

// The program cannot know better than the word, which has not come.
bool stillQuiet(const Event& event, uint64_t value) {
  const bool told = event.told.load(std::memory_order_acquire) == value;
  if (Session::get().mayKnow(event.moment.load(std::memory_order_relaxed))) return false;
  return Session::get().mapsMemory() ||
         (told && nowNs() - event.asked.load(std::memory_order_relaxed) < inNs(kQuiet));
}

// The word and value of a record in `stream`. A word's values are written in order as long as one stream
// writes them: while another stream still has to write this event's word, the record gets a word of its own.
// Under `recording`.
CUresult nextMark(const Event& event, const Stream& stream, WordMark& mark) {
  Session& session = Session::get();
  mark = event.last.load(std::memory_order_relaxed);
  if (event.stream != stream.id && !session.words().reached(mark.word, mark.value)) {
    const uint64_t fresh = session.words().take();
    if (fresh == 0) {  // tens of thousands are in use: the other stream comes first
      if (CUresult status = session.waitWord(mark.word, mark.value); status != CUDA_SUCCESS) return status;
    } else {
      mark = {fresh, session.words().value(fresh)};
    }
  }
  mark.value = mark.value + 1;
  return CUDA_SUCCESS;
}

CUresult record(CUevent handle, CUstream stream, unsigned flags) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  return status == CUDA_SUCCESS ? recordIn(ref, handle, flags) : status;
}

// An event without a record of its own: never recorded, or by a node of a graph, or shared.
CUresult askDriver(CUevent handle, Event& event) {
  Session& session = Session::get();
  CUresult status = event.shared ? session.await<"sessionSharedQuery">(event.context, handle)
                                 : session.await<"cuEventQuery">(event.context, handle);
  return status == CUDA_SUCCESS ? settleHostMemory() : status;
}

// An event that has a word.
CUresult queryWord(CUevent handle, Event& event, WordMark last) {
  Session& session = Session::get();
  // Nobody would stop a program that asks again and again, for as long as its lease is suspended.
  if (!session.words().reached(last.word, last.value)) session.rest();
  if (session.words().reached(last.word, last.value)) {
    session.observed(event.moment.load(std::memory_order_relaxed));
    return settleHostMemory(last);
  }
  if (stillQuiet(event, last.value)) return CUDA_ERROR_NOT_READY;
  const uint64_t moment = session.nextMoment();
  // Ahead of the question, so that the word comes with its answer.
  if (!session.mapsMemory() && event.told.load(std::memory_order_acquire) != last.value)
    session.watch(last.word, last.value);
  CUresult status = session.await<"cuEventQuery">(event.context, handle);
  if (status == CUDA_ERROR_NOT_READY) workerTells(event, last.value, moment);
  if (status == CUDA_SUCCESS) status = session.waitWord(last.word, last.value);
  return status == CUDA_SUCCESS ? settleHostMemory(last) : status;
}

CUresult query(CUevent handle, Event& event) {
  Session& session = Session::get();
  if (CUresult status = session.sticky(); status != CUDA_SUCCESS) return status;
  if (CUresult status = captureEventConflict(event); status != CUDA_SUCCESS) return status;
  if (CUresult status = captureForbids(); status != CUDA_SUCCESS) return status;
  const WordMark last = event.last.load(std::memory_order_acquire);
  if (!event.ever) return askDriver(handle, event);
  if (!session.mapsMemory()) {
    event.unqueried.store(0, std::memory_order_relaxed);
    lastQuery.store(nowNs(), std::memory_order_relaxed);
  }
  return queryWord(handle, event, last);
}

CUresult wait(CUevent handle, Event& event) {
  Session& session = Session::get();
  if (CUresult status = captureEventConflict(event); status != CUDA_SUCCESS) return status;
  if (CUresult status = captureForbids(); status != CUDA_SUCCESS) return status;
  CUresult status = CUDA_SUCCESS;
  WordMark behind{};
  if (event.ever) {
    behind = event.last.load(std::memory_order_acquire);
    status = session.waitWord(behind.word, behind.value, (event.flags & CU_EVENT_BLOCKING_SYNC) != 0);
  } else {
    // Ends with the graph's launch or the session.
    for (auto pause = std::chrono::microseconds(20);
         (status = askDriver(handle, event)) == CUDA_ERROR_NOT_READY;) {
      session.nap(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(2000));
    }
  }
  if (status == CUDA_SUCCESS) status = session.sticky();
  if (status == CUDA_SUCCESS && session.printing()) return synchronizeContext(event.context);
  return status == CUDA_SUCCESS ? settleHostMemory(behind) : status;
}

CUresult elapsed(float* milliseconds, CUevent start, CUevent end) {
  Event *a = nullptr, *b = nullptr;
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult status = findEvent(start, a); status != CUDA_SUCCESS) return status;
  if (CUresult status = findEvent(end, b); status != CUDA_SUCCESS) return status;
  return Session::get().await<"cuEventElapsedTime_v2">(a->context, milliseconds, start, end);
}

bool lives(const Event& event) {
  return contexts().find(event.context)->id.load(std::memory_order_relaxed) == event.life;
}

}  // namespace

CUresult findEvent(CUevent handle, Event*& out) {
  out = events.find(toId(handle));
  if (out == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return lives(*out) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUevent makeEvent(const Context& context, unsigned flags) {
  auto made = events.create();
  if (made.object == nullptr) return nullptr;
  Words& words = Session::get().words();
  made.object->context = context.handle;
  made.object->life = context.id.load(std::memory_order_relaxed);
  made.object->flags = flags;
  const uint64_t word = words.take();
  made.object->last = WordMark{word, words.value(word)};
  if (word != 0) return fromId<CUevent>(made.id);
  events.destroy(made.id);  // tens of thousands are alive
  return nullptr;
}

CUresult endEvent(CUevent handle) {
  Event* event = events.find(toId(handle));
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  CUcontext context = event->context;
  const bool known = lives(*event);  // to the worker: programs destroy events after their device's reset, too
  const WordMark last = event->last.load();
  if (!events.destroy(toId(handle))) return CUDA_ERROR_INVALID_HANDLE;
  CUresult status = CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (known) status = Session::get().post<"cuEventDestroy_v2">(context, handle);
  retireWord(last.word, last.value);
  return status;
}

CUresult makeMark(const Context& context, CUevent& mark) {
  mark = makeEvent(context, CU_EVENT_DISABLE_TIMING);
  if (mark == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  return Session::get().post<"cuEventCreate">(context.handle, &mark, unsigned{CU_EVENT_DISABLE_TIMING});
}

void eventShared(Event& event) {
  std::lock_guard lock(recording);
  event.shared = true;
  event.ever = false;
}

CUresult recordIn(const StreamRef& ref, CUevent handle, unsigned flags) {
  Event* event = nullptr;
  if (CUresult found = findEvent(handle, event); found != CUDA_SUCCESS) return found;
  if (ref.context != event->context) return CUDA_ERROR_INVALID_HANDLE;
  const bool external = (flags & CU_EVENT_RECORD_EXTERNAL) != 0;
  if (ref.stream->capturing && external && event->shared) return CUDA_ERROR_NOT_SUPPORTED;
  if (ref.stream->capturing) {
    CUresult status = Session::get().await<"sessionEventRecord">(ref.context, handle, ref.wire, flags,
                                                                 uint64_t{0}, uint64_t{0}, 0u);
    if (status != CUDA_SUCCESS) return status;
    if (external) {  // a node: launches record it, and only the driver knows when
      event->ever = false;
      return CUDA_SUCCESS;
    }
    event->captured = true;
    captureRecorded(*event, *ref.stream);
    return CUDA_SUCCESS;
  }
  if (event->shared) {
    event->captured = false;
    // Who waits for it in another process reads what was copied before it.
    if (carrier().busy())
      if (CUresult status = synchronizeStream(ref); status != CUDA_SUCCESS) return status;
    return countIn(ref, Session::get().await<"sessionSharedRecord">(ref.context, handle, ref.wire));
  }
  std::lock_guard lock(recording);
  const WordMark before = event->last.load(std::memory_order_relaxed);
  WordMark mark{};
  CUresult status = nextMark(*event, *ref.stream, mark);
  if (status != CUDA_SUCCESS) return status;
  Session& session = Session::get();
  event->told.store(0, std::memory_order_relaxed);
  const uint64_t moment = session.nextMoment();
  event->moment.store(moment, std::memory_order_relaxed);
  const bool tell = queriedSoon(*event) && session.expect(mark.word, mark.value);
  status = postTo<"sessionEventRecord">(ref, handle, ref.wire, flags, uint64_t{mark.word},
                                        uint64_t{mark.value}, unsigned{tell});
  if (status != CUDA_SUCCESS) {  // the session's end, as a rule
    if (mark.word != before.word) Session::get().words().retire(mark.word, mark.value - 1);
    return status;
  }
  event->captured = false;
  event->ever = true;
  event->stream = ref.stream->id;
  event->last.store(mark, std::memory_order_release);
  event->unqueried.fetch_add(1, std::memory_order_relaxed);
  if (tell) workerTells(*event, mark.value, moment);
  if (mark.word != before.word) retireWord(before.word, before.value);
  return CUDA_SUCCESS;
}

CUresult waitIn(const StreamRef& ref, CUevent handle, unsigned flags) {
  Event* event = nullptr;
  if (CUresult found = findEvent(handle, event); found != CUDA_SUCCESS) return found;
  if (event->shared && ref.stream->capturing && (flags & CU_EVENT_WAIT_EXTERNAL) != 0)
    return CUDA_ERROR_NOT_SUPPORTED;
  if (event->shared && !event->captured && !ref.stream->capturing)
    return countIn(ref, Session::get().await<"sessionSharedWait">(ref.context, ref.wire, handle));
  if (!event->captured) return postTo<"cuStreamWaitEvent">(ref, ref.wire, handle, flags);
  // The stream joins that capture, or the driver says why not: either way its answer is waited for.
  uint64_t value = 0;
  CUresult status = requestWord(ref, value);
  if (status != CUDA_SUCCESS) return status;
  status = Session::get().await<"cuStreamWaitEvent">(ref.context, ref.wire, handle, flags);
  if (status != CUDA_SUCCESS) return status;
  captureJoined(ref, *event);
  if (!ref.stream->capturing) ref.stream->posted.fetch_add(1, std::memory_order_acq_rel);
  return CUDA_SUCCESS;
}

namespace custom {

CUresult cuEventCreate(CUevent* out, unsigned flags) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  bool interprocessTimed = (flags & CU_EVENT_INTERPROCESS) != 0 && (flags & CU_EVENT_DISABLE_TIMING) == 0;
  if (out == nullptr || (flags & ~kKnownFlags) != 0 || interprocessTimed) return CUDA_ERROR_INVALID_VALUE;
  CUevent handle = makeEvent(*context, flags);
  if (handle == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  // What processes share of it is the worker's own (server/worker/shared_events.h).
  status = Session::get().post<"cuEventCreate">(context->handle, &handle, flags & ~CU_EVENT_INTERPROCESS);
  if (status != CUDA_SUCCESS) {
    events.destroy(toId(handle));
    return status;
  }
  *out = handle;
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return record(event, stream, 0); }
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  return (flags & ~unsigned{CU_EVENT_RECORD_EXTERNAL}) != 0 ? CUDA_ERROR_INVALID_VALUE
                                                            : record(event, stream, flags);
}
CUresult cuEventQuery(CUevent handle) {
  Event* event = nullptr;
  const CUresult found = findEvent(handle, event);
  return found == CUDA_SUCCESS ? query(handle, *event) : found;
}
CUresult cuEventSynchronize(CUevent handle) {
  Event* event = nullptr;
  const CUresult found = findEvent(handle, event);
  return found == CUDA_SUCCESS ? wait(handle, *event) : found;
}
CUresult cuEventDestroy(CUevent event) { return endEvent(event); }
CUresult cuEventDestroy_v2(CUevent event) { return endEvent(event); }
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return elapsed(milliseconds, start, end);
}
CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return elapsed(milliseconds, start, end);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  return status == CUDA_SUCCESS ? waitIn(ref, event, flags) : status;
}

}  // namespace custom
}  // namespace gpupool::client
