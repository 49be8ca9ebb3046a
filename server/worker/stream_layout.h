#pragma once
// What follows a session's record on the state socket, as the record itself says it (session_state.h): for
// who sends it, who rebuilds the session, and who keeps the stream in a file. The record may be anybody's:
// what it says is not believed beyond its bounds.

#include <optional>
#include <span>
#include <vector>

#include "schema/record.capnp.h"
#include "schema/session_calls.h"

namespace gpupool::server {

inline constexpr uint64_t kMostRecordBytes = uint64_t{2} << 30;
inline constexpr size_t kImageAtOnce = size_t{4} << 20;

bool sameImage(const schema::ImageName& a, const schema::ImageName& b);
// The code image that a recorded call names in its arguments, if it is one that does.
std::optional<schema::ImageName> imageNamed(uint32_t call, std::span<const std::byte> arguments);
// All that the record's calls load, and what is here of those announced: each once.
std::vector<schema::ImageName> imagesOf(schema::SessionRecord::Reader record);
// How long the contents are that follow, one after the other; each travels in parts of its own
// (StateSocket::sendContent), those of no length not at all. None: it is more than a session can be.
std::optional<std::vector<uint64_t>> contentsOf(schema::SessionRecord::Reader record);

}  // namespace gpupool::server
