#pragma once
// How a handler is written: decode and check all arguments, call, update the session's tables, encode the
// outputs. `serveDriver` is the whole of it for a row that maps straight onto a driver function; named
// handlers (calls/) use `open` and `close` around what they do themselves.

#include "server/arena_mmap.h"
#include "server/worker/codec.h"
#include "server/worker/deed.h"
#include "server/worker/dispatch.h"

namespace gpupool::server {

template <class R>
class Served {
 public:
  Served(Session& session, Call& call) : session_(session), call_(call) {}

  // False: nothing more to do; the call carries the reason.
  bool open() {
    Reader in(call_.bytes);
    if (!arguments_.read(in, session_.objects())) {
      call_.malformed = "arguments do not fit the call's row";
      return false;
    }
    call_.status = arguments_.wrong();
    if (call_.status != CUDA_SUCCESS) return false;
    if (__builtin_expect(capturing(), 0)) capture_ = captureNow();
    if constexpr (R::loads) placing_ = session_.holdPlacing();
    return true;
  }
  void close(CUresult status) {
    call_.status = status;
    const bool success = status == CUDA_SUCCESS;
    std::vector<uint64_t> named;
    // What the record needs of the arguments is read while their handles are known.
    std::optional<DeedOf<R>> deed;
    if (success && (DeedOf<R>::kept || namesHandles || capture_ != 0 || capturing()))
      deed.emplace(session_, call_, arguments_);
    if constexpr (DeedOf<R>::beginsCapture)
      if (success) beginCapture();
    if constexpr (DeedOf<R>::endsCapture)
      if (const uint64_t begun = session_.record().captureEnds(streamId()); begun != 0) capture_ = begun;
    // A stream that the call has destroyed is not asked about: the driver takes its handle for a pointer.
    const bool joined = deed && capture_ == 0 && !DeedOf<R>::frees;
    const uint64_t capture = joined ? captureNow() : capture_;
    arguments_.finish(success, session_.objects());
    if constexpr (namesHandles) {
      Objects::Naming naming(named);
      arguments_.write(call_.out, session_.objects());
    } else {
      arguments_.write(call_.out, session_.objects());
    }
    if (deed && (DeedOf<R>::kept || !named.empty() || capture != 0)) keep(*deed, capture, std::move(named));
    if constexpr (DeedOf<R>::endsCapture) endCapture(success);
    placing_ = {};
  }
  template <schema::Name N>
  auto& get() {
    return arguments_.template get<N>();
  }
  template <class F>
  CUresult invoke(F function) {
    return function == nullptr ? CUDA_ERROR_NOT_SUPPORTED : arguments_.call(function);
  }

 private:
  template <class F>
  void forEachSlot(F&& f) {
    [&]<class... Roles>(std::tuple<Roles...>*) {
      (f(Roles{}, arguments_.template get<Roles::name>()), ...);
    }(static_cast<typename R::RoleList*>(nullptr));
  }
  static constexpr bool namesHandles = []<class... Roles, class... A>(std::tuple<Roles...>*,
                                                                      std::tuple<A...>*) {
    return ((schema::isRole<schema::OutHandle, Roles> ||
             (schema::isArrayRole<schema::OutArray, Roles> && schema::isHandle<std::remove_pointer_t<A>>)) ||
            ... || false);
  }(static_cast<typename R::RoleList*>(nullptr), static_cast<typename R::Arguments*>(nullptr));

