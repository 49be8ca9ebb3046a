// The coverage report: every function of the driver library and how the client answers it. Linked with the
// client's own objects, so it tells what is there, not what was planned. A row's function that is missing,
// and a name without a row, are "not supported": they log their name once and return
// CUDA_ERROR_NOT_SUPPORTED.
//   call-coverage [--totals]

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "client/exports.h"
#include "schema/rows.h"

namespace {

using namespace gpupool;
using schema::Kind;

// The name whose row an export stands on: its own, or that of the default-stream variants' base.
consteval std::string_view withoutSuffix(std::string_view symbol) {
  for (std::string_view suffix : {"_ptsz", "_ptds"})
    if (symbol.ends_with(suffix)) return symbol.substr(0, symbol.size() - suffix.size());
  return symbol;
}

const std::map<std::string_view, Kind>& rowKinds() {
  static const std::map<std::string_view, Kind> kinds = {
#define CALL(function, kind, ...) {#function, Kind::kind},
#define SESSION_CALL(...)
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
  };
  return kinds;
}

const char* nameOf(Kind kind) {
  switch (kind) {
    case Kind::Local:
      return "Local";
    case Kind::Post:
      return "Post";
    case Kind::Await:
    case Kind::MayBlock:  // one round trip too; the worker serves it beside its executor
    case Kind::Aside:     // the session's own alone
      return "Await";
    case Kind::Custom:
      return "Custom";
  }
  return "?";
}

constexpr char kNotSupported[] = "not supported";

const char* answer(const client::Export& entry, std::string_view base) {
  if (!entry.supported) return kNotSupported;
  const auto& kinds = rowKinds();
  auto row = kinds.find(entry.name);
  if (row == kinds.end()) row = kinds.find(base);
  return row == kinds.end() ? kNotSupported : nameOf(row->second);
}

}  // namespace

int main(int count, char** words) {
  const bool all = count < 2 || std::strcmp(words[1], "--totals") != 0;
  static constexpr std::pair<const char*, std::string_view> kNames[] = {
#define NAME(name) {#name, withoutSuffix(#name)},
#include "schema/names.def"
#undef NAME
  };
  std::map<std::string_view, int> totals;
  for (const client::Export& entry : client::exports()) {
    const auto named = std::find_if(std::begin(kNames), std::end(kNames),
                                    [&](const auto& one) { return std::strcmp(one.first, entry.name) == 0; });
    if (named == std::end(kNames)) {
      std::fprintf(stderr, "%s is exported, but no name of the driver's\n", entry.name);
      return 1;
    }
    const char* kind = answer(entry, named->second);
    ++totals[kind];
    if (all) std::printf("%-13s %s\n", kind, entry.name);
  }
  int sum = 0, supported = 0;
  for (const char* kind : {"Local", "Post", "Await", "Custom", kNotSupported}) {
    std::printf("%s%-13s %d\n", sum == 0 && all ? "\n" : "", kind, totals[kind]);
    sum += totals[kind];
    if (kind != kNotSupported) supported += totals[kind];
  }
  std::printf("%-13s %d, %d supported\n", "functions", sum, supported);
  return sum == static_cast<int>(std::size(kNames)) ? 0 : 1;
}
