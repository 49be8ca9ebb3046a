#pragma once
// The order of streams: which stream a handle means, how many operations were sent to it, and when they are
// done.
//
// Every operation goes out through postTo, which counts it; a completion word with that count comes back when
// asked for (requestWord). Credits: a stream may be kCredit operations ahead of its word, then its caller
// waits, as the driver's own queue would make it. Threads: any.

#include <mutex>
#include <vector>

#include "client/contexts.h"
#include "client/objects.h"
#include "client/order_lock.h"
#include "client/session.h"

namespace gpupool::client {

inline constexpr uint64_t kCredit = 512;
inline constexpr uint64_t kWordEvery = 64;

struct StreamRef {
  Stream* stream = nullptr;
  CUcontext context = nullptr;
  CUstream wire = nullptr;  // what travels: 0 for the legacy stream, else a minted handle
};

// Events (calls/event.cpp). A new one, which the worker does not know yet; null: too many are alive.
CUevent makeEvent(const Context& context, unsigned flags);
CUresult endEvent(CUevent event);
// CUDA_ERROR_INVALID_HANDLE: there is none. CUDA_ERROR_CONTEXT_IS_DESTROYED: it has ended with its context.
// The worker knows nothing of it then, and what is posted of it would fail the session.
CUresult findEvent(CUevent event, Event*& out);
// cuEventRecordWithFlags and cuStreamWaitEvent in a stream that is known.
CUresult recordIn(const StreamRef& ref, CUevent event, unsigned flags);
CUresult waitIn(const StreamRef& ref, CUevent event, unsigned flags);
// One that the program does not see: it orders streams.
CUresult makeMark(const Context& context, CUevent& mark);
// Others have it, too, from here on.
void eventShared(Event& event);

// What streams ask of the layers above them, set once before the first stream: host memory brings home what
// the device has finished writing, a capture may refuse work in its stream, and a new stream comes behind
// what its context waits for. Streams include none of them.
struct StreamHooks {
  CUresult (*settle)(WordMark behind);  // of no word: of all work
  CUresult (*captureAccepts)(Stream& stream);
  CUresult (*made)(const StreamRef& ref);
};
void hookStreams(const StreamHooks& hooks);

// The stream `handle` names on this thread: 0 and the special values by context and thread, created ones by
// table.
CUresult resolveStream(CUstream handle, StreamRef& out);
// The stream that calls without a stream argument work in.
inline CUresult implicitStream(StreamRef& out) { return resolveStream(nullptr, out); }

// Asks for the word behind everything sent so far; the count it will carry.
CUresult requestWord(const StreamRef& ref, uint64_t& value);
// The same, and behind what is ahead of the stream's next operation in streams that it is ordered behind, as
// the default stream is behind blocking ones: the stream's own word may have passed before that is done.
CUresult requestWordBehindOthers(const StreamRef& ref, uint64_t& value);
CUresult keepCredit(const StreamRef& ref);

// Counts posted operations, too: a caller that requests a word with each operation (a host function over a
// network) would otherwise never wait for one.
inline bool creditDue(const Stream& stream, uint64_t posted) {
  return posted % kWordEvery == 0 || posted - stream.requested.load(std::memory_order_relaxed) >= kWordEvery;
}

// Without waiting; `due`: keepCredit must follow.
template <schema::Name N, class... A>
CUresult sendTo(const StreamRef& ref, bool& due, A... arguments) {
  due = false;
  CUresult status = Session::get().post<N>(ref.context, arguments...);
  if (status != CUDA_SUCCESS || ref.stream->capturing.load(std::memory_order_relaxed)) return status;
  uint64_t posted = ref.stream->posted.fetch_add(1, std::memory_order_acq_rel) + 1;
  due = creditDue(*ref.stream, posted);
  return CUDA_SUCCESS;
}

template <schema::Name N, class... A>
CUresult postTo(const StreamRef& ref, A... arguments) {
  bool due = false;
  CUresult status = sendTo<N>(ref, due, arguments...);
  return due ? keepCredit(ref) : status;
}

// The status of an operation in the stream that was awaited: it counts as those of postTo do.
inline CUresult countIn(const StreamRef& ref, CUresult status) {
  if (status == CUDA_SUCCESS) ref.stream->posted.fetch_add(1, std::memory_order_acq_rel);
  return status;
}

// For a row that ends with the stream's word: `send(value)` sends it. Words of one stream must be asked for
// in the order of their values, so this is one at a time; send must not wait for the device.
// Without waiting; keepCredit must follow.
inline OrderLock lockWords() { return {}; }
// Under lockWords: asked for up to `value`. Others may have asked for more while this thread awaited a reply.
inline void noteRequested(Stream& stream, uint64_t value) {
  if (stream.requested.load(std::memory_order_relaxed) < value)
    stream.requested.store(value, std::memory_order_release);
}
template <class Send>
CUresult sendWithWord(const StreamRef& ref, uint64_t& value, Send&& send) {
  auto order = lockWords();
  // Counted before it is sent: whoever counts less was sent before it.
  value = ref.stream->posted.fetch_add(1, std::memory_order_acq_rel) + 1;
  CUresult status = send(value);
  if (status == CUDA_SUCCESS) noteRequested(*ref.stream, value);
  return status;
}

template <class Send>
CUresult postWithWord(const StreamRef& ref, uint64_t& value, Send&& send) {
  CUresult status = sendWithWord(ref, value, send);
  return status == CUDA_SUCCESS ? keepCredit(ref) : status;
}

// A synchronous copy from ordinary memory returns when its bytes are staged. The stream they travel in, and
// those that wait for it, find them landed; any other stream is held back until they have, by whoever
// resolves it next.
CUresult returnBeforeLanding(const StreamRef& ref);
// Before another process can see device memory of this one, or this one another's: no stream of this session
// orders what that does. Waits for the copies that have returned, and from here on none returns before its
// bytes have landed.
void landBeforeReturning();

// True if keepCredit would not wait.
bool hasCredit(const StreamRef& ref);
// True if everything sent up to `value` is done.
bool isDone(const StreamRef& ref, uint64_t value);
// True if nothing is ahead of the next operation of the stream, in it or in one it is ordered behind.
bool nothingAhead(const StreamRef& ref);
// Waits for it; device output and host memory are up to date then.
CUresult waitFor(const StreamRef& ref, uint64_t value);
CUresult synchronizeStream(const StreamRef& ref);
// green: those of its streams alone that are that green context's.
CUresult synchronizeContext(CUcontext context, CUgreenCtx green = nullptr);
// CUDA_SUCCESS, CUDA_ERROR_NOT_READY or the session's fault, without waiting.
CUresult queryStream(const StreamRef& ref);

// Visits the streams of a context: its legacy stream, created ones, per-thread ones.
template <class F>
void forEachStream(CUcontext context, F&& f);

// What a stream that has ended still has to do. It is done when `word` has come to `value`.
struct Rest {
  uint64_t word = 0, value = 0;
  CUevent last = nullptr;  // a mark behind all of it
  unsigned flags = 0;      // the stream's
  CUgreenCtx green = nullptr;
};

// The context's side of this file; created with the context's first call.
struct ContextStreams {
  Stream legacy;
  std::mutex resting;                   // not taken under lockWords
  std::vector<Rest> rests;              // under resting
  std::atomic<CUstream> gate{nullptr};  // new streams come behind it (calls/context_events.h)
  std::atomic<bool> prioritiesKnown{false};
  std::atomic<int> least{0}, greatest{0};
};
// The word of a destroyed stream or event: free again when the device has written `last` into it.
void retireWord(uint64_t word, uint64_t last);
// Makes a stream and returns its handle. No other thread sees it before the worker has been asked to create
// it.
// `green`: a stream of that green context, whose primary context is `context`.
CUresult makeStream(CUcontext context, unsigned flags, int priority, CUstream& out,
                    CUgreenCtx green = nullptr);
// Ends a stream that no capture needs any more. CUDA_ERROR_INVALID_HANDLE: another thread has ended it.
// `hidden`: it has no work of the program's.
CUresult endStream(const StreamRef& ref, bool hidden = false);
// Visits what the context's streams that have ended still have to do. Under a lock.
template <class F>
void forEachRest(Context& context, F&& visit);
void forgetDone(ContextStreams& mine);  // under resting
// Its context, or its green context, ends, and the program has not ended it: from here on noStream says so.
void endsWithContext(CUstream stream);
// Why a handle is no stream's.
CUresult noStream(CUstream stream);
ContextStreams& streamsOf(Context& context);
// Of streams of the context (asked for once), and a priority brought into it.
CUresult priorityRange(Context& context, int& least, int& greatest);
CUresult clampPriority(Context& context, int& priority);
void forgetStreams(Context& context);  // the context ended: its streams are gone

template <class F>
void forEachStream(CUcontext context, F&& f) {
  Context* object = contexts().find(context);
  if (object == nullptr) return;
  f(StreamRef{&streamsOf(*object).legacy, context, nullptr});
  streams.forEach([&](uint64_t id, Stream& stream) {
    if (stream.context == context) f(StreamRef{&stream, context, fromId<CUstream>(id)});
  });
}

template <class F>
void forEachRest(Context& context, F&& visit) {
  ContextStreams& mine = streamsOf(context);
  std::lock_guard lock(mine.resting);
  forgetDone(mine);
  for (const Rest& rest : mine.rests) visit(rest);
}

}  // namespace gpupool::client
