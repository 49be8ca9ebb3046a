#pragma once
// What a server may be called. The name is in paths of sockets, in addresses of the REST interface and,
// before a ':', in SERVER:GPU.

#include <algorithm>
#include <string>

namespace gpupool::schema {

inline constexpr size_t kMostServerName = 63;
inline constexpr char kServerNameRule[] =
    "1 to 63 letters, digits and . _ - , of which the first is a letter or a digit";

inline bool isServerName(const std::string& name) {
  const auto isWord = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  };
  return !name.empty() && name.size() <= kMostServerName && isWord(name[0]) &&
         std::all_of(name.begin(), name.end(),
                     [&](char c) { return isWord(c) || c == '.' || c == '_' || c == '-'; });
}

}  // namespace gpupool::schema
