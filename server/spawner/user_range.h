#pragma once
// The user ids of workers: FIRST-LAST, as --worker-users has them. Workers' group id is FIRST.

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>

namespace gpupool::server {

struct UserRange {
  uid_t first = 0, last = 0;

  gid_t group() const { return first; }
  size_t count() const { return size_t{last} - first + 1; }
  bool has(uid_t user) const { return user >= first && user <= last; }
  std::string text() const { return std::to_string(first) + "-" + std::to_string(last); }
};

inline constexpr uid_t kFirstWorkerUser = 65'536;      // below are people, services, and "nobody"
inline constexpr uid_t kLastWorkerUser = 0x7fff'fffe;  // as a number with a sign it is still one
inline constexpr size_t kMostWorkerUsers = size_t{1} << 16;

// None: that is no range, or one with ids that are not workers' (kFirstWorkerUser, kLastWorkerUser), or too
// long a one.
std::optional<UserRange> parseUserRange(std::string_view text);

}  // namespace gpupool::server
