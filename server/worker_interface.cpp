#include "server/worker_interface.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace gpupool::server {
namespace {

constexpr size_t kMostRelease = 32;

// Takes "name=value" and the space behind it off the front.
std::optional<std::string_view> takeWord(std::string_view& line, std::string_view name) {
  if (!line.starts_with(name)) return std::nullopt;
  const std::string_view word = line.substr(0, line.find(' '));
  line.remove_prefix(std::min(line.size(), word.size() + 1));
  return word.substr(name.size());
}

template <class Number>
bool takeNumber(std::string_view& line, std::string_view name, int base, Number& out) {
  const auto word = takeWord(line, name);
  if (!word) return false;
  const auto [end, error] = std::from_chars(word->data(), word->data() + word->size(), out, base);
  return error == std::errc() && end == word->data() + word->size();
}

bool isPlain(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view(".+~-_").find(c) != std::string_view::npos;
}

}  // namespace

std::string textOf(const WorkerIdentity& identity) {
  char text[160];
  std::snprintf(text, sizeof text, "gpupool-worker interface=%u rows=%016llx frames=%u release=%s",
                identity.interface, static_cast<unsigned long long>(identity.rows), identity.frames,
                identity.release.c_str());
  return text;
}

std::optional<WorkerIdentity> parseWorkerIdentity(std::string_view line) {
  WorkerIdentity identity;
  if (!takeWord(line, "gpupool-worker")) return std::nullopt;
  if (!takeNumber(line, "interface=", 10, identity.interface) ||
      !takeNumber(line, "rows=", 16, identity.rows) || !takeNumber(line, "frames=", 10, identity.frames))
    return std::nullopt;
  const auto release = takeWord(line, "release=");
  if (!release || release->size() > kMostRelease || !std::all_of(release->begin(), release->end(), isPlain))
    return std::nullopt;
  identity.release = *release;
  return identity;
}

}  // namespace gpupool::server
