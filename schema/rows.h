#pragma once
// One row per call: who answers it, and what its parameters are. The client's exports, the worker's handlers,
// both codecs, the coverage report and the fuzzers are made from these rows. Why: docs/design.md, "Why call
// rows".
//
// A chapter file schema/calls/<chapter>.h is a list of
//
//     CALL(function, client, worker, role, role, ...)
//
// `function` is a function of cuda.h; every exported driver function that gpupool supports has a row.
// SESSION_CALL is the same for the session's own calls, which no program can name (schema/session_calls.h).
// A chapter is included several times with different meanings of CALL: once here, to define the row types.
//
// `client`: what libcuda.so.1 does when a program calls the function. One of
//     Local    a function in client/calls/ answers, from what the client knows
//     Post     generated from the row: sends it, and reports success at once
//     Await    generated from the row: sends it, and waits for the reply
//     Policy   a function in client/calls/ decides: it may send this row, other rows, several, or none
// and any of
//     BeforeInit       answered before cuInit
//     InHostFunction   answered while a host function (cuLaunchHostFunc) runs; all others are refused there
//     Cleanup          only gives something back: succeeds silently when the session has ended
//
// `worker`: what the worker does with a message that carries this name. One of
//     None        no message carries this name; the row has no roles
//     Generated   decodes the parameters by their roles, calls the driver's function of that name, replies
//     Checked     a handler in server/worker/calls/ does that, and checks or does more than the roles say
// and any of
//     Beside      may take long in the driver (compiles code, waits for the device): served by a thread
//                 beside the executor, so that only its caller waits
//     Aside       needs nothing of the driver: travels on the control channel, past all other calls
//                 (schema/frame.h)
//     Recorded    changes an object that a rebuilt session must have: kept in the record of the session
//                 (server/worker/record.h). Creations (Mints, DeviceValue) are always kept.
//     Setting     likewise, and it replaces an earlier call that had the same handles, the same device and
//                 the same arguments of enum types
//     Loads       may have the driver load code, which may place variables of modules: the first call with
//                 the same handles, device and text is kept, and no other call that loads runs meanwhile
//     Varies      what it answers besides its status is not the same from run to run (times, logs, names of a
//                 connection): calls that are made again in another worker are not compared by it
//     Polls       says whether something is done, or CUDA_ERROR_NOT_READY
//     Unlogged    what it does depends on more than the calls before it, such as what another process does at
//                 that moment: it is not made again in another worker
//
// The roles say what each parameter is, in the order of the prototype; they are checked against cuda.h:
//
//     CALL(cuStreamGetId, Local, None)
//     CALL(cuStreamDestroy_v2, Policy | Cleanup, Generated, Frees<"hStream">)
//     CALL(cuCtxSetLimit, Policy, Generated | Setting, In<"limit">, In<"value">)

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "schema/cuda.h"
#include "schema/handles.h"
#include "schema/names.h"
#include "schema/session_calls.h"