  bool capturing() const { return session_.record().capturing(); }
  // The capture that the call's stream belongs to now; 0: none, or the call has no stream.
  uint64_t captureNow() {
    uint64_t id = 0;
    if (!capturing()) return id;
    forEachSlot([&](auto, auto& slot) {
      if constexpr (std::is_same_v<std::decay_t<decltype(slot.value())>, CUstream>)
        if (id == 0) id = session_.captureOf(slot.value());
    });
    return id;
  }
  void keep(DeedOf<R>& deed, uint64_t capture, std::vector<uint64_t> named) {
    Record::Entry entry;
    entry.frame = call_.frame;
    entry.arguments = call_.bytes;
    const auto out = call_.out.span();
    entry.outputs.assign(out.begin(), out.end());
    const Record::Deed made = deed.make(capture, named);
    entry.names = std::move(named);
    session_.record().add(std::move(entry), made);
    if constexpr (R::name.view() == "cuStreamBeginCaptureToGraph")
      session_.record().alias(Record::capture(capture), arguments_.template get<"hGraph">().id());
    if constexpr (R::name.view() == "sessionGraphMoveChild")
      session_.record().consume(arguments_.template get<"child">().id());
  }
  uint64_t streamId() { return arguments_.template get<"hStream">().id(); }
  void beginCapture() {
    capture_ = session_.captureOf(arguments_.template get<"hStream">().value());
    session_.record().captureBegins(streamId(), capture_, call_.frame.seq);
  }
  // The graph that was captured is what was recorded of its capture.
  void endCapture(bool success) {
    if constexpr (DeedOf<R>::endsCapture) {
      if (capture_ == 0) return;
      const uint64_t graph =
          success ? session_.objects().known(*arguments_.template get<"phGraph">().pass()) : 0;
      if (graph != 0)
        session_.record().alias(graph, Record::capture(capture_));
      else
        session_.record().abandon(Record::capture(capture_));
    }
  }

  Session& session_;
  Call& call_;
  Arguments<R> arguments_;
  uint64_t capture_ = 0;                  // that the call's stream belonged to when it arrived
  std::unique_lock<std::mutex> placing_;  // rows that load code
};

template <class R, auto Member>
void serveDriver(Session& session, Call& call) {
  Served<R> served(session, call);
  if (served.open()) served.close(served.invoke(session.driver().*Member));
}

// The same for a call that makes the driver reserve room in which it places variables of code that is loaded
// later, too.
template <class R, auto Member>
void servePlacing(Session& session, Call& call) {
  const auto order = session.holdPlacing();
  PlaceGlobals place;
  serveDriver<R, Member>(session, call);
}

// The handlers: those of Generated rows, and those of Checked rows, which each chapter in calls/ adds.
class HandlerTable {
 public:
  template <class R>
  void add(void (*serve)(Session&, Call&)) {
    static_assert(R::worker == schema::Worker::Checked, "only a Checked row has a handler of its own");
    put<R>(serve);
  }
  template <class R>
  void put(void (*serve)(Session&, Call&)) {
    insert(R::id, {serve, R::beside, R::aside, R::name.view(), DeedOf<R>::verified, R::polls});
  }
  const Handler* find(uint32_t id) const;

 private:
  void insert(uint32_t id, const Handler& handler);
  // By the row's hash, the next free place when it is taken: every frame asks.
  static constexpr size_t kPlaces = 2048;
  std::vector<std::pair<uint32_t, Handler>> places_{kPlaces};
  size_t used_ = 0;
};

// The green contexts of the device end, before its primary context does. Executor only.
void endGreens(Session& session, CUdevice device);

// True if both sides of the copy lie in the session's memory (arrays always do).
bool ownsCopy(Session& session, const CUDA_MEMCPY3D_v2& copy);

void addArrayHandlers(HandlerTable&);
void addContextHandlers(HandlerTable&);
void addMemoryHandlers(HandlerTable&);
void addCopyHandlers(HandlerTable&);
void addLinkHandlers(HandlerTable&);
void addModuleHandlers(HandlerTable&);
void addTextureHandlers(HandlerTable&);
void addShareHandlers(HandlerTable&);
void addStreamHandlers(HandlerTable&);
void addLaunchHandlers(HandlerTable&);
void addGraphHandlers(HandlerTable&);
void addGraphTextHandlers(HandlerTable&);
void addGreenHandlers(HandlerTable&);

#define GPUPOOL_ROW(name) ::gpupool::schema::RowOf<#name>

}  // namespace gpupool::server
