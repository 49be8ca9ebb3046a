#include "client/streams.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "client/ended_streams.h"
#include "client/process.h"

namespace gpupool::client {

HandleTable<Stream> streams{Kind::stream};
HandleTable<Event> events{Kind::event};
HandleTable<Function> functions{Kind::function};
HandleTable<Function> kernels{Kind::kernel};
HandleTable<Library> libraries{Kind::library};
HandleTable<Library> modules{Kind::module};
HandleTable<Plain> graphs{Kind::graph};
HandleTable<Plain> graphNodes{Kind::graphNode};
HandleTable<GraphExec> graphExecs{Kind::graphExec};
std::atomic<uint64_t> graphRevision{0};
HandleTable<Plain> arrays{Kind::array};
HandleTable<Plain> mipmaps{Kind::mipmap};
HandleTable<Plain> links{Kind::linkState};

namespace {

StreamHooks hooks{};

// The per-thread default streams of one application thread, one per context and life.
struct ThreadStreams {
  struct Entry {
    Context* context;
    uint64_t life;
    CUstream stream;
  };
  std::vector<Entry> entries;
};

void destroyThreadStreams(void* session) {
  auto* mine = static_cast<ThreadStreams*>(session);
  for (auto& entry : mine->entries) {
    if (entry.context->id.load() != entry.life || process::state() != process::State::ready) continue;
    if (auto stream = streams.pin(toId(entry.stream)))
      endStream({stream.get(), entry.context->handle, entry.stream});
  }
  delete mine;
}

void equip(Stream& stream, CUcontext context) {
  static std::atomic<uint64_t> ids{16};  // below: the special streams' ids
  stream.context = context;
  stream.id = ids.fetch_add(1);
  Words& words = Session::get().words();
  stream.word = words.take();
  uint64_t start = words.value(stream.word);
  stream.posted = start;
  stream.requested = start;
}

CUresult perThreadStream(Context& context, StreamRef& out) {
  ThreadState& thread = threadState();
  if (thread.session == nullptr) {
    static const bool registered = (setThreadExit(&destroyThreadStreams), true);
    (void)registered;
    thread.session = new ThreadStreams;
  }
  auto& entries = static_cast<ThreadStreams*>(thread.session)->entries;
  for (auto& entry : entries)
    if (entry.context == &context && entry.life == context.id.load()) {
      out = {streams.find(toId(entry.stream)), context.handle, entry.stream};
      return out.stream != nullptr ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
  CUstream handle = nullptr;
  CUresult status = makeStream(context.handle, 0, 0, handle);
  if (status != CUDA_SUCCESS) return status;
  entries.push_back({&context, context.id.load(), handle});
  out = {streams.find(toId(handle)), context.handle, handle};
  return CUDA_SUCCESS;
}

}  // namespace

void hookStreams(const StreamHooks& given) { hooks = given; }

CUresult makeStream(CUcontext context, unsigned flags, int priority, CUstream& out, CUgreenCtx green) {
  auto made = streams.prepare();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  equip(*made.object, context);
  made.object->flags = flags;
  made.object->priority = priority;
  made.object->green = green;
  auto handle = fromId<CUstream>(made.id);
  CUresult status = CUDA_ERROR_OUT_OF_MEMORY;  // no word: tens of thousands are alive
  if (made.object->word != 0)
    status = green == nullptr
                 ? Session::get().post<"cuStreamCreateWithPriority">(context, &handle, flags, priority)
                 : Session::get().post<"cuGreenCtxStreamCreate">(context, &handle, green, flags, priority);
  if (status != CUDA_SUCCESS) {
    streams.discard(made.id);
    return status;
  }
  streams.publish(made.id);
  const StreamRef ref{made.object, context, handle};
  status = hooks.made(ref);
  if (status == CUDA_SUCCESS)
    out = handle;
  else
    endStream(ref);
  return status;
}

void retireWord(uint64_t word, uint64_t last) {
  Session& session = Session::get();
  // Over a network nobody would tell that it was written.
  if (!session.mapsMemory() && !session.words().reached(word, last)) session.watch(word, last);
  session.words().retire(word, last);
}

ContextStreams& streamsOf(Context& context) {
  void* known = context.session.load(std::memory_order_acquire);
  if (known != nullptr) return *static_cast<ContextStreams*>(known);
  static std::mutex making;
  std::lock_guard lock(making);
  known = context.session.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto* fresh = new ContextStreams;
    equip(fresh->legacy, context.handle);
    fresh->legacy.id = CU_STREAM_LEGACY == nullptr ? 1 : reinterpret_cast<uint64_t>(CU_STREAM_LEGACY);
    context.session.store(fresh, std::memory_order_release);
    known = fresh;
  }
  return *static_cast<ContextStreams*>(known);
}

CUresult priorityRange(Context& context, int& least, int& greatest) {
  ContextStreams& mine = streamsOf(context);
  if (!mine.prioritiesKnown) {
    int lowest = 0, highest = 0;
    CUresult status = Session::get().await<"cuCtxGetStreamPriorityRange">(context.handle, &lowest, &highest);
    if (status != CUDA_SUCCESS) return status;
    mine.least = lowest;
    mine.greatest = highest;
    mine.prioritiesKnown = true;
  }
  least = mine.least;
  greatest = mine.greatest;
  return CUDA_SUCCESS;
}

CUresult clampPriority(Context& context, int& priority) {
  if (priority == 0) return CUDA_SUCCESS;
  int least = 0, greatest = 0;
  CUresult status = priorityRange(context, least, greatest);
  if (status == CUDA_SUCCESS) priority = std::clamp(priority, greatest, least);
  return status;
}

namespace {

EndedStreams& endedStreams() {
  static auto* ended = new EndedStreams;
  return *ended;
}

}  // namespace

void endsWithContext(CUstream stream) { endedStreams().add(stream); }

void forgetStreams(Context& context) {
  std::vector<uint64_t> dead;
  {
    auto order = lockWords();
    streams.forEach([&](uint64_t id, Stream& stream) {
      if (stream.context != context.handle) return;
      stream.ended = true;
      dead.push_back(id);
    });
  }
  for (uint64_t id : dead) {
    streams.destroy(id);
    endsWithContext(fromId<CUstream>(id));
  }
  context.session.store(nullptr);  // its words may still be written: not given back
}

namespace {

// The last synchronous upload that may still be on its way. By word, for its stream may be gone.
struct Landing {
  std::atomic<bool> open{false};
  std::mutex mutex;
  bool allowed = true;  // nobody else sees this process' device memory
  uint64_t word = 0, value = 0;
  CUcontext context = nullptr;
  CUstream wire = nullptr;
} landing;

bool isOrderedBehind(const StreamRef& ref) {  // under landing.mutex
  if (ref.context != landing.context) return false;
  bool blocking = (ref.stream->flags & CU_STREAM_NON_BLOCKING) == 0;
  return ref.wire == landing.wire || ((landing.wire == nullptr || ref.wire == nullptr) && blocking);
}

// Until there is none, or it is one that what `ref` does next comes behind. Null: until there is none. The
// lock is landing's, and is held again.
void awaitLanding(std::unique_lock<std::mutex>& lock, const StreamRef* ref) {
  while (landing.open && (ref == nullptr || !isOrderedBehind(*ref))) {
    const uint64_t word = landing.word, value = landing.value;
    lock.unlock();
    Session::get().waitWord(word, value);  // a fault is reported by what comes next
    lock.lock();
    if (landing.word == word && landing.value == value) landing.open = false;
  }
}

}  // namespace

CUresult returnBeforeLanding(const StreamRef& ref) {
  uint64_t value = 0;
  CUresult status = requestWord(ref, value);
  if (status != CUDA_SUCCESS || isDone(ref, value)) return status;
  std::unique_lock lock(landing.mutex);
  awaitLanding(lock, &ref);  // of another stream's, for only one is remembered
  if (!landing.allowed) {
    lock.unlock();
    return waitFor(ref, value);
  }
  landing.word = ref.stream->word;
  landing.value = value;
  landing.context = ref.context;
  landing.wire = ref.wire;
  landing.open = true;
  return CUDA_SUCCESS;
}

void landBeforeReturning() {
  std::unique_lock lock(landing.mutex);
  landing.allowed = false;
  awaitLanding(lock, nullptr);
}

CUresult noStream(CUstream stream) {
  return endedStreams().contains(stream) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult findStream(CUstream handle, StreamRef& out) {
  uint64_t value = reinterpret_cast<uint64_t>(handle);
  if (value > 2) {
    Stream* stream = streams.find(value);
    if (stream == nullptr) return noStream(handle);
    out = {stream, stream->context, handle};
    return stream->capturing.load(std::memory_order_relaxed) ? hooks.captureAccepts(*stream) : CUDA_SUCCESS;
  }
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  if (const Context* green = contexts().currentGreen(); __builtin_expect(green != nullptr, 0))
    return value == 2 || perThreadDefault ? CUDA_ERROR_INVALID_HANDLE : findStream(green->defaultStream, out);
  if (value == 2 || (value == 0 && perThreadDefault)) return perThreadStream(*context, out);
  out = {&streamsOf(*context).legacy, context->handle, nullptr};
  return CUDA_SUCCESS;
}

CUresult resolveStream(CUstream handle, StreamRef& out) {
  CUresult status = findStream(handle, out);
  if (__builtin_expect(landing.open.load(std::memory_order_relaxed), 0) && status == CUDA_SUCCESS) {
    std::unique_lock lock(landing.mutex);
    awaitLanding(lock, &out);
  }
  return status;
}

static CUresult requestNext(const StreamRef& ref, uint64_t& value) {  // under lockWords
  value = ref.stream->posted.load(std::memory_order_acquire);
  if (ref.stream->ended) {  // asked for before its end; what was counted since was not sent
    value = ref.stream->requested.load(std::memory_order_acquire);
    return CUDA_SUCCESS;
  }
  if (ref.stream->capturing.load()) return CUDA_SUCCESS;  // asked for before the capture began
  if (ref.stream->requested.load(std::memory_order_relaxed) >= value) return CUDA_SUCCESS;
  CUresult status = Session::get().post<"sessionWord">(ref.context, ref.wire, ref.stream->word, value);
  if (status == CUDA_SUCCESS) noteRequested(*ref.stream, value);
  return status;
}

CUresult requestWord(const StreamRef& ref, uint64_t& value) {
  auto order = lockWords();  // words of one stream must be asked for in the order of their values
  return requestNext(ref, value);
}

// An event behind all that the stream was sent; null: there is none left. Under lockWords.
static CUevent markBehind(const StreamRef& ref) {
  CUevent mark = nullptr;
  if (makeMark(*contexts().find(ref.context), mark) != CUDA_SUCCESS) return nullptr;
  Session::get().post<"sessionEventRecord">(ref.context, mark, ref.wire, 0u, uint64_t{0}, uint64_t{0}, 0u);
  return mark;
}

void forgetDone(ContextStreams& mine) {
  std::erase_if(mine.rests, [](const Rest& rest) {
    const bool done = Session::get().words().reached(rest.word, rest.value);
    if (done) endEvent(rest.last);
    return done;
  });
}

CUresult endStream(const StreamRef& ref, bool hidden) {
  Stream& stream = *ref.stream;
  Rest rest{stream.word, 0, nullptr, stream.flags, stream.green};
  CUresult status = CUDA_SUCCESS;
  {
    // Whoever synchronises the context may ask for its word at the same time: before the end, or not at all.
    auto order = lockWords();
    if (stream.ended) return CUDA_ERROR_INVALID_HANDLE;
    requestNext(ref, rest.value);
    if (stream.ended) return CUDA_ERROR_INVALID_HANDLE;  // while its word was awaited
    stream.ended = true;
    rest.value = stream.requested.load();
    if (!hidden && !stream.capturing && !isDone(ref, rest.value)) rest.last = markBehind(ref);
    status = Session::get().post<"cuStreamDestroy_v2">(ref.context, ref.wire);
  }
  if (rest.last != nullptr) {
    ContextStreams& mine = streamsOf(*contexts().find(ref.context));
    std::lock_guard lock(mine.resting);
    forgetDone(mine);
    mine.rests.push_back(rest);
  }
  streams.destroy(toId(ref.wire));
  retireWord(rest.word, rest.value);  // frees in this stream's order wait for it
  return status;
}

bool hasCredit(const StreamRef& ref) {
  const uint64_t posted = ref.stream->posted.load(std::memory_order_acquire);
  return posted < kCredit || Session::get().words().reached(ref.stream->word, posted - kCredit);
}

CUresult keepCredit(const StreamRef& ref) {
  uint64_t value = 0;
  CUresult status = requestWord(ref, value);
  if (status != CUDA_SUCCESS || value < kCredit) return status;
  // Hundreds of operations are under way: sleeping through some costs nothing, and polling would take the
  // core's other half from the worker's thread where the two are neighbours.
  Session& session = Session::get();
  for (int naps = 0; naps < 100 && session.sticky() == CUDA_SUCCESS; ++naps) {
    if (session.words().reached(ref.stream->word, value - kCredit)) return CUDA_SUCCESS;
    session.nap(std::chrono::microseconds(50));
  }
  return session.waitWord(ref.stream->word, value - kCredit);
}

bool isDone(const StreamRef& ref, uint64_t value) {
  return Session::get().words().reached(ref.stream->word, value);
}

static bool isIdle(const StreamRef& ref) { return isDone(ref, ref.stream->posted.load()); }

// That nothing is ahead of the stream's next operation in streams that it is ordered behind.
static bool othersIdle(const StreamRef& ref) {
  if ((ref.stream->flags & CU_STREAM_NON_BLOCKING) != 0) return true;
  bool all = true;
  forEachStream(ref.context, [&](const StreamRef& other) {
    if ((ref.wire == nullptr) != (other.wire == nullptr))
      all = all && ((other.stream->flags & CU_STREAM_NON_BLOCKING) != 0 || isIdle(other));
  });
  if (ref.wire == nullptr)
    forEachRest(*contexts().find(ref.context),
                [&](const Rest& rest) { all = all && (rest.flags & CU_STREAM_NON_BLOCKING) != 0; });
  return all;
}

bool nothingAhead(const StreamRef& ref) { return isIdle(ref) && othersIdle(ref); }

CUresult requestWordBehindOthers(const StreamRef& ref, uint64_t& value) {
  if (ref.stream->capturing || othersIdle(ref)) return requestWord(ref, value);
  return sendWithWord(ref, value, [&](uint64_t count) {
    return Session::get().post<"sessionWord">(ref.context, ref.wire, ref.stream->word, count);
  });
}

static bool sleepsIn(CUcontext handle) {
  Context* context = contexts().find(handle);
  return context != nullptr &&
         (context->flags.load(std::memory_order_relaxed) & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_BLOCKING_SYNC;
}

CUresult waitFor(const StreamRef& ref, uint64_t value) {
  Session& session = Session::get();
  CUresult status = CUDA_SUCCESS;
  if (!isDone(ref, value)) {
    uint64_t asked = 0;
    if (ref.stream->requested.load(std::memory_order_acquire) < value) status = requestWord(ref, asked);
    if (status == CUDA_SUCCESS) status = session.waitWord(ref.stream->word, value, sleepsIn(ref.context));
  }
  if (status == CUDA_SUCCESS) status = session.sticky();
  if (status == CUDA_SUCCESS) status = hooks.settle({ref.stream->word, value});
  return status;
}

// Of the context's streams, and of those that have ended, of which counts(flags, green context).
template <class Counts>
static CUresult awaitWork(CUcontext context, Counts&& counts) {
  Session& session = Session::get();
  std::vector<std::pair<uint64_t, uint64_t>> open;  // words, which outlive their streams
  CUresult status = session.sticky();
  forEachStream(context, [&](const StreamRef& ref) {
    uint64_t value = ref.stream->posted.load(std::memory_order_acquire);
    if (status != CUDA_SUCCESS || isDone(ref, value) || ref.stream->capturing) return;
    if (!counts(ref.stream->flags, ref.stream->green)) return;
    status = requestWord(ref, value);
    if (status == CUDA_SUCCESS) open.emplace_back(ref.stream->word, value);
  });
  if (Context* object = contexts().find(context); object != nullptr)
    forEachRest(*object, [&](const Rest& rest) {
      if (counts(rest.flags, rest.green)) open.emplace_back(rest.word, rest.value);
    });
  for (auto& [word, value] : open) {
    if (status != CUDA_SUCCESS) break;
    if (!session.words().reached(word, value)) status = session.waitWord(word, value, sleepsIn(context));
  }
  if (status == CUDA_SUCCESS) status = hooks.settle({});
  return status == CUDA_SUCCESS ? session.sticky() : status;
}

// NVIDIA's driver waits for blocking streams where the default one is waited for, also where nothing was sent
// to that since, and answers its queries so. The other way round it does not.
static bool isBehindOthers(const StreamRef& ref) {
  return ref.wire == nullptr && !ref.stream->capturing && !othersIdle(ref);
}
static CUresult awaitBlocking(CUcontext context) {
  return awaitWork(context, [](unsigned flags, CUgreenCtx) { return (flags & CU_STREAM_NON_BLOCKING) == 0; });
}

CUresult synchronizeStream(const StreamRef& ref) {
  Session& session = Session::get();
  uint64_t value = ref.stream->posted.load(std::memory_order_acquire);
  if (session.printing() && !session.capturing()) {
    CUresult status = session.await<"sessionDrain">(ref.context, ref.wire, 0u);
    if (status != CUDA_SUCCESS || session.mapsMemory())
      return status == CUDA_SUCCESS ? hooks.settle({}) : status;
  }
  if (isBehindOthers(ref)) return awaitBlocking(ref.context);
  return waitFor(ref, value);  // over a network the words tell which bytes may be fetched, also when drained
}

CUresult synchronizeContext(CUcontext context, CUgreenCtx green) {
  Session& session = Session::get();
  if (session.printing() && !session.capturing()) {
    CUresult status = session.await<"sessionDrain">(context, CUstream{nullptr}, 1u);
    if (status != CUDA_SUCCESS || session.mapsMemory())
      return status == CUDA_SUCCESS ? hooks.settle({}) : status;
  }
  return awaitWork(context, [&](unsigned, CUgreenCtx of) { return green == nullptr || of == green; });
}

CUresult queryStream(const StreamRef& ref) {
  Session& session = Session::get();
  if (CUresult status = session.sticky(); status != CUDA_SUCCESS) return status;
  uint64_t value = ref.stream->posted.load(std::memory_order_acquire);
  if (isDone(ref, value) && isBehindOthers(ref)) {
    const CUresult done = session.await<"cuStreamQuery">(ref.context, ref.wire);
    return done == CUDA_SUCCESS ? awaitBlocking(ref.context) : done;
  }
  if (!isDone(ref, value)) {
    // The first question, and every one over a network, or where the program may know better, is the
    // driver's: the word may be late although the work is done. It is asked before the word is, which is work
    // of the stream too.
    bool fresh = ref.stream->requested.load(std::memory_order_acquire) < value;
    if (fresh || !session.mapsMemory() || session.mayKnow(ref.stream->moment)) {
      const uint64_t moment = session.nextMoment();
      CUresult done = session.await<"cuStreamQuery">(ref.context, ref.wire);
      if (done == CUDA_ERROR_NOT_READY) ref.stream->moment = moment;
      CUresult status = requestWord(ref, value);
      if (status == CUDA_SUCCESS && done == CUDA_SUCCESS) status = waitFor(ref, value);
      return done != CUDA_SUCCESS ? done : status;
    }
    if (!isDone(ref, value))
      return session.sticky() != CUDA_SUCCESS ? session.sticky() : CUDA_ERROR_NOT_READY;
  }
  return hooks.settle({});
}

}  // namespace gpupool::client