namespace gpupool::schema {

// The words of a row: one way (the low four bits), and flags.
enum class Client : uint32_t {
  Local = 1,
  Post = 2,
  Await = 4,
  Policy = 8,
  BeforeInit = 16,
  InHostFunction = 32,
  Cleanup = 64
};
enum class Worker : uint32_t {
  None = 1,
  Generated = 2,
  Checked = 4,
  Beside = 16,
  Aside = 32,
  Recorded = 64,
  Setting = 128,
  Loads = 256,
  Varies = 512,
  Polls = 1024,
  Unlogged = 2048
};
template <class W>
concept RowWord = std::is_same_v<W, Client> || std::is_same_v<W, Worker>;
template <RowWord W>
constexpr W operator|(W a, W b) {
  return static_cast<W>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}
template <RowWord W>
constexpr bool says(W all, W word) {
  return (static_cast<uint32_t>(all) & static_cast<uint32_t>(word)) != 0;
}
// Without the flags.
template <RowWord W>
constexpr W wayOf(W all) {
  return static_cast<W>(static_cast<uint32_t>(all) & 15);
}

// ---- roles: what a parameter is ----
template <Name N>
struct NamedRole {
  static constexpr auto name = N;
};
template <Name N, Name Count>
struct CountedRole {
  static constexpr auto name = N;
  static constexpr auto count = Count;
};

// A scalar or small struct by value.
template <Name N>
struct In : NamedRole<N> {};
// CUdevice: an ordinal of the lease.
template <Name N>
struct Device : NamedRole<N> {};
// A handle by value.
template <Name N>
struct Handle : NamedRole<N> {};
// T*: a new handle, named by the client.
template <Name N>
struct Mints : NamedRole<N> {};
// A handle that dies with this call.
template <Name N>
struct Frees : NamedRole<N> {};
// T*: a handle the worker names.
template <Name N>
struct OutHandle : NamedRole<N> {};
// T*: plain data in the reply; may be null.
template <Name N>
struct Out : NamedRole<N> {};
// T*: both ways.
template <Name N>
struct InOut : NamedRole<N> {};
// T*: a value that kernels see, such as an address or a texture; recorded.
template <Name N>
struct DeviceValue : NamedRole<N> {};
// const T*: plain data, handles inside mapped.
template <Name N>
struct Struct : NamedRole<N> {};
// const char*.
template <Name N>
struct Text : NamedRole<N> {};
// An address that is the same on both sides; the handler checks the span it uses.
template <Name N>
struct HostAddress : NamedRole<N> {};
// Not sent; the worker passes zero.
template <Name N>
struct Unused : NamedRole<N> {};
// const T*: plain data or handles, as many as the parameter `Count` says.
template <Name N, Name Count>
struct Array : CountedRole<N, Count> {};
// T*: capacity and length in the size_t* parameter `Count`; may be null.
template <Name N, Name Count>
struct OutArray : CountedRole<N, Count> {};
// char* with its capacity in the int parameter `Count`.
template <Name N, Name Count>
struct OutText : CountedRole<N, Count> {};

template <template <Name> class R, class T>
inline constexpr bool isRole = false;
template <template <Name> class R, Name N>
inline constexpr bool isRole<R, R<N>> = true;
template <template <Name, Name> class R, class T>
inline constexpr bool isArrayRole = false;
template <template <Name, Name> class R, Name N, Name C>
inline constexpr bool isArrayRole<R, R<N, C>> = true;

// True if a parameter of type T can have this role.
template <class Role, class T>
consteval bool roleFits() {
  using P = std::remove_pointer_t<T>;
  constexpr bool pointer = std::is_pointer_v<T> && !isHandle<T>;
  if constexpr (isRole<In, Role>)
    return !pointer && !isHandle<T>;
  else if constexpr (isRole<Device, Role>)
    return std::is_same_v<T, CUdevice>;
  else if constexpr (isRole<Handle, Role> || isRole<Frees, Role>)
    return isHandle<T>;
  else if constexpr (isRole<Mints, Role> || isRole<OutHandle, Role>)
    return pointer && isHandle<P>;
  else if constexpr (isRole<Out, Role> || isRole<InOut, Role> || isRole<DeviceValue, Role>)
    return pointer && !std::is_const_v<P> && !isHandle<P> && std::is_trivially_copyable_v<P>;
  else if constexpr (isRole<Struct, Role>)
    return pointer && std::is_trivially_copyable_v<P>;
  else if constexpr (isRole<Text, Role>)
    return std::is_same_v<T, const char*>;
  else if constexpr (isRole<HostAddress, Role>)
    return pointer;
  else if constexpr (isRole<Unused, Role>)
    return true;
  else if constexpr (isArrayRole<Array, Role>)
    return pointer;
  else if constexpr (isArrayRole<OutArray, Role>)
    return pointer && !std::is_const_v<P>;
  else if constexpr (isArrayRole<OutText, Role>)
    return std::is_same_v<T, char*>;
  else
    return false;
}

// ---- rows ----
template <class F>
struct Signature;
template <class... A>
struct Signature<CUresult(A...)> {
  using Arguments = std::tuple<A...>;
  static constexpr size_t arity = sizeof...(A);
};

template <class Function, class... Roles>
consteval bool rowFits() {
  using Arguments = typename Signature<Function>::Arguments;
  if constexpr (std::tuple_size_v<Arguments> != sizeof...(Roles))
    return false;
  else
    return []<size_t... I>(std::index_sequence<I...>) {
      return (roleFits<Roles, std::tuple_element_t<I, Arguments>>() && ...);
    }(std::index_sequence_for<Roles...>{});
}

template <Name N, class F, Client C, Worker W, class... Roles>
struct Row {
  static constexpr auto name = N;
  static constexpr uint32_t id = fnv32(N.view());
  static constexpr Client client = wayOf(C);
  static constexpr Worker worker = wayOf(W);
  static constexpr bool beforeInit = says(C, Client::BeforeInit);
  static constexpr bool inHostFunction = says(C, Client::InHostFunction);
  static constexpr bool cleanup = says(C, Client::Cleanup);
  static constexpr bool travels = worker != Worker::None;
  static constexpr bool beside = says(W, Worker::Beside);
  static constexpr bool aside = says(W, Worker::Aside);
  static constexpr bool recorded = says(W, Worker::Recorded);
  static constexpr bool setting = says(W, Worker::Setting);
  static constexpr bool loads = says(W, Worker::Loads);
  static constexpr bool varies = says(W, Worker::Varies);
  static constexpr bool polls = says(W, Worker::Polls);
  static constexpr bool unlogged = says(W, Worker::Unlogged);
  using Function = F;
  using Arguments = typename Signature<F>::Arguments;
  using RoleList = std::tuple<Roles...>;
  static constexpr size_t arity = sizeof...(Roles);

