#pragma once
// One row per driver call (design.md §3): its kind and the role of every parameter, checked against cuda.h.
//
// A chapter file schema/calls/<chapter>.h is a list of
//     CALL(cuMemsetD8Async, Post, In<"dst">, In<"value">, In<"count">, Handle<"stream">)
// and is included several times with different meanings of CALL: once here, to define the row types; the
// client adds exports, the worker handlers, tools the coverage report.

#include <string_view>
#include <tuple>
#include <type_traits>

#include "schema/cuda.h"
#include "schema/handles.h"
#include "schema/names.h"
#include "schema/session_calls.h"

namespace gpupool::schema {

// Local: answered in the client. Post: sent, success at once. Await: one round trip. MayBlock: an Await that
// the worker serves beside its executor, because the driver may take long. Custom: the row fixes the bytes, a
// function in client/calls/ the policy. Aside: needs nothing of the driver, and goes past every frame that
// does (schema/frame.h); posted or awaited.
enum class Kind : uint8_t { Local, Post, Await, MayBlock, Custom, Aside };

// ---- roles: what a parameter is
// ------------------------------------------------------------------------------------
template <Name N>
struct In {
  static constexpr auto name = N;
};  // a scalar or small struct by value
template <Name N>
struct Device {
  static constexpr auto name = N;
};  // CUdevice: an ordinal of the lease
template <Name N>
struct Handle {
  static constexpr auto name = N;
};  // a handle by value
template <Name N>
struct Mints {
  static constexpr auto name = N;
};  // T*: a new handle, named by the client
template <Name N>
struct Frees {
  static constexpr auto name = N;
};  // a handle that dies with this call
template <Name N>
struct OutHandle {
  static constexpr auto name = N;
};  // T*: a handle the worker names
template <Name N>
struct Out {
  static constexpr auto name = N;
};  // T*: plain data in the reply; may be null
template <Name N>
struct InOut {
  static constexpr auto name = N;
};  // T*: both ways
template <Name N>
struct DeviceValue {
  static constexpr auto name = N;
};  // T*: a value kernels see; recorded
template <Name N>
struct Struct {
  static constexpr auto name = N;
};  // const T*: plain data, handles inside mapped
template <Name N>
struct Text {
  static constexpr auto name = N;
};  // const char*
template <Name N>
struct HostAddress {
  static constexpr auto name = N;
};  // memory both sides have at one address
template <Name N>
struct Unused {
  static constexpr auto name = N;
};  // not sent; the worker passes zero
template <Name N, Name Count>
struct Array {  // const T*: plain data or handles
  static constexpr auto name = N;
  static constexpr auto count = Count;
};
template <Name N, Name Count>
struct OutArray {  // T*, capacity and length in the size_t* parameter `Count`; may be null
  static constexpr auto name = N;
  static constexpr auto count = Count;
};
template <Name N, Name Count>
struct OutText {  // char* with its capacity in the int parameter `Count`
  static constexpr auto name = N;
  static constexpr auto count = Count;
};

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

// ---- rows
// ------------------------------------------------------------------------------------------------------------
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
    }
  (std::index_sequence_for<Roles...>{});
}

template <Name N, class F, Kind K, class... Roles>
struct Row {
  static_assert(Signature<F>::arity == sizeof...(Roles), "a row names every parameter of its call");
  static_assert(rowFits<F, Roles...>(), "a role does not fit its parameter's type in cuda.h");
  static constexpr auto name = N;
  static constexpr Kind kind = K;
  static constexpr uint32_t id = fnv32(N.view());
  using Function = F;
  using Arguments = typename Signature<F>::Arguments;
  using RoleList = std::tuple<Roles...>;
  static constexpr size_t arity = sizeof...(Roles);
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
template <Name N>
struct NameTag {};
struct NoRow {};
template <class T>
NoRow rowOf(T);

#define CALL(function, kind, ...) \
  Row<#function, decltype(::function), Kind::kind __VA_OPT__(, ) __VA_ARGS__> rowOf(NameTag<#function>);
#define SESSION_CALL(function, kind, ...) \
  Row<#function, decltype(function), Kind::kind __VA_OPT__(, ) __VA_ARGS__> rowOf(NameTag<#function>);
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL

template <Name N>
using RowOf = decltype(rowOf(NameTag<N>{}));
template <class R>
inline constexpr bool isRow = !std::is_same_v<R, NoRow>;

// Fingerprint of every row: name, kind, roles and parameter sizes. Client and worker must agree.
uint64_t rowsHash();

}  // namespace gpupool::schema
