#pragma once
// How a handler is written: decode and check all arguments, call, update the session's tables, encode the
// outputs. `serveDriver` is the whole of it for a row that maps straight onto a driver function; named
// handlers (calls/) use `open` and `close` around what they do themselves.

#include "server/worker/codec.h"
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
    return call_.status == CUDA_SUCCESS;
  }
  void close(CUresult status) {
    call_.status = status;
    bool success = status == CUDA_SUCCESS;
    keep(success);
    arguments_.finish(success, session_.objects());
    arguments_.write(call_.out, session_.objects());
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
  template <template <schema::Name> class Wanted>
  static consteval bool hasRole() {
    return []<class... Roles>(std::tuple<Roles...>*) {
      return (schema::isRole<Wanted, Roles> || ... || false);
    }(static_cast<typename R::RoleList*>(nullptr));
  }
  // The record: creations by the handle they mint, settings by the handle they change, DeviceValues for ever.
  void keep(bool success) {
    if (!success) return;
    if constexpr (hasRole<schema::Frees>()) {
      forEachSlot([&](auto role, auto& slot) {
        if constexpr (schema::isRole<schema::Frees, decltype(role)>) session_.record().forget(slot.id());
      });
    } else if constexpr (hasRole<schema::Mints>() || hasRole<schema::DeviceValue>() || R::recorded) {
      Record::Entry entry;
      entry.frame = call_.frame;
      entry.bytes = call_.bytes;
      forEachSlot([&](auto role, auto& slot) {
        using Role = decltype(role);
        if constexpr (schema::isRole<schema::Mints, Role>) entry.subject = slot.id();
        if constexpr (schema::isRole<schema::Handle, Role>)
          if (entry.subject == 0 && !hasRole<schema::DeviceValue>()) entry.subject = slot.id();
        if constexpr (schema::isRole<schema::DeviceValue, Role>)
          entry.values.push_back(static_cast<uint64_t>(slot.plain()));
      });
      session_.record().append(std::move(entry));
    }
  }
  template <class F>
  void forEachSlot(F&& f) {
    [&]<class... Roles>(std::tuple<Roles...>*) {
      (f(Roles{}, arguments_.template get<Roles::name>()), ...);
    }(static_cast<typename R::RoleList*>(nullptr));
  }

  Session& session_;
  Call& call_;
  Arguments<R> arguments_;
};

template <class R, auto Member>
void serveDriver(Session& session, Call& call) {
  Served<R> served(session, call);
  if (served.open()) served.close(served.invoke(session.driver().*Member));
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
    insert(R::id, {serve, R::beside, R::aside, R::name.view()});
  }
  const Handler* find(uint32_t id) const;

 private:
  void insert(uint32_t id, const Handler& handler);
  // By the row's hash, the next free place when it is taken: every frame asks.
  static constexpr size_t kPlaces = 2048;
  std::vector<std::pair<uint32_t, Handler>> places_{kPlaces};
  size_t used_ = 0;
};

// True if both sides of the copy lie in the session's memory (arrays always do).
bool ownsCopy(Session& session, const CUDA_MEMCPY3D_v2& copy);

void addArrayHandlers(HandlerTable&);
void addContextHandlers(HandlerTable&);
void addMemoryHandlers(HandlerTable&);
void addCopyHandlers(HandlerTable&);
void addModuleHandlers(HandlerTable&);
void addTextureHandlers(HandlerTable&);
void addStreamHandlers(HandlerTable&);
void addLaunchHandlers(HandlerTable&);
void addGraphHandlers(HandlerTable&);
void addGraphTextHandlers(HandlerTable&);

#define GPUPOOL_ROW(name) ::gpupool::schema::RowOf<#name>

}  // namespace gpupool::server
