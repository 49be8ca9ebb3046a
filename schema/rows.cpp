#include "schema/rows.h"

#include "schema/frame.h"

namespace gpupool::schema {
namespace {

// A number per role, so that a changed role changes the fingerprint.
template <class Role>
constexpr char roleCode() {
  if constexpr (isRole<In, Role>)
    return 'i';
  else if constexpr (isRole<Device, Role>)
    return 'd';
  else if constexpr (isRole<Handle, Role>)
    return 'h';
  else if constexpr (isRole<Mints, Role>)
    return 'm';
  else if constexpr (isRole<Frees, Role>)
    return 'f';
  else if constexpr (isRole<OutHandle, Role>)
    return 'n';
  else if constexpr (isRole<Out, Role>)
    return 'o';
  else if constexpr (isRole<InOut, Role>)
    return 'b';
  else if constexpr (isRole<DeviceValue, Role>)
    return 'v';
  else if constexpr (isRole<Struct, Role>)
    return 's';
  else if constexpr (isRole<Text, Role>)
    return 't';
  else if constexpr (isRole<HostAddress, Role>)
    return 'p';
  else if constexpr (isRole<Unused, Role>)
    return 'u';
  else if constexpr (isArrayRole<Array, Role>)
    return 'a';
  else if constexpr (isArrayRole<OutArray, Role>)
    return 'r';
  else
    return 'x';
}

template <class T>
constexpr size_t pointedSize() {
  using P = std::remove_pointer_t<T>;
  if constexpr (std::is_pointer_v<T> && !isHandle<T> && !std::is_void_v<P> && !std::is_function_v<P>)
    return sizeof(P);
  else
    return sizeof(T);
}

template <class R>
constexpr uint64_t addRow(uint64_t hash) {
  hash = fnv64(R::name.view(), hash);
  auto add = [&](size_t v) {
    char c[4] = {static_cast<char>(v), static_cast<char>(v >> 8), static_cast<char>(v >> 16), 0};
    hash = fnv64({c, 4}, hash);
  };
  add(static_cast<size_t>(R::worker) | size_t{R::beside} << 8 | size_t{R::aside} << 9);
  [&]<class... Roles, class... A>(std::tuple<Roles...>*, std::tuple<A...>*) {
    (add(static_cast<size_t>(roleCode<Roles>()) | pointedSize<A>() << 8), ...);
  }(static_cast<typename R::RoleList*>(nullptr), static_cast<typename R::Arguments*>(nullptr));
  return hash;
}
template <class R>
  requires(!R::travels)
constexpr uint64_t addRow(uint64_t hash) {
  return hash;
}

// While it is compiled: the code of 600 instances takes a compiler longer, instrumented minutes.
consteval uint64_t hashOfAll() {
  uint64_t hash = fnv64("gpupool rows");
  const char frames[] = {static_cast<char>(kProtocolVersion), static_cast<char>(kProtocolVersion >> 8)};
  hash = fnv64({frames, sizeof frames}, hash);
#define CALL(function, ...) hash = addRow<RowOf<#function>>(hash);
#define SESSION_CALL(function, ...) hash = addRow<RowOf<#function>>(hash);
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
  return hash;
}

constexpr std::string_view kNames[] = {
#define CALL(function, ...) std::string_view(#function),
#define SESSION_CALL(function, ...) std::string_view(#function),
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
};
static_assert(idsDiffer(kNames),
              "two rows have the same name, or names with the same id: rename a session call");
static_assert(!idsDiffer({"cuInit", "cuInit"}) && !idsDiffer({"costarring", "liquid"}));

}  // namespace

uint64_t rowsHash() { return hashOfAll(); }

std::string_view callName(uint32_t id) {
  for (const std::string_view name : kNames)
    if (fnv32(name) == id) return name;
  return {};
}

}  // namespace gpupool::schema
