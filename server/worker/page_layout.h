#pragma once
// How a session's contents (stream_layout.h) are cut into pages, for who sends a checkpoint in pages and who
// keeps it (session_pages.h). Both compute it from the record.

#include <cstdint>
#include <span>
#include <vector>

#include "schema/id.h"

namespace gpupool::server {

inline constexpr uint32_t kPageBytes = uint32_t{2} << 20;

// The lengths of the pages, which are all contents one behind the other. A content of a page or more begins a
// page of its own, and only its last one may be shorter. Shorter ones share a page, each whole, as long as
// they fit.
std::vector<uint32_t> pagesOf(std::span<const uint64_t> contents);

// A block on the state socket: this, and for each page 8 bytes: the number of a page of `base` that has the
// same bytes, or kNewPage: its bytes follow.
struct PagesHeader {
  Id base;  // Id(): none
  Id id;    // the checkpoint's own
};
inline constexpr uint64_t kNewPage = UINT64_MAX;

}  // namespace gpupool::server
