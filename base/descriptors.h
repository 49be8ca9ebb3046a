#pragma once
// How many descriptors a process may have (getrlimit(2), RLIMIT_NOFILE).

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>

namespace gpupool {

// Raises the limit to 65,536, or the most that this process may ask for, and returns it. Services start with
// 1,024 for the sake of select(2), which nothing here uses; a manager has a connection a lease.
inline size_t raiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  const rlimit raised{std::max(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, 65536)), limit.rlim_max};
  if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  return static_cast<size_t>(limit.rlim_cur);
}

}  // namespace gpupool
