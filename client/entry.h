#pragma once
// What stands behind every exported symbol: the row's export. Rows of kind Post and Await are sent from here;
// Local and Custom rows go to the function of the same name in client/calls/ (namespace custom). A Custom row
// whose function is not linked in, and a symbol without a row, log their name once and return
// CUDA_ERROR_NOT_SUPPORTED.

#include <new>

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

// Set while a call came in by a per-thread name (_ptsz, _ptds): stream 0 then means the thread's own default
// stream.
extern thread_local bool perThreadDefault __attribute__((tls_model("initial-exec")));

CUresult notSupported(const char* name, std::atomic<bool>& said);
void traceCall(std::string_view name, CUresult result);
extern bool tracing;

// Calls that only give something back succeed silently once the session is over: they come from static
// destructors.
constexpr bool isCleanup(std::string_view name) {
  for (std::string_view word : {"Destroy", "Free", "Unload", "Release", "Unregister", "PrimaryCtxReset"})
    if (schema::contains(name, word)) return true;
  return false;
}
// Answered before cuInit.
constexpr bool beforeInit(std::string_view name) {
  for (std::string_view word : {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString",
                                "cuGetProcAddress", "cuGetProcAddress_v2", "cuGetExportTable",
                                "cuModuleGetLoadingMode", "cuThreadExchangeStreamCaptureMode"})
    if (name == word) return true;
  return false;
}

// A generated row: mint, send, and for an Await take the outputs.
template <class R>
struct Generated;
template <schema::Name N, class F, schema::Kind K, class... Roles>
struct Generated<schema::Row<N, F, K, Roles...>> {
  using R = schema::Row<N, F, K, Roles...>;

  template <class... A>
  static CUresult call(A... arguments) {
    Contexts& all = contexts();
    CUcontext context = nullptr;
    all.getCurrent(&context);
    Session& session = Session::get();
    CUresult status = mint<A...>(std::make_index_sequence<sizeof...(A)>{}, arguments...);
    if (status != CUDA_SUCCESS) return status;
    status = K == schema::Kind::Post ? session.post<N>(context, arguments...)
                                     : session.await<N>(context, arguments...);
    settle<A...>(std::make_index_sequence<sizeof...(A)>{}, status == CUDA_SUCCESS, arguments...);
    return status;
  }

 private:
  template <class... A, size_t... I>
  static CUresult mint(std::index_sequence<I...>, A... arguments) {
    CUresult status = CUDA_SUCCESS;
    (mintOne<std::tuple_element_t<I, std::tuple<Roles...>>>(arguments, status), ...);
    return status;
  }
  template <class Role, class T>
  static void mintOne([[maybe_unused]] T argument, [[maybe_unused]] CUresult& status) {
    if constexpr (schema::isRole<schema::Mints, Role>) {
      if (argument == nullptr)
        status = CUDA_ERROR_INVALID_VALUE;
      else
        *argument = mintPlain<std::remove_pointer_t<T>>();
    }
  }
  template <class... A, size_t... I>
  static void settle(std::index_sequence<I...>, [[maybe_unused]] bool success, A... arguments) {
    (settleOne<std::tuple_element_t<I, std::tuple<Roles...>>>(arguments, success), ...);
  }
  template <class Role, class T>
  static void settleOne([[maybe_unused]] T argument, [[maybe_unused]] bool success) {
    if constexpr (schema::isRole<schema::Mints, Role>) {
      if (!success) dropPlain(*argument), *argument = nullptr;
    } else if constexpr (schema::isRole<schema::Frees, Role>) {
      if (success) dropPlain(argument);
    }
  }
};

template <schema::Name Symbol, bool PerThread, class R, class F>
struct Entry;
template <schema::Name Symbol, bool PerThread, class R, class... A>
struct Entry<Symbol, PerThread, R, CUresult(A...)> {
  static constexpr bool isCustom = R::kind == schema::Kind::Local || R::kind == schema::Kind::Custom;

  static CUresult CUDAAPI call(A... arguments) noexcept {
    constexpr std::string_view name = R::name.view();
    if constexpr (!beforeInit(name)) {
      if constexpr (isCleanup(name)) {
        bool skip = false;
        CUresult status = process::readyForCleanup(&skip);
        if (status != CUDA_SUCCESS || skip) return status;
      } else {
        CUresult status = process::ready();
        if (__builtin_expect(status != CUDA_SUCCESS, 0)) return status;
      }
      if (__builtin_expect(Session::inHostFunction(), 0)) {
        if constexpr (!isQuery(name)) return CUDA_ERROR_NOT_PERMITTED;
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
    if (__builtin_expect(tracing, 0)) traceCall(Symbol.view(), result);
    return result;
  }

 private:
  // Inside host functions CUDA forbids calls; what cudart asks of itself to say so stays allowed.
  static constexpr bool isQuery(std::string_view name) {
    for (std::string_view word :
         {"GetCurrent", "GetDevice", "GetState", "GetErrorName", "GetErrorString", "GetAttribute",
          "GetApiVersion", "GetExportTable", "ExchangeStreamCaptureMode", "SetCurrent", "GetCount"})
      if (schema::contains(name, word)) return true;
    return false;
  }
  static CUresult route(A... arguments) {
    if constexpr (isCustom) {
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
