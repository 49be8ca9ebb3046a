#include "server/worker/stream_layout.h"

#include <algorithm>
#include <cstring>

#include "schema/frame.h"
#include "schema/rows.h"
#include "schema/wire.h"

namespace gpupool::server {

using schema::SessionRecord;

namespace {

constexpr uint64_t kMostContent = uint64_t{1} << 46;  // of all together

std::span<const std::byte> bytesOf(capnp::Data::Reader data) {
  return {reinterpret_cast<const std::byte*>(data.begin()), data.size()};
}

}  // namespace

bool sameImage(const schema::ImageName& a, const schema::ImageName& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

std::optional<schema::ImageName> imageNamed(uint32_t call, std::span<const std::byte> arguments) {
  schema::Reader in(arguments);
  if (call == schema::RowOf<"sessionModuleLoad">::id || call == schema::RowOf<"sessionLibraryLoad">::id) {
    in.value<uint64_t>();
  } else if (call == schema::RowOf<"sessionLinkAdd">::id) {
    in.value<uint64_t>();
    in.value<uint64_t>();
  } else {
    return std::nullopt;
  }
  const auto name = in.value<schema::ImageName>();
  return in.bad() ? std::nullopt : std::optional(name);
}

std::vector<schema::ImageName> imagesOf(SessionRecord::Reader record) {
  std::vector<schema::ImageName> names;
  for (const auto entry : record.getEntries()) {
    schema::Frame frame;
    const auto header = bytesOf(entry.getFrame());
    if (header.size() != sizeof frame) continue;  // who serves it again refuses it
    std::memcpy(&frame, header.data(), sizeof frame);
    if (const auto name = imageNamed(frame.call, bytesOf(entry.getArguments()))) names.push_back(*name);
  }
  for (const auto image : record.getImages()) {
    schema::ImageName& name = names.emplace_back();
    const auto bytes = bytesOf(image.getName());
    if (!image.getHere() || bytes.size() != sizeof name)
      names.pop_back();
    else
      std::memcpy(&name, bytes.data(), sizeof name);
  }
  const auto less = [](const schema::ImageName& a, const schema::ImageName& b) {
    return std::memcmp(&a, &b, sizeof a) < 0;
  };
  std::sort(names.begin(), names.end(), less);
  names.erase(std::unique(names.begin(), names.end(), sameImage), names.end());
  return names;
}

std::optional<std::vector<uint64_t>> contentsOf(SessionRecord::Reader record) {
  std::vector<uint64_t> lengths;
  uint64_t total = 0, device = 0;
  const auto counts = [&total](uint64_t bytes) {
    total = bytes > kMostContent ? kMostContent + 1 : std::min(kMostContent + 1, total + bytes);
    return bytes;
  };
  lengths.push_back(counts(record.getWordsBytes()));
  lengths.push_back(counts(record.getStagingBytes()));
  for (const auto host : record.getHost()) lengths.push_back(counts(host.getBytes()));
  for (const auto piece : record.getPieces()) device += counts(piece.getBytes());
  lengths.push_back(device);
  for (const auto variable : record.getVariables()) lengths.push_back(counts(variable.getBytes()));
  for (const auto array : record.getArrays()) lengths.push_back(counts(array.getBytes()));
  if (total > kMostContent) return std::nullopt;
  return lengths;
}

}  // namespace gpupool::server