  static_assert(client == Client::Local || client == Client::Post || client == Client::Await ||
                    client == Client::Policy,
                "a row names one way for the client");
  static_assert(worker == Worker::None || worker == Worker::Generated || worker == Worker::Checked,
                "a row names one way for the worker");
  static_assert(travels || (arity == 0 && W == Worker::None),
                "a call that never travels has no roles and no flags for the worker");
  static_assert(!travels || Signature<F>::arity == arity, "a row names every parameter of its call");
  static_assert(!travels || rowFits<F, Roles...>(), "a role does not fit its parameter's type in cuda.h");
  static_assert(!travels || client != Client::Local, "a call that the client answers does not travel");
  static_assert(travels || client == Client::Local || client == Client::Policy,
                "a call that is sent by its row travels");
  static_assert(!travels || !inHostFunction, "while a host function runs, nothing may wait for a message");
  static_assert(!beside || !aside, "beside the executor or past it, not both");
  static_assert(recorded + setting + loads <= 1, "a call is kept in one way");
};

// Index of the parameter called `name`; a row that names none does not compile.
template <class R, Name N>
consteval size_t parameterIndex() {
  size_t found = R::arity, i = 0;
  [&]<class... Roles>(std::tuple<Roles...>*) {
    ((Roles::name.view() == N.view() ? (found = i, ++i) : ++i), ...);
  }(static_cast<typename R::RoleList*>(nullptr));
  if (found == R::arity) throw "no parameter of that name";
  return found;
}

// rowOf(NameTag<"cuX">{}) -> Row of that call, or NoRow.
namespace rows {
using enum Client;
using enum Worker;
template <Name N>
struct NameTag {};
struct NoRow {};
template <class T>
NoRow rowOf(T);

#define CALL(function, client, worker, ...)                                                 \
  Row<#function, decltype(::function), (client), (worker)__VA_OPT__(, ) __VA_ARGS__> rowOf( \
      NameTag<#function>);
#define SESSION_CALL(function, client, worker, ...) \
  Row<#function, decltype(function), (client), (worker)__VA_OPT__(, ) __VA_ARGS__> rowOf(NameTag<#function>);
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
}  // namespace rows
using rows::NoRow;

template <Name N>
using RowOf = decltype(rows::rowOf(rows::NameTag<N>{}));
template <class R>
inline constexpr bool isRow = !std::is_same_v<R, NoRow>;

// False if two of the names are the same, or have the same id: the worker knows a call by its id alone.
template <size_t Count>
consteval bool idsDiffer(const std::string_view (&names)[Count]) {
  std::array<uint32_t, Count> ids{};
  std::transform(std::begin(names), std::end(names), ids.begin(), fnv32);
  std::sort(ids.begin(), ids.end());
  return std::adjacent_find(ids.begin(), ids.end()) == ids.end();
}

// Fingerprint of every row that travels (name, words, roles and parameter sizes) and of kProtocolVersion
// (schema/frame.h). Client and worker must agree; a server starts the worker program that a client's names.
uint64_t rowsHash();

// Of the call with that id, for people; empty: there is none.
std::string_view callName(uint32_t id);

}  // namespace gpupool::schema
