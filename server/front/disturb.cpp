#include "server/front/disturb.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/options.h"

namespace gpupool::server {
namespace {

constexpr struct {
  Disturb::Kind kind;
  std::string_view name;
  const char* workerOption;
} kKinds[] = {
    {Disturb::Kind::suspend, "suspend", "--disturb"},
    {Disturb::Kind::move, "move", "--disturb-moves"},
    {Disturb::Kind::stream, "stream", "--disturb-streams"},
    {Disturb::Kind::files, "files", "--disturb-moves"},
    {Disturb::Kind::kill, "kill", "--disturb-kills"},
    {Disturb::Kind::begin, "begin", "--disturb-beginnings"},
    {Disturb::Kind::server, "server", "--disturb-kills"},
};

}  // namespace

std::vector<std::string> Disturb::workerArguments() const {
  for (const auto& row : kKinds)
    if (row.kind == kind) return {row.workerOption, seed};
  return {};
}

Disturb disturbOfEnvironment() {
  const char* text = std::getenv("GPUPOOL_DISTURB");
  if (text == nullptr || *text == '\0') return {};
  const std::string_view value(text);
  const size_t colon = std::min(value.find(':'), value.size());
  const std::string_view seed = value.substr(std::min(colon + 1, value.size()));
  if (!seed.empty() && seed.find_first_not_of("0123456789") == seed.npos)
    for (const auto& row : kKinds)
      if (row.name == value.substr(0, colon)) return {row.kind, std::string(seed)};
  throw options::OptionError("GPUPOOL_DISTURB: '" + std::string(value) +
                             "' is none of suspend:NUMBER, move:NUMBER, stream:NUMBER, files:NUMBER, "
                             "kill:NUMBER, begin:NUMBER and server:NUMBER");
}

}  // namespace gpupool::server
