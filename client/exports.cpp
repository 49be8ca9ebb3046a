// Every exported symbol. An export is an ifunc whose resolver returns the entry of its row: the symbol gets
// its historical signature from cuda.h and no parameter list is written twice. Resolvers run while the
// library is being relocated: they return an address and touch nothing.
#include "client/exports.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "base/log.h"
#include "client/entry.h"

namespace gpupool::client {

bool tracing = [] {
  const char* on = std::getenv("GPUPOOL_TRACE");
  return on != nullptr && *on == '1';
}();

CUresult notSupported(const char* name, std::atomic<bool>& said) {
  if (!said.exchange(true))
    GPUPOOL_WARNING("%s is not supported by gpupool; it returns CUDA_ERROR_NOT_SUPPORTED", name);
  return CUDA_ERROR_NOT_SUPPORTED;
}

void traceCall(std::string_view name, CUresult result) {
  std::fprintf(stderr, "gpupool trace: %.*s -> %d\n", static_cast<int>(name.size()), name.data(), result);
}

namespace {

template <schema::Name Symbol>
CUresult CUDAAPI unsupported() noexcept {
  static std::atomic<bool> said{false};
  return notSupported(Symbol.text, said);
}

// cuX_ptsz and cuX_ptds stand on cuX's row.
consteval size_t baseLength(std::string_view symbol) {
  for (std::string_view suffix : {"_ptsz", "_ptds"})
    if (symbol.ends_with(suffix)) return symbol.size() - suffix.size();
  return symbol.size();
}
template <schema::Name Symbol>
consteval auto baseName() {
  constexpr size_t length = baseLength(Symbol.view());
  char text[length + 1] = {};
  std::copy_n(Symbol.text, length, text);
  return schema::Name<length + 1>(text);
}

template <schema::Name Symbol, class F>
constexpr void* addressOf() {
  if constexpr (schema::isRow<schema::RowOf<Symbol>>) {
    return reinterpret_cast<void*>(&Entry<Symbol, false, schema::RowOf<Symbol>, F>::call);
  } else {
    using Base = schema::RowOf<baseName<Symbol>()>;
    if constexpr (schema::isRow<Base>)
      return reinterpret_cast<void*>(&Entry<Symbol, true, Base, F>::call);
    else
      return reinterpret_cast<void*>(&unsupported<Symbol>);
  }
}

template <schema::Name Symbol>
bool isSupported() {
  using R = schema::RowOf<baseName<Symbol>()>;
  using Own = schema::RowOf<Symbol>;
  using Used = std::conditional_t<schema::isRow<Own>, Own, R>;
  if constexpr (!schema::isRow<Used>)
    return false;
  else if constexpr (Used::client == schema::Client::Local || Used::client == schema::Client::Policy)
    return Policy<Used::name>::get() != nullptr;
  else
    return true;
}

}  // namespace

std::span<const Export> exports() {
  static const auto* table = [] {
    auto* list = new std::vector<Export>{
#define NAME(name) {#name, addressOf<#name, decltype(::name)>(), isSupported<#name>()},
#include "schema/names.def"
#undef NAME
    };
    std::sort(list->begin(), list->end(), [](auto& a, auto& b) { return std::strcmp(a.name, b.name) < 0; });
    return list;
  }();
  return *table;
}

#define NAME(name)                                                                                   \
  extern "C" __attribute__((visibility("hidden"), used, no_sanitize("all"))) auto resolve_##name() { \
    return reinterpret_cast<decltype(&::name)>(addressOf<#name, decltype(::name)>());                \
  }
#include "schema/names.def"
#undef NAME

}  // namespace gpupool::client

#define NAME(name) \
  extern "C" __attribute__((visibility("default"), ifunc("resolve_" #name))) decltype(::name) name;
#include "schema/names.def"
#undef NAME

// What tells this library from a real driver of the same file name (server/driver.cpp refuses it).
extern "C" __attribute__((visibility("default"))) const char gpupoolClientVersion[] = "gpupool 0.1.0";
