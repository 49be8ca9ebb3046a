#include "server/worker/page_layout.h"

#include <algorithm>

namespace gpupool::server {

std::vector<uint32_t> pagesOf(std::span<const uint64_t> contents) {
  std::vector<uint32_t> pages;
  uint32_t shared = 0;  // bytes of short contents, one behind the other
  const auto close = [&] {
    if (shared != 0) pages.push_back(shared);
    shared = 0;
  };
  for (uint64_t left : contents) {
    if (left >= kPageBytes || shared + left > kPageBytes) close();
    if (left < kPageBytes) {
      shared += static_cast<uint32_t>(left);
      continue;
    }
    for (; left != 0; left -= pages.back())
      pages.push_back(static_cast<uint32_t>(std::min<uint64_t>(left, kPageBytes)));
  }
  close();
  return pages;
}

}  // namespace gpupool::server
