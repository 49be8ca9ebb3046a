#include "server/spawner/user_range.h"

#include <charconv>

namespace gpupool::server {
namespace {

bool readNumber(std::string_view text, uid_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size();
}

}  // namespace

std::optional<UserRange> parseUserRange(std::string_view text) {
  const size_t dash = text.find('-');
  UserRange range;
  if (dash == text.npos || !readNumber(text.substr(0, dash), range.first) ||
      !readNumber(text.substr(dash + 1), range.last))
    return std::nullopt;
  if (range.first < kFirstWorkerUser || range.last > kLastWorkerUser || range.last < range.first ||
      range.count() > kMostWorkerUsers)
    return std::nullopt;
  return range;
}

}  // namespace gpupool::server
