#pragma once
// What stands behind every exported symbol: the row's export. Post and Await rows are sent from here; Local
// and Policy rows go to the function of the same name in client/calls/ (namespace custom). Such a row whose
// function is not linked in, and a symbol without a row, log their name once and return
// CUDA_ERROR_NOT_SUPPORTED.

#include <new>

#include "client/accepted_settings.h"
#include "client/contexts.h"
#include "client/process.h"
#include "client/session.h"
#include "schema/rows.h"

namespace gpupool::client {

// The policy functions, by the names of the driver's. Weak: the coverage report tells which are there.
namespace custom {
#define CALL(function, ...) extern decltype(::function) function __attribute__((weak));
#define SESSION_CALL(...)
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
}  // namespace custom

// The policy function of a row; null if it is not linked in.
template <schema::Name N>
struct Policy;
#define CALL(function, ...)                         \
  template <>                                       \
  struct Policy<#function> {                        \
    static auto get() { return &custom::function; } \
  };
#define SESSION_CALL(...)
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL

// gcc 12 with UBSan does not take string_view::find for a constant.
constexpr bool nameHas(std::string_view name, std::string_view part) {
  for (size_t at = 0; at < name.size(); ++at)
    if (name.substr(at).starts_with(part)) return true;
  return false;
}

// Of a graph, and not of an executable one; captures make graphs, too.
constexpr bool mayChangeGraphs(std::string_view name) {
  if (name.starts_with("cuStreamBeginCapture") || name.starts_with("cuStreamEndCapture") ||
      name.starts_with("cuStreamUpdateCapture"))
    return true;
  return name.starts_with("cuGraph") && !name.starts_with("cuGraphExec") &&
         !name.starts_with("cuGraphLaunch") && !name.starts_with("cuGraphUpload") && !nameHas(name, "Get");
}

CUresult notSupported(const char* name, std::atomic<bool>& said);
void traceCall(std::string_view name, CUresult result);
extern bool tracing;

// A generated row: mint, send, and for an Await take the outputs.
template <class R>
struct Generated;
template <schema::Name N, class F, schema::Client C, schema::Worker W, class... Roles>
struct Generated<schema::Row<N, F, C, W, Roles...>> {
  using R = schema::Row<N, F, C, W, Roles...>;

  template <class... A>
  static CUresult call(A... arguments) {
    CUcontext context = contexts().working();
    Session& session = Session::get();
    std::tuple<Sent<Roles, A>...> all{Sent<Roles, A>{arguments}...};
    return std::apply(
        [&](auto&... each) {
          if (!(each.mint() && ... && true)) return CUDA_ERROR_INVALID_VALUE;
          CUresult status = R::client == schema::Client::Post ? session.post<N>(context, each.value()...)
                                                              : session.await<N>(context, each.value()...);
          (each.settle(status == CUDA_SUCCESS), ...);
          return status;
        },
        all);
  }

 private:
  // One parameter: what is sent, and what follows from the reply.
  template <class Role, class T>
  struct Sent {
    T argument;
    bool mint() { return true; }
    T value() const { return argument; }
    void settle([[maybe_unused]] bool success) {
      if constexpr (schema::isRole<schema::Frees, Role>)
        if (success) dropPlain(argument);
    }
  };
  // A new handle reaches the caller's variable last: that may be in an array of the same call, as the next
  // node's variable is in its dependencies.
  template <schema::Name P, class T>
  struct Sent<schema::Mints<P>, T> {
    T argument;
    std::remove_pointer_t<T> made{};
    bool mint() {
      if (argument != nullptr) made = mintPlain<std::remove_pointer_t<T>>();
      return argument != nullptr;
    }
    T value() { return &made; }
    void settle(bool success) {
      if (success)
        *argument = made;
      else
        dropPlain(made);
    }
  };
};

template <schema::Name Symbol, bool PerThread, class R, class F>
struct Entry;
template <schema::Name Symbol, bool PerThread, class R, class... A>
struct Entry<Symbol, PerThread, R, CUresult(A...)> {
  static CUresult CUDAAPI call(A... arguments) noexcept {
    if constexpr (!R::beforeInit) {
      if constexpr (R::cleanup) {  // may come from a static destructor, after the session's end
        bool skip = false;
        CUresult status = process::readyForCleanup(&skip);
        if (status != CUDA_SUCCESS || skip) return status;
      } else {
        CUresult status = process::ready();
        if (__builtin_expect(status != CUDA_SUCCESS, 0)) return status;
      }
      if (__builtin_expect(Session::inHostFunction(), 0)) {
        if constexpr (!R::inHostFunction) return CUDA_ERROR_NOT_PERMITTED;
      }
    }
    CUresult result;
    bool before = perThreadDefault;
    if constexpr (PerThread) perThreadDefault = true;
    try {
      result = route(arguments...);
    } catch (const std::bad_alloc&) {
      result = CUDA_ERROR_OUT_OF_MEMORY;
    } catch (...) {
      result = CUDA_ERROR_UNKNOWN;
    }
    if constexpr (PerThread) perThreadDefault = before;
    if constexpr (mayChangeGraphs(R::name.view())) graphRevision.fetch_add(1, std::memory_order_acq_rel);
    if (__builtin_expect(tracing, 0)) traceCall(Symbol.view(), result);
    return result;
  }

 private:
  static CUresult route(A... arguments) {
    if constexpr (R::client == schema::Client::Local || R::client == schema::Client::Policy) {
      auto function = Policy<R::name>::get();
      if (function == nullptr) {
        static std::atomic<bool> said{false};
        return notSupported(Symbol.text, said);
      }
      return function(arguments...);
    } else {
      return Generated<R>::call(arguments...);
    }
  }
};

}  // namespace gpupool::client
