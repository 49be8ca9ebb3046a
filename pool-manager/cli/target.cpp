#include "pool-manager/cli/target.h"

#include <charconv>
#include <optional>

#include "base/options.h"

namespace gpupool::cli {
namespace {

// "1", "0,1". None: it is no such list.
std::optional<std::vector<uint32_t>> readOrdinals(const std::string& text) {
  std::vector<uint32_t> ordinals;
  for (const char* at = text.data();; ++at) {
    uint32_t ordinal = 0;
    const auto [end, error] = std::from_chars(at, text.data() + text.size(), ordinal);
    if (error != std::errc()) return std::nullopt;
    ordinals.push_back(ordinal);
    if (end == text.data() + text.size()) return ordinals;
    if (*end != ',') return std::nullopt;
    at = end;
  }
}

}  // namespace

pool::MoveTarget readTarget(const std::string& text) {
  if (text.empty()) return {};
  if (auto own = readOrdinals(text)) return {"", std::move(*own), false};
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return {text, {}, false};
  auto ordinals = readOrdinals(text.substr(colon + 1));
  if (colon == 0 || !ordinals)
    throw options::OptionError("--to: '" + text +
                               "' is neither GPU[,GPU...], SERVER nor SERVER:GPU[,GPU...]");
  return {text.substr(0, colon), std::move(*ordinals), false};
}

}  // namespace gpupool::cli
